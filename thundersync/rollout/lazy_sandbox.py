"""A sandbox that starts when it is first used, and the same as an agent function sees it, with its commands told.

Place in the flow: between `sandboxes` and functions of a program that embeds the engine, many of which need no sandbox
at all. Knows nothing of tasks, tokens or rewards.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path

import msgspec

from sandboxes.base import Command, Origin, Result, Sandbox
from sandboxes.errors import SandboxError
from thundersync.core.types import RolloutId, Turn
from thundersync.monitor.events import ToolFinished, ToolStarted
from thundersync.rollout.attempt import Emit
from thundersync.rollout.protocol import observation


class LazySandbox:
    """One rollout's sandbox. `open_one` makes it, once, at its first use; whoever made this closes it."""

    def __init__(self, open_one: Callable[[], AbstractAsyncContextManager[Sandbox]], *, rollout_id: RolloutId) -> None:
        self._open_one = open_one
        self._rollout_id = rollout_id
        self._stack = AsyncExitStack()
        self._starting = asyncio.Lock()
        self._sandbox: Sandbox | None = None
        self._closed = False
        self.abandoned = False
        """A start of it was given up by whoever waited: what the rollout was about to do, it could not."""

    @property
    def started(self) -> bool:
        return self._sandbox is not None

    @property
    def sandbox_id(self) -> str:
        """Of the sandbox; the rollout's until there is one."""
        return self._sandbox.sandbox_id if self._sandbox is not None else self._rollout_id

    @property
    def origin(self) -> Origin:
        """Of the sandbox; empty while there is none."""
        return self._sandbox.origin if self._sandbox is not None else Origin()

    async def run(self, command: Command) -> Result:
        return await (await self._started()).run(command)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await (await self._started()).write(path, data, mode=mode)

    async def read(self, path: str, *, limit_bytes: int = 1 << 24) -> bytes:
        return await (await self._started()).read(path, limit_bytes=limit_bytes)

    async def put_tree(self, source: Path, target: str) -> None:
        await (await self._started()).put_tree(source, target)

    async def get_tree(self, source: str, target: Path, *, limit_bytes: int = 1 << 28) -> None:
        await (await self._started()).get_tree(source, target, limit_bytes=limit_bytes)

    async def kill_all(self) -> None:
        """Nothing runs in a sandbox that never started."""
        if self._sandbox is not None:
            await self._sandbox.kill_all()

    async def close(self) -> None:
        """Idempotent. One that is being started by a task that the function left behind is waited for, and closed."""
        self._closed = True
        async with self._starting:
            self._sandbox = None
            await self._stack.aclose()

    async def _started(self) -> Sandbox:
        async with self._starting:
            if self._closed:
                raise SandboxError(
                    f"the sandbox of rollout {self._rollout_id} was used after the rollout had ended",
                    remedy="Await everything that an agent function starts before it returns.",
                )
            if self._sandbox is None:
                self.abandoned = True
                self._sandbox = await self._stack.enter_async_context(self._open_one())
                self.abandoned = False
            return self._sandbox


class ToldSandbox:
    """The same sandbox while an agent function works in it: viewers are told of its commands, turns record them."""

    def __init__(
        self, sandbox: Sandbox, turns: list[Turn], *, rollout_id: RolloutId, limit_chars: int, emit: Emit
    ) -> None:
        """`turns`: the attempt's; a command belongs to the last one. `limit_chars` of its output are kept."""
        self._sandbox = sandbox
        self._turns = turns
        self._rollout_id = rollout_id
        self._limit_chars = limit_chars
        self._emit = emit

    @property
    def sandbox_id(self) -> str:
        return self._sandbox.sandbox_id

    @property
    def origin(self) -> Origin:
        return self._sandbox.origin

    async def run(self, command: Command) -> Result:
        turn = len(self._turns) - 1
        number = self._turns[turn].index if self._turns else 0
        self._emit(ToolStarted(at_s=time.time(), rollout_id=self._rollout_id, turn=number, command=command.script))
        began_s = time.monotonic()
        exit_code = -1
        try:
            result = await self._sandbox.run(command)
            exit_code = result.exit_code
        finally:
            tool_s = time.monotonic() - began_s
            self._emit(
                ToolFinished(
                    at_s=time.time(), rollout_id=self._rollout_id, turn=number, exit_code=exit_code, tool_s=tool_s
                )
            )
        if turn >= 0:
            self._record(turn, command, result, tool_s)
        return result

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self._sandbox.write(path, data, mode=mode)

    async def read(self, path: str, *, limit_bytes: int = 1 << 24) -> bytes:
        return await self._sandbox.read(path, limit_bytes=limit_bytes)

    async def put_tree(self, source: Path, target: str) -> None:
        await self._sandbox.put_tree(source, target)

    async def get_tree(self, source: str, target: Path, *, limit_bytes: int = 1 << 28) -> None:
        await self._sandbox.get_tree(source, target, limit_bytes=limit_bytes)

    async def kill_all(self) -> None:
        await self._sandbox.kill_all()

    async def close(self) -> None:
        """Left to the rollout, whose reward may still need it."""

    def _record(self, index: int, command: Command, result: Result, tool_s: float) -> None:
        turn = self._turns[index]
        output = observation(
            (result.stdout + result.stderr).decode(errors="replace"),
            exit_code=result.exit_code,
            limit_chars=self._limit_chars,
            cut_bytes=result.stdout_cut_bytes + result.stderr_cut_bytes,
            timed_out_s=command.timeout_s if result.timed_out else None,
            oom=result.oom_killed,
        )
        self._turns[index] = msgspec.structs.replace(
            turn,
            command="\n".join(filter(None, [turn.command, command.script])),
            output="\n".join(filter(None, [turn.output, output])),
            exit_code=result.exit_code,
            tool_s=turn.tool_s + tool_s,
        )
