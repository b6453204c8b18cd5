"""A box's standard streams as a carrier, and the start and end of its launcher. Knows not what runs inside."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence

from sandboxes.bwrap import LAUNCH_ENV
from sandboxes.errors import CloseFailed


class Pipes:
    """The pipes to one launcher."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def open(self, argv: list[str], fds: Sequence[int]) -> None:
        """Start the launcher, which inherits `fds`, in a session of its own: Ctrl-C reaches us only, and we take the
        boxes down in order."""
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *argv, stdin=pipe, stdout=pipe, stderr=pipe, env=LAUNCH_ENV, cwd="/", start_new_session=True, pass_fds=fds
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stdin, self._stdout, self._stderr = self._process.stdin, self._process.stdout, self._process.stderr

    async def read(self) -> bytes:
        return await self._stdout.read(1 << 18)

    async def write(self, data: bytes) -> None:
        self._stdin.write(data)
        await self._stdin.drain()

    async def complaint(self) -> str:
        with contextlib.suppress(TimeoutError, RuntimeError):
            async with asyncio.timeout(1.0):
                return (await self._stderr.read(4096)).decode("utf-8", "replace").strip()
        return ""

    async def end(self, sandbox_id: str) -> None:
        """Close the agent's input and wait for the launcher, which ends after the box. Raises: CloseFailed."""
        process = self._process
        if process is None:
            return
        self._stdin.close()
        try:
            async with asyncio.timeout(5.0):
                await process.wait()
        except TimeoutError:
            # The group, not the launcher alone: killed in the middle of its start, it leaves a half-made child behind
            # that waits for it for ever, not yet bound to die with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            try:
                async with asyncio.timeout(5.0):
                    await process.wait()
            except TimeoutError as error:
                raise CloseFailed(f"box {sandbox_id} (process {process.pid}) will not end") from error
        # Read what nobody will, or the event loop keeps the pipes open.
        for stream in (self._stdout, self._stderr):
            with contextlib.suppress(RuntimeError, TimeoutError):
                async with asyncio.timeout(1.0):
                    while await stream.read(1 << 18):
                        pass
