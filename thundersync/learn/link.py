"""The coordinator's end of one trainer worker: starts the process, talks to it in order, and notices its death.

Knows nothing of steps and groups. A worker that dies or breaks fails every waiting call within a second, with the
last lines of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq
import zmq.asyncio

from thundersync.errors import CheckpointFailed, WorkerLost
from thundersync.generate.child import log_tail
from thundersync.learn import messages as m

R = TypeVar("R", bound=m.Reply)

START_LIMIT_S = 600.0
"""For a hang only: a death is noticed at once, and libraries on a cold or shared disk may take minutes to load."""
END_LIMIT_S = 10.0
FELLOW_LIMIT_S = 1.0
"""For the kernel to tell that another worker has ended."""


class WorkerLink:
    """One worker process. `call` may be used by several tasks; requests are answered in the order they were sent."""

    program: tuple[str, ...] = ("-m", "thundersync.learn.worker")
    """What Python runs in it."""

    def __init__(self, index: int, *, log_path: Path, environment: Mapping[str, str]) -> None:
        self.index = index
        self._log_path = log_path
        self._environment = environment
        self.folder = _private_folder()
        """For its socket and its weight arena; the worker removes it when this process is killed."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._peer = b""
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self.waiting = 0
        """Calls that are answered or wait for their turn."""
        self._number = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(m.AnyReply)
        self._busy_s = 0.0
        self._busy_since_s: float | None = None
        self.fellows: Sequence[WorkerLink] = ()
        """All workers that compute together with this one."""

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def start(self, setup: m.Setup) -> m.Ready:
        """Start the process and let it load the policy. Raises WorkerLost."""
        endpoint = f"ipc://{self.folder}/socket"
        self._socket.bind(endpoint)
        with self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *self.program,
                f"--endpoint={endpoint}",
                f"--parent={os.getpid()}",
                f"--folder={self.folder}",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self._environment),
                start_new_session=True,  # Ctrl-C is ours to handle: the worker ends when we say so
            )
        self._peer, *_ = await self._receive(START_LIMIT_S, "start")
        return await self.call(setup, m.Ready, limit_s=600.0)

    async def call(self, request: m.AnyRequest, expected: type[R], *, limit_s: float) -> R:
        """Send `request`, wait for its reply. Raises WorkerLost when the worker dies, breaks, or exceeds `limit_s`."""
        self.waiting += 1
        try:
            return await self._call(request, expected, limit_s)
        finally:
            self.waiting -= 1

    async def _call(self, request: m.AnyRequest, expected: type[R], limit_s: float) -> R:
        async with self._turn:
            self._busy_since_s = began_s = time.monotonic()
            self._number += 1
            number = self._number.to_bytes(8, "big")
            try:
                await self._socket.send_multipart((self._peer, number, self._encoder.encode(request)))
                payload = await self._reply(number, limit_s, type(request).__name__)
            finally:
                self._busy_s += time.monotonic() - began_s
                self._busy_since_s = None
        reply = self._decoder.decode(payload)
        if isinstance(reply, expected):
            return reply
        if isinstance(reply, m.NotSaved):
            raise CheckpointFailed(reply.error)
        if isinstance(reply, m.Broken):
            if reply.by_another and (culprit := await self._killed_fellow()):
                raise culprit
            raise self._lost(f"broke on {type(request).__name__}: {reply.error}")
        raise self._lost(f"answered {type(reply).__name__} to {type(request).__name__}")

    def busy_so_far_s(self, now_s: float) -> float:
        """Seconds spent in calls since the start: the worker computes, or its message is on the way."""
        return self._busy_s + (now_s - self._busy_since_s if self._busy_since_s is not None else 0.0)

    async def close(self) -> None:
        """End the process, politely first, and remove its socket. Idempotent, bounded."""
        try:
            await self._end()
        finally:
            self._socket.close()
            self._context.destroy(linger=0)
            shutil.rmtree(self.folder, ignore_errors=True)

    async def _end(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(WorkerLost, TimeoutError, zmq.ZMQError):
                # One that has not said hello yet cannot be told; a busy one is not waited for: nothing it does is kept.
                if self._peer and not self._turn.locked():
                    async with asyncio.timeout(END_LIMIT_S / 2):
                        await self.call(m.Stop(), m.Done, limit_s=END_LIMIT_S / 2)
                        await process.wait()
            if process.returncode is None:
                process.kill()
                async with asyncio.timeout(END_LIMIT_S):
                    await process.wait()

    async def _reply(self, number: bytes, limit_s: float, what: str) -> bytes:
        """The reply to request `number`; those to calls that were cancelled before are passed over."""
        deadline_s = time.monotonic() + limit_s
        while True:
            _, answered, payload = await self._receive(max(0.0, deadline_s - time.monotonic()), what)
            if answered == number:
                return payload

    async def _receive(self, limit_s: float, what: str) -> list[bytes]:
        """The next message's frames, unless the process ends or the time is up first."""
        assert self._process is not None
        message = asyncio.ensure_future(self._socket.recv_multipart())
        death = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait((message, death), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not message.done() and death.done():
                # Its last words may still be on the way.
                await asyncio.wait((message,), timeout=0.2)
            if message.done():
                return message.result()
            if death.done():
                raise self._lost(f"{_ending(death.result())} during {what}")
            raise self._lost(f"did not answer {what} within {limit_s:.0f} s")
        finally:
            for waiting in (message, death):
                waiting.cancel()

    async def _killed_fellow(self) -> WorkerLost | None:
        """The error of the worker that was killed, if this one broke only because that one went away."""
        deadline_s = time.monotonic() + FELLOW_LIMIT_S
        while time.monotonic() < deadline_s:
            for fellow in self.fellows:
                code = fellow._process.returncode if fellow._process is not None else None
                if code not in (None, 0, 1):
                    return fellow._lost(_ending(code))
            await asyncio.sleep(0.05)
        return None

    @property
    def arena_path(self) -> Path:
        """Where the worker makes the file it publishes weights in."""
        return self.folder / "weights"

    def _lost(self, what: str) -> WorkerLost:
        return WorkerLost(
            f"trainer worker {self.index} (process {self.pid}) {what}\n{log_tail(self._log_path)}",
            remedy=f"The whole log is {self._log_path}. Continue from the last checkpoint with --resume.",
        )


def _ending(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (by hand, or by the system when memory ran out)"
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _private_folder() -> Path:
    """In shared memory where there is one: weights are published through it."""
    shared = Path("/dev/shm")
    where = shared if shared.is_dir() and os.access(shared, os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix=f"thundersync-{os.getpid()}-", dir=where))
