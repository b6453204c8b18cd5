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


STAGED = """schema_version = "1.1"
[agent]
timeout_sec = 40.0
[verifier]
timeout_sec = 20.0
[verifier.env]
WHO = "all"
[environment]
allow_internet = false
[[steps]]
name = "make"
min_reward = 1.0
[steps.agent]
timeout_sec = 30.0
[[steps]]
name = "greet"
[steps.verifier]
timeout_sec = 10.0
[steps.verifier.env]
WHO = "you"
[steps.healthcheck]
command = "test -f /app/made"
interval_sec = 0.01
retries = 2
"""


def make_staged(parent: Path, name: str = "two-stages", *, toml: str = STAGED) -> Path:
    """A Harbor task in two stages: a file `made`, then a file `greeting` that holds what stage two brings."""
    folder = parent / name
    texts = {
        "task.toml": toml,
        "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n",
        "tests/write.sh": 'write() { echo "$1" > /logs/verifier/reward.txt; }\n',
        "steps/make/instruction.md": "Make made.\n",
        "steps/make/tests/test.sh": ". /tests/write.sh\n[ -f made ] && write 1 || write 0\n",
        "steps/make/solution/solve.sh": "touch made\n",
        "steps/greet/instruction.md": "<!-- some canary GUID 1 -->\nGreet.\n",
        "steps/greet/workdir/name.txt": "you\n",
        "steps/greet/workdir/setup.sh": 'cp name.txt kept.txt; rm -- "$0"\n',
        "steps/greet/tests/test.sh": '. /tests/write.sh\n[ "$(cat greeting)" = "$WHO" ] && write 1 || write 0.5\n',
        "steps/greet/solution/solve.sh": "cp kept.txt greeting\n",
    }
    for relative, text in texts.items():
        path = folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder
