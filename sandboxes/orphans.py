"""What a killed owner left of process sandboxes: found by a word on their command lines, and ended.

A box needs no files to be found again: whoever made it stands on the command line of each of its processes, with the
PID namespace that the number means something in. Knows nothing of how boxes are made.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from sandboxes.owner import Owner

WORD = "thundersync-owner="
_PROC = Path("/proc")


def owner_word() -> str:
    """To stand on the command line of a box that this process makes."""
    return WORD + Owner.current().word


def end_orphans() -> set[str]:
    """Kill every process whose command line names an owner that has certainly ended; returns the boxes they were of.
    Owners in other PID namespaces cannot be judged from here, and are left alone."""
    boxes: set[str] = set()
    for entry in _PROC.iterdir():
        words = _command_line(entry) if entry.name.isdigit() else []
        named = [word for word in words if word.startswith(WORD)]
        owner = Owner.from_word(named[-1].removeprefix(WORD)) if named else None
        if owner is not None and owner.is_gone():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(entry.name), signal.SIGKILL)
                boxes.add(words[-2] if len(words) > 1 else words[-1])  # a box may have written what it likes there
    return boxes


def _command_line(entry: Path) -> list[str]:
    try:
        return (entry / "cmdline").read_bytes().rstrip(b"\0").decode(errors="replace").split("\0")
    except OSError:
        return []
