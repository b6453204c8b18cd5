"""Any runtime with sandboxes started ahead of need, and every call timed. Itself a runtime; knows no tasks.

Starting is what a sandbox costs (a tenth of a second of the daemon's computing); a started one only waits, in a few
megabytes. So the next step's are started while this one finishes. A sandbox is lent once and never used again.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from sandboxes.base import Command, Origin, Result, Runtime, Sandbox, SandboxSpec
from sandboxes.errors import CloseFailed, DaemonGone, SandboxError, StartFailed
from sandboxes.latency import Latencies, Latency
from sandboxes.outage import LOOK_AGAIN_S, OUTAGE_LIMIT_S, Outage
from sandboxes.shield import finish

CLOSE_LIMIT_S = 180.0


class PoolState(Struct, frozen=True):
    """What a pool has done and holds."""

    ready: int
    starting: int
    from_stock: int
    """Sandboxes that were lent without waiting for their start."""
    started_late: int
    """Sandboxes that were started when they were asked for."""


class Pool:
    """Wraps a runtime, which it owns from now on and closes.

    `ahead`: most sandboxes that wait started. `width`: how many of them start at once; what is asked for right now is
    not held up by them. One that has waited for `idle_limit_s` is replaced; its lifetime is lengthened by as much.
    `labels`: those of this runtime's own sandboxes, for the leftovers that `check` and `close` remove. A daemon that is
    away is waited for, up to `outage_limit_s`, by whatever asks for a sandbox, and looked for every `look_again_s`;
    `say` gets a line when that begins and ends.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        ahead: int = 64,
        width: int = 2,
        idle_limit_s: float = 1800.0,
        labels: Mapping[str, str] | None = None,
        outage_limit_s: float = OUTAGE_LIMIT_S,
        look_again_s: float = LOOK_AGAIN_S,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._runtime = runtime
        self._outage_limit_s = outage_limit_s
        self._outage = Outage(self._answers, limit_s=outage_limit_s, look_again_s=look_again_s, say=say)
        self._ahead = ahead
        self._width = asyncio.Semaphore(width)
        self._idle_limit_s = idle_limit_s
        self._labels = dict(labels or {})
        self._stock: dict[bytes, deque[_Start]] = {}
        self._removing: set[asyncio.Task[None]] = set()
        self._latencies = Latencies()
        self._from_stock = 0
        self._started_late = 0
        self._closed = False

    @property
    def name(self) -> str:
        return self._runtime.name

    @property
    def isolation(self) -> str:
        return self._runtime.isolation

    @property
    def outage_limit_s(self) -> float:
        return self._outage_limit_s

    def latencies(self) -> dict[str, Latency]:
        """Seconds by kind of call: `start`, `command` (beyond the command's own time), `file`, `close`,
        `reap`, `snapshot`."""
        return self._latencies.read()

    def state(self) -> PoolState:
        starts = [start for queue in self._stock.values() for start in queue]
        ready = sum(start.task.done() for start in starts)
        return PoolState(ready, len(starts) - ready, self._from_stock, self._started_late)

    async def check(self) -> None:
        """Raises: RuntimeUnavailable. Also removes what dead owners left with our labels."""
        await self._runtime.check()
        await self.reap(self._labels)

    async def prepare(self, spec: SandboxSpec) -> None:
        """Build or pull what `spec` needs."""
        await self._runtime.prepare(spec)

    def prepare_ahead(self, specs: Sequence[SandboxSpec]) -> int:
        """Begin to start one sandbox per spec, those that wait already counted; returns how many were begun.

        Never waits. `specs` are the next step's, longest first: beyond `ahead` the rest is left for its own time, and
        what waits but is not among them makes room. A start that fails is tried again, and told, when it is asked for.
        """
        if self._closed:
            raise StartFailed("this pool was closed", remedy="Make a new pool.")
        wanted: dict[bytes, list[SandboxSpec]] = {}
        for spec in specs[: self._ahead]:
            wanted.setdefault(_key(spec), []).append(spec)
        self._drop_what_is_not(wanted)
        begun = 0
        for key, alike in wanted.items():
            queue = self._stock.setdefault(key, deque())
            for spec in alike[len(queue) :]:
                queue.append(_Start(self._start_ahead, spec))
                begun += 1
        return begun

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """One that waits, if it is still alive; else a new one, for which a daemon that is away is waited for.

        Raises: what the runtime's `start` raises; DaemonGone only when it has been away too long.
        """
        if self._closed:
            raise StartFailed("this pool was closed", remedy="Make a new pool.")
        if (sandbox := await self._from(self._stock.get(_key(spec), deque()))) is not None:
            self._from_stock += 1
            self._outage.over()
            return _Timed(sandbox, self._latencies)
        self._started_late += 1
        while True:
            try:
                with self._latencies.timed("start"):
                    sandbox = await self._runtime.start(spec)
            except DaemonGone as error:
                await self._outage.wait(error)
            except SandboxError:
                self._outage.over()
                raise
            else:
                self._outage.over()
                return _Timed(sandbox, self._latencies)

    async def snapshot(self, sandbox: Sandbox, spec: SandboxSpec) -> SandboxSpec:
        """`spec` with the files that `sandbox` has now as its start."""
        with self._latencies.timed("snapshot"):
            return await self._runtime.snapshot(sandbox, spec)

    async def forget(self, spec: SandboxSpec) -> None:
        """Remove the snapshot that `spec` names."""
        await self._runtime.forget(spec)

    async def reap(self, labels: Mapping[str, str]) -> int:
        """Remove leftovers with these labels whose owner is gone; returns how many."""
        with self._latencies.timed("reap"):
            return await self._runtime.reap(labels)

    async def close(self) -> None:
        """End all starts, remove every sandbox lent or waiting, then what dead owners left. Raises: CloseFailed."""
        self._closed = True
        try:
            await finish(self._close_all(), limit_s=CLOSE_LIMIT_S)
        except TimeoutError as error:
            raise CloseFailed(
                "a pool of sandboxes did not close in time", remedy="Remove what is left by hand."
            ) from error

    async def _close_all(self) -> None:
        starts = [start for queue in self._stock.values() for start in queue]
        self._stock.clear()
        for start in starts:
            start.task.cancel()
        removals = list(self._removing)
        try:
            await asyncio.gather(*(start.task for start in starts), *removals, return_exceptions=True)
            await self.reap(self._labels)
        finally:
            await self._runtime.close()

    async def _answers(self) -> None:
        if self._closed:
            raise StartFailed("this pool was closed", remedy="Make a new pool.")
        await self._runtime.check()

    async def _start_ahead(self, spec: SandboxSpec, begin: Callable[[], None]) -> Sandbox:
        async with self._width:
            begin()
            with self._latencies.timed("start"):
                longer = msgspec.structs.replace(spec, ttl_s=spec.ttl_s + self._idle_limit_s)
                return await self._runtime.start(longer)

    async def _from(self, queue: "deque[_Start]") -> Sandbox | None:
        while queue:
            start = queue.popleft()
            if not start.begun:  # it stands behind others; whoever asks now does not
                start.task.cancel()
                return None
            try:
                await asyncio.wait({start.task})
            except asyncio.CancelledError:
                queue.appendleft(start)
                raise
            if start.failed():
                return None
            if start.age_s() > self._idle_limit_s:
                self._remove(start)
                continue
            sandbox = start.task.result()
            try:
                await sandbox.kill_all()  # a few milliseconds tell whether it is still alive
            except SandboxError:
                self._remove(start)
                continue
            except asyncio.CancelledError:
                self._remove(start)
                raise
            return sandbox
        return None

    def _drop_what_is_not(self, wanted: Mapping[bytes, Sequence[SandboxSpec]]) -> None:
        for key, queue in list(self._stock.items()):
            keep: deque[_Start] = deque()
            for start in queue:
                fresh = start.age_s() <= self._idle_limit_s and not start.failed()
                if fresh and len(keep) < len(wanted.get(key, ())):
                    keep.append(start)
                else:
                    self._remove(start)
            if keep:
                self._stock[key] = keep
            else:
                del self._stock[key]

    def _remove(self, start: "_Start") -> None:
        """Take a waiting sandbox away, without waiting for it; `close` waits for what is still under way."""
        removal = asyncio.get_running_loop().create_task(_end(start))
        self._removing.add(removal)
        removal.add_done_callback(self._removing.discard)


