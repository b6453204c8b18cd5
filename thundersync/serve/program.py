"""A program of the user's as the agent: started once per rollout, told by its environment where its policy is.

Place in the flow: acts in a session, as `agents.Visitors` do. The program runs on this machine as this user, knows its
policy as an OpenAI- or Anthropic-compatible server, and ends when it is done; nothing of it outlives its rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sandboxes.shield import finish
from thundersync.core.types import Outcome
from thundersync.rollout.attempt import Broken
from thundersync.serve.session import Session

TAIL_BYTES = 4000
"""Of what a program prints: enough to say why it failed."""
KILL_S = 5.0
"""Between asking a program to end and ending it."""
MOST_INSTRUCTION_BYTES = 120_000
"""Linux takes one variable of 128 KiB."""


class Program:
    """`command` is its command line, `environment` what it inherits, `url` where the endpoint is."""

    offers = False

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], url: Callable[[], str]) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._url = url

    async def act(self, session: Session) -> Outcome | None:
        """Run it to its end. Raises: Broken when it cannot start or fails."""
        if len(session.task.instruction.encode()) > MOST_INSTRUCTION_BYTES:
            detail = f"the instruction of {session.task.task_id} does not fit into a program's environment"
            raise Broken("agent", detail)
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=self._environment | program_environment(session, self._url()),
                start_new_session=True,
            )
        except OSError as error:
            raise Broken("function", f"the agent program {self._command[0]} could not be started: {error}") from error
        said = _Tail()
        reading = asyncio.create_task(said.read(process.stdout))
        ending = asyncio.create_task(process.wait())
        try:
            both: set[asyncio.Future[Any]] = {ending, session.ending.over}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if session.ending.over.done():
                await asyncio.wait({ending}, timeout=KILL_S)  # it has said so itself, and may be about to end
        finally:
            await finish(_end(process, reading, ending), limit_s=3 * KILL_S)
        if session.ending.over.done():
            return session.ending.over.result()
        code = ending.result()
        if code != 0 and session.ending.limit is None:
            raise Broken("function", f"the agent program ended with exit code {code}; its last words: {said.text}")
        session.ending.end()
        return session.ending.over.result()


def program_environment(session: Session, url: str) -> dict[str, str]:
    """Where a program finds its policy and its task."""
    here = f"{url}/sessions/{session.session_id}"
    return {
        "OPENAI_BASE_URL": f"{here}/v1",
        "OPENAI_API_BASE": f"{here}/v1",
        "OPENAI_API_KEY": session.key,
        "ANTHROPIC_BASE_URL": here,
        "ANTHROPIC_API_KEY": session.key,
        "THUNDERSYNC_SESSION_URL": here,
        "THUNDERSYNC_SESSION_KEY": session.key,
        "THUNDERSYNC_MODEL": session.rules.model,
        "THUNDERSYNC_TASK_ID": session.task.task_id,
        "THUNDERSYNC_INSTRUCTION": session.task.instruction,
    }


class _Tail:
    """The end of what a program prints."""

    def __init__(self) -> None:
        self._kept = b""

    async def read(self, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        while chunk := await stream.read(1 << 16):
            self._kept = (self._kept + chunk)[-TAIL_BYTES:]

    @property
    def text(self) -> str:
        return self._kept.decode(errors="replace").strip() or "(it said nothing)"


async def _end(process: asyncio.subprocess.Process, reading: asyncio.Task[None], ending: asyncio.Task[int]) -> None:
    """Nothing of its process group is left after this, and what it said has been read."""
    if process.returncode is None:
        _signal(process.pid, signal.SIGTERM)
        await asyncio.wait({ending}, timeout=KILL_S)
    _signal(process.pid, signal.SIGKILL)  # what it had started and left behind
    await ending
    await asyncio.wait({reading}, timeout=1.0)
    reading.cancel()
    await asyncio.wait({reading})


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
