"""Who a sandbox belongs to, so that what a killed owner left behind can be told from what a living one uses.

A process number alone is not enough, since numbers are used again, and mean something in one PID namespace only: its
start time, the machine's boot and the namespace go with it.
"""

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

import psutil
from msgspec import Struct, structs

PREFIX = "thundersync.owner."
# Anybody can put a word on a command line, whoever is in a box too: no number that Python or the kernel would refuse.
_WORD = re.compile(r"(?P<namespace>[^:]+):(?P<pid>[0-9]{1,10}):(?P<started>.+)", re.DOTALL)


class Owner(Struct, frozen=True, kw_only=True):
    """One process of one machine since one boot."""

    pid: int
    started: str
    """Start time in a form that never changes while the process lives."""
    boot: str
    host: str
    """Another machine may share a Docker daemon with us; its processes cannot be judged from here."""
    namespace: str
    """Of process numbers: a container that shares our host name may have its own. Empty where the kernel does not say,
    and in labels of versions that did not either."""

    @classmethod
    def current(cls) -> "Owner":
        pid = os.getpid()
        return cls(pid=pid, started=_started(pid), boot=_boot(), host=platform.node(), namespace=_namespace())

    @classmethod
    def from_labels(cls, labels: Mapping[str, str]) -> "Owner | None":
        """The owner that `labels()` wrote; None if the labels are not ours."""
        try:
            return cls(
                pid=int(labels[f"{PREFIX}pid"]),
                started=labels[f"{PREFIX}started"],
                boot=labels[f"{PREFIX}boot"],
                host=labels[f"{PREFIX}host"],
                namespace=labels.get(f"{PREFIX}namespace", ""),
            )
        except (KeyError, ValueError):
            return None

    def labels(self) -> dict[str, str]:
        return {
            f"{PREFIX}pid": str(self.pid),
            f"{PREFIX}started": self.started,
            f"{PREFIX}boot": self.boot,
            f"{PREFIX}host": self.host,
            f"{PREFIX}namespace": self.namespace,
        }

    @classmethod
    def from_word(cls, word: str) -> "Owner | None":
        """The owner on this machine since this boot that `word` was made of; None if it is not ours."""
        match = _WORD.fullmatch(word)
        if match is None:
            return None
        return structs.replace(
            cls.current(), namespace=match["namespace"], pid=int(match["pid"]), started=match["started"]
        )

    @property
    def word(self) -> str:
        """The owner in one short word, for what ends with the machine: command lines, control groups."""
        return f"{self.namespace}:{self.pid}:{self.started}"

    def is_gone(self) -> bool:
        """True only when the process has certainly ended."""
        if self.host != platform.node():
            return False
        if self.boot != _boot():
            return True
        return self.namespace == _namespace() and _started(self.pid) != self.started


def _started(pid: int) -> str:
    """Start time of a process; empty if there is none. A zombie has ended."""
    try:
        # Clock ticks since boot: unlike a wall-clock time they do not move when the clock is set.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return ""
    except ProcessLookupError:
        return ""
    try:
        return str(int(psutil.Process(pid).create_time()))
    except psutil.NoSuchProcess:
        return ""


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        return ""


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except FileNotFoundError:
        return str(int(psutil.boot_time()))
