"""What a killed owner left of process sandboxes: found by a word on their command lines, and ended.

A box needs no files to be found again: whoever made it stands on the command line of each of its processes, with the
PID namespace that the number means something in. Knows nothing of how boxes are made.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from msgspec import structs

from sandboxes.owner import Owner

WORD = "thundersync-owner="
_PROC = Path("/proc")


def owner_word() -> str:
    """To stand on the command line of a box that this process makes."""
    owner = Owner.current()
    return f"{WORD}{owner.namespace}:{owner.pid}:{owner.started}"


def end_orphans() -> int:
    """Kill every process whose command line names an owner that has certainly ended; returns how many boxes they were
    of. Owners in other PID namespaces cannot be judged from here, and are left alone."""
    me = Owner.current()
    boxes: set[bytes] = set()
    for entry in _PROC.iterdir() if me.namespace else ():
        words = _command_line(entry) if entry.name.isdigit() else []
        named = [word for word in words if word.startswith(WORD.encode())]
        if not named:
            continue
        namespace, _, rest = named[-1].decode(errors="replace").removeprefix(WORD).partition(":")
        pid, _, started = rest.partition(":")
        if namespace != me.namespace or not pid.isdigit() or not started:
            continue
        if structs.replace(me, pid=int(pid), started=started).is_gone():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(entry.name), signal.SIGKILL)
                boxes.add(words[-2] if len(words) > 1 else named[-1])
    return len(boxes)


def _command_line(entry: Path) -> list[bytes]:
    try:
        return (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return []
