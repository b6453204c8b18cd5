"""A task's sandbox in the state that its agent starts from: started, prepared, and taken away at the end.

Place in the flow: opened by whatever carries out one rollout, and closed by it. What has to be prepared is the
checker's business. Where that takes long, it is done once: the sandboxes of the same task that follow are forked from
a snapshot of the first. Knows nothing of turns or rewards.
"""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import msgspec

from sandboxes.base import Runtime, Sandbox, SandboxSpec
from sandboxes.errors import SandboxError
from sandboxes.shield import finish
from thundersync.core.types import RolloutId, Task, TaskId
from thundersync.monitor.events import AnyEvent, SandboxStarted, Warned
from thundersync.rollout.attempt import Clock, in_time
from thundersync.score.reward import RewardChecker

TTL_MARGIN_S = 600.0
"""A sandbox outlives all the limits of its rollout by this, so that it never ends by itself under a live owner."""
FORK_S = 2.0
"""A preparation that took longer than this is worth a snapshot, which takes half a second and some disk."""
FORKS_KEPT = 64
"""Snapshots at a time; the task that was started longest ago loses its own."""


class Worlds:
    """Opens sandboxes for tasks, any number at once.

    `timeout_s` is the wall clock of a rollout's turns. `grace_s`: how long beyond its own limit a sandbox may take to
    answer or close before it counts as broken. `labels` are put on every sandbox.
    """

    def __init__(
        self,
        runtime: Runtime,
        checker: RewardChecker,
        *,
        timeout_s: float,
        pids: int,
        labels: Mapping[str, str],
        grace_s: float,
        emit: Callable[[AnyEvent], None],
        fork_s: float = FORK_S,
        clock: Clock = time.monotonic,
    ) -> None:
        self._runtime = runtime
        self._checker = checker
        self._timeout_s = timeout_s
        self._pids = pids
        self._labels = dict(labels)
        self._grace_s = grace_s
        self._emit = emit
        self._fork_s = fork_s
        self._clock = clock
        self._forks: OrderedDict[TaskId, _Fork] = OrderedDict()

    def limit_s(self, task: Task) -> float:
        """Wall clock of a rollout's turns: the run's limit, or the task's own where that is shorter."""
        return min(self._timeout_s, task.agent_timeout_s or math.inf)

    def spec(self, task: Task, rollout_id: RolloutId = "") -> SandboxSpec:
        """The sandbox that `open` starts where nothing has been prepared."""
        return SandboxSpec(
            image=task.image.name,
            context=task.image.context,
            workdir=task.workdir,
            env=task.env,
            network=task.network,
            cpus=task.cpus,
            memory_mib=task.memory_mib,
            disk_mib=task.disk_mib,
            pids=self._pids,
            build_timeout_s=task.build_timeout_s,
            ttl_s=self.limit_s(task) + task.checker_timeout_s + TTL_MARGIN_S,
            labels={**self._labels, "rollout": rollout_id},
        )

    def next_spec(self, task: Task) -> SandboxSpec:
        """The sandbox that `open` would start now, to have one ready before it is asked for."""
        fork = self._forks.get(task.task_id)
        return fork.spec if fork is not None and fork.spec is not None else self.spec(task)

    @asynccontextmanager
    async def open(self, task: Task, rollout_id: RolloutId) -> AsyncIterator[Sandbox]:
        """The sandbox, closed at the end of the block, through cancellation.

        Raises: SandboxError, CheckFailed (it could not be prepared), Broken (it did not answer in time).
        """
        began_s = self._clock()
        sandbox = await self._start(task, self.spec(task, rollout_id))
        try:
            start_s = self._clock() - began_s
            self._emit(SandboxStarted(at_s=time.time(), rollout_id=rollout_id, start_s=start_s))
            yield sandbox
        finally:
            await self._close(sandbox, rollout_id)

    async def _start(self, task: Task, spec: SandboxSpec) -> Sandbox:
        if not self._checker.prepares(task):
            return (await self._prepared(task, spec))[0]
        fork = await self._fork_of(task.task_id)
        async with fork.lock:
            if not fork.tried:
                sandbox = await self._first(task, spec, fork)
                fork.tried = True
                return sandbox
        if fork.spec is not None:
            here = msgspec.structs.replace(fork.spec, labels=spec.labels)
            try:
                return await self._started(task, here)
            except SandboxError as error:  # somebody removed it: what it saved can be done again
                fork.spec = None
                text = f"task {task.task_id} is prepared in each sandbox again; its snapshot is gone: {error}"
                self._emit(Warned(at_s=time.time(), text=text))
        return (await self._prepared(task, spec))[0]

    async def _first(self, task: Task, spec: SandboxSpec, fork: "_Fork") -> Sandbox:
        """Prepared, and a snapshot taken of it if that took long."""
        sandbox, seconds = await self._prepared(task, spec)
        if seconds < self._fork_s:
            return sandbox
        try:
            fork.spec = await self._runtime.snapshot(sandbox, spec)
        except SandboxError as error:
            text = f"task {task.task_id} is prepared in each sandbox; a snapshot of it failed: {error}"
            self._emit(Warned(at_s=time.time(), text=text))
        except BaseException:
            await self._close(sandbox, spec.labels["rollout"])
            raise
        return sandbox

    async def _prepared(self, task: Task, spec: SandboxSpec) -> tuple[Sandbox, float]:
        """A new sandbox, and the seconds that preparing it took."""
        sandbox = await self._started(task, spec)
        began_s = self._clock()
        try:
            # Repairs start from a state that is made in the sandbox: the bug in, the repository's past out.
            await in_time(self._checker.prepare(sandbox, task), self._start_limit_s(task), "be prepared")
        except BaseException:
            await self._close(sandbox, spec.labels["rollout"])
            raise
        return sandbox, self._clock() - began_s

    async def _started(self, task: Task, spec: SandboxSpec) -> Sandbox:
        limit_s = self._start_limit_s(task) + self._runtime.outage_limit_s
        return await in_time(self._runtime.start(spec), limit_s, "start")

    async def _close(self, sandbox: Sandbox, rollout_id: RolloutId) -> None:
        try:
            await finish(sandbox.close(), limit_s=self._grace_s)
        except (SandboxError, TimeoutError) as error:
            # The verdict stands; the runtime still owns what is left and removes it when it closes.
            text = f"sandbox {sandbox.sandbox_id} of rollout {rollout_id} did not close: {error}"
            self._emit(Warned(at_s=time.time(), text=text))

    async def _fork_of(self, task_id: TaskId) -> "_Fork":
        fork = self._forks.setdefault(task_id, _Fork())
        self._forks.move_to_end(task_id)
        if len(self._forks) > FORKS_KEPT:
            _, oldest = self._forks.popitem(last=False)
            if oldest.spec is not None:
                try:
                    await self._runtime.forget(oldest.spec)
                except SandboxError as error:  # the runtime still owns it, and removes it when it closes
                    self._emit(Warned(at_s=time.time(), text=f"a snapshot could not be removed: {error}"))
        return fork

    def _start_limit_s(self, task: Task) -> float:
        return task.build_timeout_s + self._grace_s


class _Fork:
    """Where the sandboxes of one task begin: in `spec`, once the first has been tried and was slow to prepare."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.tried = False
        self.spec: SandboxSpec | None = None
