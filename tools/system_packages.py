"""The few things pip cannot bring: installed with apt-get where we are root and it exists, else one plain sentence.

Nothing here stops the setup: thundersync runs without them, with fewer kinds of sandbox, and `doctor` says so.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence


def ensure_bubblewrap(say: Callable[[str], None]) -> None:
    """bubblewrap isolates the commands that an agent runs where there is no Docker."""
    if sys.platform.startswith("linux") and not present("bwrap"):
        install(["bubblewrap"], "isolates the agent's commands without Docker", say)


def ensure_test_prerequisites(say: Callable[[str], None]) -> None:
    """Docker Engine (its sandbox tests start a private daemon), zstd, and a browser for the report's test; a test that
    misses one is skipped."""
    if not sys.platform.startswith("linux"):
        return
    # Newer Debians keep Docker's command line in a package of its own, older ones do not know that package.
    for package, program in (("docker.io", "dockerd"), ("docker-cli", "docker"), ("zstd", "zstd")):
        if not present(program):
            install([package], "for the tests", say)
    if not any(map(present, ("chromium", "chromium-browser", "google-chrome"))):
        install(["chromium"], "for the tests", say)


def present(program: str) -> bool:
    # Daemons live in /usr/sbin, which an ordinary user's PATH may lack.
    return (
        shutil.which(program) is not None or shutil.which(program, path="/usr/sbin:/sbin:/usr/local/sbin") is not None
    )


def install(packages: Sequence[str], purpose: str, say: Callable[[str], None]) -> None:
    """Install Debian packages as root; otherwise say the one command to run."""
    names = " ".join(packages)
    if shutil.which("apt-get") is None:
        say(f"{names} missing ({purpose}); install with your system's package manager")
        return
    if os.geteuid() != 0:
        say(f"{names} missing ({purpose}); to install: sudo apt-get install {names}")
        return
    say(f"installing the system package(s) {names} with apt-get ({purpose})")
    apt = ["apt-get", "-qq", "-y", "-o", "DPkg::Lock::Timeout=120"]
    get = [*apt, "--no-install-recommends", "install", *packages]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (get, [*apt, "update"], get):  # the lists of a fresh image are empty: then update, and try again
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode == 0 and command is get:
            return
    reason = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
    say(f"could not install {names}: {''.join(reason)}; going on without")
