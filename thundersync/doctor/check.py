"""What a check says, and the one way to ask another program: the common words of the doctor's checks."""

import subprocess
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

State = Literal["ok", "warn", "fail"]
GIB = 1 << 30
SETUP = "Run: python3 tools/setup.py"
COMMAND_DEADLINE_S = 10.0


class Check(Struct, frozen=True, kw_only=True):
    """One fact about the machine. `warn`: a run works, with less; `fail`: it will not work until `remedy` is done."""

    name: str
    state: State
    found: str
    remedy: str = ""


def run(command: Sequence[str], *, deadline_s: float = COMMAND_DEADLINE_S) -> str | None:
    """Standard output of a command that succeeds in time."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
