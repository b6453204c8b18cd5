"""A container without an agent: the same questions answered by one `docker exec` each. For images without python3.

Twenty times slower than the agent. Process 1 is a shell that ends with its input, when its time is up, or when root
in the container tells it to, and kills everything else on request: it is the one process that kill(-1) spares.
Needs sh, cat, mkdir, mv, stat, date and sleep in the image (busybox has them all), and tar for whole folders.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import aiodocker
from msgspec import Struct

from sandboxes.agent import Capture
from sandboxes.channel import Field
from sandboxes.container import FOREIGN, Container
from sandboxes.errors import DiskFull, FileMissing, FileRefused, FileTooLarge, SandboxGone
from sandboxes.scripts import FOLDERS, INIT, IRREGULAR, MISSING, READ, RUN, TAR, TARGET, UNTAR, WRITE
from sandboxes.tararchive import entries_to_tar, tar_to_entries

SETTLE_S = 10.0
POLL_S = 0.5
"""How often a command whose output goes on is asked whether it has ended."""
BEGIN_POLL_S = 0.02
"""How often a command is asked whether it has begun, which takes the daemon 50 ms."""
FILE_TIMEOUT_S = 100.0


def init_argv(ttl_s: float) -> list[str]:
    """The command line of process 1."""
    return ["sh", "-c", INIT, "init", str(max(1, round(ttl_s)))]


class Ended(Struct, frozen=True):
    """What an exec came to."""

    exit_code: int
    out: Capture
    err: Capture
    timed_out: bool
    oom_killed: bool

    @property
    def said(self) -> str:
        return self.err.kept().decode("utf-8", "replace").strip() or f"exit code {self.exit_code}"


class ExecChannel:
    """Takes the agent's messages (`agent.Agent` lists their fields) and answers them as the agent would.

    `width` bounds the starts of execs of all sandboxes together: the daemon does no more at once anyway. A command that
    runs holds none of it.
    """

    def __init__(self, container: Container, width: asyncio.Semaphore) -> None:
        self._container = container
        self._width = width
        self._lock = asyncio.Lock()
        self._broken = ""
        self._buffer = bytearray()
        self._oom_kills = 0

    def shut(self, reason: str) -> None:
        """Refuse every later call with this reason."""
        self._broken = self._broken or reason

    async def call(self, fields: Sequence[Field], *, deadline_s: float) -> list[bytes]:
        """Answer one message. Raises: SandboxGone, FileMissing, FileTooLarge, FileRefused, DiskFull."""
        async with self._lock:
            if self._broken:
                raise SandboxGone(self._container.name, self._broken)
            self._broken = "a call was cut short, so its state is out of step"
            try:
                async with asyncio.timeout(deadline_s):
                    answer = await self._answer(list(fields))
            except FileRefused:
                self._broken = ""
                raise
            except TimeoutError as error:
                self._broken = f"it did not answer within {deadline_s:.0f} s"
                raise SandboxGone(self._container.name, self._broken) from error
            except (*FOREIGN, EOFError) as error:
                self._broken = f"its container ended ({await self._container.complaint() or error})"
                raise SandboxGone(self._container.name, self._broken) from error
            self._broken = ""
            return answer

    async def _answer(self, fields: list[Field]) -> list[bytes]:
        operation, *rest = fields
        match operation:
            case "hello":
                self._oom_kills = int(await self._line())
                return await self._hello(rest)
            case "run":
                return await self._run(rest)
            case "write":
                path, mode, content = rest
                assert isinstance(content, bytes)
                await self._as_root(WRITE, [str(path), f"{int(mode):o}"], stdin=content)
                return []
            case "read":
                return await self._read(str(rest[0]), int(rest[1]))
            case "unpack":
                return await self._unpack(str(rest[0]), rest[2:])
            case "pack":
                return await self._pack(str(rest[0]), int(rest[1]))
            case _:
                await self._kill()
                return []

    async def _hello(self, rest: list[Field]) -> list[bytes]:
        # Time, limits, files and environment are the container's settings here; what is left are the folders.
        limits = int(rest[1])
        at = 3 + 2 * limits
        words: list[str] = []
        for _ in range(int(rest[at - 1])):
            path, mode, uid = rest[at : at + 3]
            words += [str(path), f"{int(mode):o}", str(uid)]
            at += 3
        await self._as_root(FOLDERS, words)
        return [b""]

    async def _run(self, rest: list[Field]) -> list[bytes]:
        uid, timeout_ms, limit, keep, cwd, stdin = rest[:6]
        argc = int(rest[6])
        argv = [_word(one) for one in rest[7 : 7 + argc]]
        pairs = [_word(one) for one in rest[8 + argc :]]
        env = dict(zip(pairs[::2], pairs[1::2], strict=True))
        started = time.monotonic()
        assert isinstance(stdin, bytes)
        ended = await self._exec(
            ["sh", "-c", RUN, "sandbox", _word(cwd), *argv],
            user=int(uid),
            env=env,
            stdin=stdin,
            timeout_s=int(timeout_ms) / 1000,
            limit=int(limit),
            keep=bool(int(keep)),
        )
        status = ended.exit_code << 8  # as wait(2) says it; 128 + signal stays an exit code
        numbers = [status, int(ended.timed_out), int(ended.oom_killed), int((time.monotonic() - started) * 1000)]
        told = [ended.out.kept(), b"%d" % ended.out.total, ended.err.kept(), b"%d" % ended.err.total]
        return [b"%d" % number for number in numbers] + told

    async def _read(self, path: str, limit: int) -> list[bytes]:
        ended = await self._exec(["sh", "-c", READ, "read", path, str(limit)], limit=2 * limit + 200)
        if ended.exit_code == MISSING:
            raise FileMissing(f"no such file in the sandbox: {path}")
        if ended.exit_code == IRREGULAR:
            raise FileRefused(f"the sandbox refused: not a regular file: {path}")
        self._refuse(ended)
        size, _, content = ended.out.kept().partition(b"\n")
        return [size, content]

    async def _unpack(self, target: str, entries: list[Field]) -> list[bytes]:
        named = [(entry[0], entry[1]) for entry in zip(*[iter(entries)] * 5, strict=True)]
        folders = [name if isinstance(name, bytes) else str(name).encode() for kind, name in named if _is(kind, "d")]
        if any(b"\n" in folder for folder in folders):
            raise FileRefused("a folder has a line break in its name, which a sandbox without python3 cannot take")
        ended = await self._as_root(TARGET, [target], stdin=b"".join(folder + b"\n" for folder in folders))
        archive = await asyncio.to_thread(entries_to_tar, entries, owner=int(ended.out.kept()))
        await self._as_root(UNTAR, [target], stdin=archive)
        return []

    async def _pack(self, source: str, limit: int) -> list[bytes]:
        ended = await self._exec(["sh", "-c", TAR, "pack", source], limit=2 * (2 * limit + (1 << 20)))
        if ended.exit_code == MISSING:
            raise FileMissing(f"no such folder in the sandbox: {source}")
        self._refuse(ended)
        if ended.out.total > len(ended.out.kept()):
            raise FileTooLarge(f"{source} has more than {limit} bytes")
        return await asyncio.to_thread(tar_to_entries, ended.out.kept(), limit_bytes=limit)

    async def _as_root(self, script: str, words: list[str], *, stdin: bytes = b"") -> Ended:
        ended = await self._exec(["sh", "-c", script, "set-up", *words], stdin=stdin, limit=8192)
        self._refuse(ended)
        return ended

    def _refuse(self, ended: Ended) -> None:
        if ended.exit_code == 0:
            return
        if "o space left" in ended.said:
            raise DiskFull(f"the sandbox's disk is full: {ended.said}", remedy="Give it more (disk_mib) or write less.")
        raise FileRefused(f"the sandbox refused: {ended.said}")

    async def _exec(
        self,
        argv: list[str],
        *,
        user: int = -1,
        env: dict[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = FILE_TIMEOUT_S,
        limit: int,
        keep: bool = False,
    ) -> Ended:
        """Run one exec to its end or its deadline, then kill whatever is left in the container, unless `keep`."""
        out, err = Capture(limit), Capture(limit)
        if any("\0" in word for word in argv):
            err.add(b"sandbox: embedded null byte\n")
            return Ended(126, out, err, False, False)
        owner = "0:0" if user < 0 else f"{user}:{user}"
        try:
            execution, stream = await self._begin(argv, owner, env or {}, bool(stdin))
            try:
                deadline = time.monotonic() + timeout_s
                async with asyncio.TaskGroup() as group:
                    reading = group.create_task(_drain(stream, out, err))
                    feeding = group.create_task(_feed(stream, stdin))
                    exit_code = await _exit_code(execution, reading, deadline)
                    oom_killed = False
                    if exit_code is None or not keep:
                        oom_killed = await self._kill()
                        await asyncio.wait({reading}, timeout=SETTLE_S)
                    reading.cancel()
                    feeding.cancel()
            finally:
                with contextlib.suppress(*FOREIGN):
                    await stream.close()
        except ExceptionGroup as errors:  # how a task group says that one thing failed
            raise errors.exceptions[0] from errors
        except aiodocker.DockerError as error:
            if error.status != 400:  # 400: the daemon cannot start such a command, and no shell could
                raise
            err.add(f"sandbox: {error.message}\n".encode())
            return Ended(126, out, err, False, False)
        timed_out = exit_code is None
        return Ended(137 if exit_code is None else exit_code, out, err, timed_out, oom_killed)

    async def _begin(self, argv: list[str], owner: str, env: dict[str, str], feeds: bool) -> tuple[Any, Any]:
        """A started exec and its open stream. What waits here for a slot waits for starts, never for commands."""
        async with self._width:
            container = self._container.docker.containers.container(self._container.name)
            execution = await container.exec(argv, stdin=feeds, user=owner, environment=env)
            stream = execution.start(detach=False)
            try:
                await stream.__aenter__()
                await _begun(execution)
            except BaseException:
                with contextlib.suppress(*FOREIGN):
                    await stream.close()
                raise
        return execution, stream

    async def _kill(self) -> bool:
        """Kill all but process 1; whether the kernel had killed for want of memory since the last time."""
        await self._container.write(b"kill\n")
        before, self._oom_kills = self._oom_kills, int(await self._line())
        return self._oom_kills > before

    async def _line(self) -> bytes:
        while b"\n" not in self._buffer:
            data = await self._container.read()
            if not data:
                raise EOFError("end of stream")
            self._buffer += data
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        return line


async def _drain(stream: Any, out: Capture, err: Capture) -> None:
    while (message := await stream.read_out()) is not None:
        (out if message.stream == 1 else err).add(message.data)


async def _feed(stream: Any, data: bytes) -> None:
    if not data:
        return
    with contextlib.suppress(*FOREIGN, EOFError):  # the command does not want the rest
        for start in range(0, len(data), 1 << 16):
            await stream.write_in(data[start : start + (1 << 16)])
        stream._resp.connection.transport.write_eof()


async def _begun(execution: Any) -> None:
    """Returns once the daemon has started it, or could not: it opens the stream before it begins."""
    while True:
        found = await execution.inspect()
        if found["Pid"] or found["ExitCode"] is not None:
            return
        await asyncio.sleep(BEGIN_POLL_S)


async def _exit_code(execution: Any, reading: asyncio.Task[None], deadline: float) -> int | None:
    """Its exit code once it has ended; None if it still runs at the deadline.

    The stream may end before the process does, and what it left running may keep the stream open long after.
    """
    while True:
        late = time.monotonic() >= deadline
        if not reading.done() and not late:
            await asyncio.wait({reading}, timeout=min(POLL_S, deadline - time.monotonic()))
        found = await execution.inspect()
        if not found["Running"] and found["ExitCode"] is not None:
            return int(found["ExitCode"])
        if late:
            return None
        if reading.done():
            await asyncio.sleep(0.01)


def _word(field: Field) -> str:
    """Text as JSON can carry it: halves of surrogate pairs, which no encoding has, become `?`."""
    text = field.decode("utf-8", "replace") if isinstance(field, bytes) else str(field)
    return text.encode("utf-8", "replace").decode()


def _is(kind: Field, wanted: str) -> bool:
    return kind in (wanted, wanted.encode())
