"""Runs pip for `setup.py`: shows that it lives, keeps its log, and turns its commonest failures into remedies."""

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

QUIET_S = 20.0
"""Between two signs of life where there is no terminal to redraw."""

NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeoutError|Temporary failure in name resolution"
    r"|Network is unreachable|ReadTimeoutError|Read timed out|ProxyError|Cannot connect to proxy"
)
NO_CERTIFICATE = re.compile(r"CERTIFICATE_VERIFY_FAILED|SSLCertVerificationError")
NO_SPACE = re.compile(r"No space left on device|Errno 28")
NO_CPU_TORCH = re.compile(
    r"(satisfies the requirement|No matching distribution found for) torch==\S*\+cpu"
    r"|depends on torch==\S+\+cpu|The user requested \(constraint\) torch\S*==\S*\+cpu"
)
NOT_FOUND = re.compile(r"No matching distribution found for ([^\s;()]+)")


class SetupError(Exception):
    """Setup cannot go on; `remedy` says what the user can do about it."""

    def __init__(self, message: str, *, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


def pip_install(python: str, arguments: list[str], *, log: Path, say: Callable[[str], None]) -> None:
    """`pip install` with these arguments, then `pip check`. No compiler is ever needed: only wheels are taken.

    Raises: SetupError with a remedy.
    """
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    command = [*pip, "install", "--only-binary", ":all:", "--retries", "2", "--progress-bar", "off", *arguments]
    watch = Watch(say, live=sys.stdout.isatty())
    with log.open("w") as written, log.open(errors="replace") as seen:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                watch.see(seen.readlines())
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.5)
            watch.see(seen.readlines())
        finally:
            watch.clear()
            end(process)
    code = process.returncode
    if code != 0:
        raise explain(log.read_text(errors="replace"), log)
    checked = subprocess.run([*pip, "check"], capture_output=True, text=True, check=False)
    if checked.returncode != 0:
        raise SetupError(
            f"the installed packages do not fit together: {checked.stdout.strip()[:800]}",
            remedy="Remove .venv and run setup again; if it stays, report it with this text.",
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """After a Ctrl-C, which pip got as well: let it end in its own way, but not for ever."""
    try:
        process.wait(timeout=15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Watch:
    """Follows pip's output: one line that is redrawn on a terminal, else a line now and then."""

    def __init__(self, say: Callable[[str], None], *, live: bool) -> None:
        self._say = say
        self._live = live
        self._packages: set[str] = set()
        self._doing = "starting pip"
        self._shown_at = time.monotonic()

    def see(self, lines: list[str]) -> None:
        """Take pip's new lines, none where it is silent: unpacking takes a minute or two without a word."""
        for line in lines:
            collecting = re.match(r"(?:Collecting|Requirement already satisfied:) ([A-Za-z0-9._-]+)", line)
            if collecting:
                self._packages.add(collecting[1].lower())
                self._doing = f"{len(self._packages)} packages found, now {collecting[1]}"
            elif line.startswith("Installing collected packages"):
                self._doing = f"unpacking {line.count(',') + 1} packages"
        if self._live:
            print(f"\r\033[K    {self._doing[:70]}", end="", flush=True)
        elif time.monotonic() - self._shown_at > QUIET_S:
            self._shown_at = time.monotonic()
            self._say(self._doing)

    def clear(self) -> None:
        if self._live:
            print("\r\033[K", end="", flush=True)


def explain(output: str, log: Path) -> SetupError:
    """The error behind pip's output. Order matters: without a network pip ends on a missing package too."""
    if NO_SPACE.search(output):
        return SetupError(
            "the disk became full during the installation",
            remedy="Free some space (pip also unpacks in the temporary folder: TMPDIR moves it), then run setup again.",
        )
    if NO_CERTIFICATE.search(output):
        return SetupError(
            "the package index's certificate was not accepted",
            remedy="Behind a proxy that inspects TLS, point PIP_CERT at its certificate, then run setup again.",
        )
    if NO_NETWORK.search(output) and ("(from versions: none)" in output or "Max retries exceeded" in output):
        return SetupError(
            "the package index cannot be reached",
            remedy="Check the network and pip's settings (pip config list: index, proxy), then run setup again.",
        )
    if NO_CPU_TORCH.search(output):
        return SetupError(
            "pip finds no CPU build of PyTorch (torch==2.13.0+cpu), which the CPU build of vLLM needs",
            remedy="Point pip at PyTorch's CPU wheel index (PyTorch's install page shows its address), for instance "
            "with PIP_EXTRA_INDEX_URL, or at a folder with that wheel with PIP_FIND_LINKS; then run setup again.",
        )
    missing = NOT_FOUND.search(output)
    if missing and missing[1].startswith("setuptools"):
        return SetupError(
            "the package index has not even setuptools: it is not reached, or not the right one",
            remedy="Check pip's settings (pip config list: index-url, proxy), then run setup again.",
        )
    if missing:
        return SetupError(
            f"pip finds no wheel of {missing[1]} for this machine",
            remedy="Is the index complete? Without a vLLM wheel for this platform, use --extra none. "
            f"pip's output: {log}",
        )
    errors = [line for line in output.splitlines() if line.startswith(("ERROR", "error", "  error"))]
    tail = "\n     ".join((errors or output.splitlines())[-8:])
    return SetupError(f"pip failed:\n     {tail}", remedy=f"The whole output is in {log}; run setup again to retry.")
