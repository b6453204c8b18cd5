"""Questions to one sandbox's agent and its answers, one at a time. Knows the frames, not what carries them.

A question that is cut short, by its deadline or by a cancelled caller, leaves bytes under way that belong to nobody:
the channel is then out of step for good, and so is the sandbox behind it. `sandboxes.agent` is the other end.
"""

import asyncio
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from sandboxes.errors import DiskFull, FileMissing, FileRefused, FileTooLarge, SandboxGone

Field = bytes | str | int
"""One field of a message; text travels as UTF-8, numbers as decimal digits."""

CHUNK_BYTES = 1 << 18
MAX_ANSWER_BYTES = 1 << 30
"""More than any answer that was asked for: a longer one means that the stream is broken."""


class Carrier(Protocol):
    """Bytes to and from an agent: a pair of pipes, or a container's attached streams."""

    async def read(self) -> bytes:
        """Some bytes of the agent's output; empty at its end."""

    async def write(self, data: bytes) -> None:
        """Returns when more may be written. Raises OSError or RuntimeError if the agent is gone."""

    async def complaint(self) -> str:
        """What the agent or its launcher said on its error stream; for messages about a dead agent."""


class Channel:
    """Calls to one agent. `sandbox_id` names it in errors."""

    def __init__(self, carrier: Carrier, sandbox_id: str) -> None:
        self._carrier = carrier
        self._sandbox_id = sandbox_id
        self._buffer = bytearray()
        self._lock = asyncio.Lock()
        self._broken = ""

    @property
    def broken(self) -> str:
        """Why no call can be made any more; empty while all is well."""
        return self._broken

    def shut(self, reason: str) -> None:
        """Refuse every later call with this reason."""
        self._broken = self._broken or reason

    async def call(self, fields: Sequence[Field], *, deadline_s: float) -> list[bytes]:
        """Send one message and return the fields of its answer.

        Raises: SandboxGone when the agent is dead, late, or out of step; FileMissing, FileTooLarge, FileRefused when
        the sandbox's operating system refused.
        """
        async with self._lock:
            if self._broken:
                raise SandboxGone(self._sandbox_id, self._broken)
            self._broken = "a call was cut short, so the channel to its agent is out of step"
            try:
                async with asyncio.timeout(deadline_s):
                    for chunk in _chunks(_packed(fields)):
                        await self._carrier.write(chunk)
                    answer = [await self._field() for _ in range(await self._number())]
            except TimeoutError as error:
                self._broken = f"its agent did not answer within {deadline_s:.0f} s"
                raise SandboxGone(self._sandbox_id, self._broken) from error
            except (OSError, EOFError, RuntimeError) as error:
                said = await self._carrier.complaint()
                self._broken = f"its agent ended ({said or error})"
                raise SandboxGone(self._sandbox_id, self._broken) from error
            self._broken = ""
        match answer:
            case [b"ok", *rest]:
                return rest
            case [b"os", code, message]:
                raise _os_error(code.decode(), message.decode("utf-8", "replace"))
            case _:
                self._broken = "its agent answered nonsense"
                raise SandboxGone(self._sandbox_id, self._broken)

    async def _field(self) -> bytes:
        return await self._exactly(await self._number())

    async def _number(self) -> int:
        return int.from_bytes(await self._exactly(4), "big")

    async def _exactly(self, size: int) -> bytes:
        if size > MAX_ANSWER_BYTES:
            raise EOFError(f"an answer of {size} bytes was announced")
        while len(self._buffer) < size:
            data = await self._carrier.read()
            if not data:
                raise EOFError("end of stream")
            self._buffer += data
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken


def _packed(fields: Sequence[Field]) -> Iterator[bytes]:
    yield struct.pack(">I", len(fields))
    for field in fields:
        # Text sampled by a model may hold halves of surrogate pairs, which no encoding has: they become "?".
        data = field if isinstance(field, bytes) else str(field).encode("utf-8", "replace")
        yield struct.pack(">I", len(data))
        yield data


def _chunks(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in few pieces: small fields joined, large ones cut."""
    pending = bytearray()
    for part in parts:
        if len(part) < CHUNK_BYTES:
            pending += part
            if len(pending) < CHUNK_BYTES:
                continue
            part = b""
        yield bytes(pending)
        pending.clear()
        for start in range(0, len(part), CHUNK_BYTES):
            yield part[start : start + CHUNK_BYTES]
    if pending:
        yield bytes(pending)


def _os_error(code: str, message: str) -> FileRefused:
    if code in ("ENOENT", "ENOTDIR"):
        return FileMissing(f"no such file in the sandbox: {message}")
    if code == "EFBIG":
        return FileTooLarge(f"too large: {message}")
    if code in ("ENOSPC", "EDQUOT"):
        return DiskFull(f"the sandbox's disk is full: {message}", remedy="Give it more (disk_mib) or write less.")
    return FileRefused(f"the sandbox refused: {message}")