_StartAhead: TypeAlias = Callable[[SandboxSpec, Callable[[], None]], Coroutine[Any, Any, Sandbox]]


class _Start:
    """One sandbox being started, or waiting."""

    def __init__(
        self, run: Callable[[SandboxSpec, Callable[[], None]], Coroutine[Any, Any, Sandbox]], spec: SandboxSpec
    ) -> None:
        self.begun = False
        self._made_s = time.monotonic()
        self.task = asyncio.get_running_loop().create_task(run(spec, self._begin))

    def age_s(self) -> float:
        return time.monotonic() - self._made_s

    def failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    def _begin(self) -> None:
        self.begun = True


class _Timed:
    """A sandbox whose calls are timed."""

    def __init__(self, sandbox: Sandbox, latencies: Latencies) -> None:
        self._sandbox = sandbox
        self._latencies = latencies
        self._closed = False

    @property
    def sandbox_id(self) -> str:
        return self._sandbox.sandbox_id

    @property
    def origin(self) -> Origin:
        return self._sandbox.origin

    async def run(self, command: Command) -> Result:
        started = time.monotonic()
        try:
            result = await self._sandbox.run(command)
        except SandboxError:
            self._latencies.add("command", time.monotonic() - started, failed=True)
            raise
        self._latencies.add("command", max(0.0, time.monotonic() - started - result.seconds))
        return result

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        with self._latencies.timed("file"):
            await self._sandbox.write(path, data, mode=mode)

    async def read(self, path: str, *, limit_bytes: int = 1 << 24) -> bytes:
        with self._latencies.timed("file"):
            return await self._sandbox.read(path, limit_bytes=limit_bytes)

    async def put_tree(self, source: Path, target: str) -> None:
        with self._latencies.timed("file"):
            await self._sandbox.put_tree(source, target)

    async def get_tree(self, source: str, target: Path, *, limit_bytes: int = 1 << 28) -> None:
        with self._latencies.timed("file"):
            await self._sandbox.get_tree(source, target, limit_bytes=limit_bytes)

    async def kill_all(self) -> None:
        await self._sandbox.kill_all()

    async def close(self) -> None:
        if self._closed:
            return
        with self._latencies.timed("close"):
            await self._sandbox.close()
        self._closed = True


async def _end(start: _Start) -> None:
    start.task.cancel()
    await asyncio.wait({start.task})
    if not start.failed():
        with contextlib.suppress(SandboxError):  # the runtime still owns it, and names it when it closes
            await start.task.result().close()


def _key(spec: SandboxSpec) -> bytes:
    """Equal for specs that one waiting sandbox can serve: labels and lifetime are its own."""
    return msgspec.json.encode(msgspec.structs.replace(spec, labels={}, ttl_s=0.0), order="deterministic")
