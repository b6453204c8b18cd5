"""A tmux terminal in a sandbox: keys in, the screen out. For agents that use programs with a screen of their own.

Its programs live as long as every command of the sandbox is this terminal's; any other command ends them, and so the
checker finds nothing running.
"""

import asyncio
import secrets
import shlex
from collections.abc import Sequence

from sandboxes.base import Command, Sandbox
from sandboxes.errors import RuntimeUnavailable, SandboxGone

PASTE_BYTES = 1 << 20
"""More in one piece is not typing; write a file."""
PROMPT_S = 10.0
"""The longest wait for the shell's first prompt."""
MISSING = 127


class Terminal:
    """One terminal of `columns` x `rows` with a bash in it. `history` lines are kept above the screen."""

    def __init__(self, sandbox: Sandbox, *, columns: int = 160, rows: int = 40, history: int = 10_000) -> None:
        self._sandbox = sandbox
        self._columns, self._rows, self._history = columns, rows, history
        self._socket = f"/tmp/.tmux-{secrets.token_hex(6)}"

    async def start(self) -> None:
        """Open it. Raises: RuntimeUnavailable when the sandbox has no tmux; SandboxGone."""
        size = f"-x {self._columns} -y {self._rows}"
        # The limit counts for terminals made after it.
        await self._tmux(
            f"start-server ';' set-option -g history-limit {self._history} ';' set-option -g status off ';' "
            f"new-session -d -s main {size} bash --noprofile --norc"
        )
        # Keys that come before its prompt would be shown twice.
        waited_s = 0.0
        while not await self.screen() and waited_s < PROMPT_S:
            await asyncio.sleep(0.05)
            waited_s += 0.05

    async def press(self, keys: Sequence[str]) -> None:
        """Press keys by tmux's names (`Enter`, `C-c`, `Up`); what is not a name is typed. Raises: SandboxGone."""
        await self._tmux(f"send-keys -t main -- {shlex.join(keys)}")

    async def type(self, text: str) -> None:
        """Type `text` as it is, line breaks too. Raises: ValueError for more than 1 MiB; SandboxGone."""
        data = text.encode("utf-8", "replace")
        if len(data) > PASTE_BYTES:
            raise ValueError(f"{len(data)} bytes are more than a terminal takes at once ({PASTE_BYTES})")
        # send-keys refuses more than 16 KiB; a buffer does not, and takes no byte for a key's name.
        await self._tmux("load-buffer -b typed - ';' paste-buffer -d -r -b typed -t main", stdin=data)

    async def screen(self, *, with_history: bool = False) -> str:
        """What is on the screen now, and what is kept above it; without blanks at line ends. Raises: SandboxGone."""
        lines = await self._tmux(f"capture-pane -p -t main {'-S -' if with_history else ''}", output_bytes=1 << 22)
        return lines.rstrip("\n")

    async def busy(self) -> bool:
        """Whether something runs there: its shell does not sleep at its prompt. Raises: SandboxGone."""
        pane = await self._tmux("display-message -p -t main '#{pane_pid}'")
        stat = await self._sandbox.run(Command(script=f"cat /proc/{pane.strip()}/stat", keeps_running=True))
        # Behind the name, which may hold anything: state, parent, group, session, terminal, the terminal's group.
        fields = stat.stdout.rpartition(b")")[2].split()
        return len(fields) < 6 or fields[0] != b"S" or fields[2] != fields[5]

    async def close(self) -> None:
        """End it and everything in it. Raises: SandboxGone."""
        await self._sandbox.kill_all()

    async def _tmux(self, arguments: str, *, stdin: bytes = b"", output_bytes: int = 65536) -> str:
        script = (
            f"command -v tmux >/dev/null || exit {MISSING}; exec tmux -u -f /dev/null -S {self._socket} {arguments}"
        )
        result = await self._sandbox.run(
            Command(
                script=script,
                stdin=stdin,
                env={"TERM": "screen-256color"},
                keeps_running=True,
                output_limit_bytes=output_bytes,
            )
        )
        if result.exit_code == MISSING:
            raise RuntimeUnavailable("the sandbox has no tmux", remedy="Install tmux in the task's image.")
        if result.exit_code != 0:
            said = result.stderr.decode("utf-8", "replace").strip()
            raise SandboxGone(self._sandbox.sandbox_id, f"its terminal ended ({said})")
        return result.stdout.decode("utf-8", "replace")
