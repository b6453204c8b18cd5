"""Task folders for tests: a complete one, to be spoiled one piece at a time."""

from pathlib import Path

TOML = 'version = "1.0"\n\n[verifier]\ntimeout_sec = 30.0\n\n[environment]\nmemory = "1G"\nallow_internet = false\n'


def make_folder(parent: Path, name: str = "say-hello", *, toml: str = TOML) -> Path:
    """A Harbor task that asks for a file `hello.txt`."""
    folder = parent / name
    texts = {
        "task.toml": toml,
        "instruction.md": "Create hello.txt.\n",
        "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n",
        "tests/test.sh": "#!/bin/bash\ntest -f /app/hello.txt\necho $((1 - $?)) > /logs/verifier/reward.txt\n",
        "solution/solve.sh": "#!/bin/bash\ntouch hello.txt\n",
    }
    for relative, text in texts.items():
        path = folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder
