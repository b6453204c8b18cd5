"""A preparation that takes long is done once: the task's later sandboxes are forked from a snapshot of the first."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sandboxes.base import Sandbox, SandboxSpec
from sandboxes.errors import DiskFull, ImageMissing
from tests.fakes import FakeClock, FakeRuntime, Feed, a_task
from thundersync.core.types import Checker, Task
from thundersync.monitor.events import SandboxStarted, Warned
from thundersync.rollout.worlds import FORKS_KEPT, Worlds
from thundersync.score.reward import CheckFailed, RewardChecker


class Snapshots(FakeRuntime):
    """Fake sandboxes that can be forked."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.taken: list[str] = []
        self.forgotten: list[str] = []

    async def snapshot(self, sandbox: Sandbox, spec: SandboxSpec) -> SandboxSpec:
        self._raise("snapshot")
        self.taken.append(sandbox.sandbox_id)
        return msgspec.structs.replace(spec, image=f"snapshot-{len(self.taken)}")

    async def forget(self, spec: SandboxSpec) -> None:
        self.forgotten.append(spec.image)


class SlowChecker(RewardChecker):
    """Preparing moves the clock by `seconds`."""

    def __init__(self, clock: FakeClock, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds
        self.prepared: list[str] = []
        self.fails = False

    async def prepare(self, sandbox: Sandbox, task: Task) -> None:
        self.clock.advance(self.seconds)
        if self.fails:
            raise CheckFailed("checker", "no")
        self.prepared.append(sandbox.sandbox_id)


class World:
    def __init__(self, seconds: float, **settings: Any) -> None:
        clock = FakeClock()
        self.runtime = Snapshots(**settings)
        self.checker = SlowChecker(clock, seconds)
        self.feed = Feed()
        self.worlds = Worlds(
            self.runtime, self.checker, timeout_s=60.0, pids=9, labels={}, grace_s=5.0, emit=self.feed, clock=clock
        )

    async def open(self, task: Task, name: str) -> SandboxSpec:
        async with self.worlds.open(task, name):
            return self.runtime.sandboxes[-1].spec


def repair(name: str = "r") -> Task:
    return a_task(name, checker=Checker(tests="/nonexistent", verdict="repair"))


async def test_a_group_is_forked_from_its_first_member_where_preparing_is_slow() -> None:
    world = World(seconds=3.0)
    specs = await asyncio.gather(*(world.open(repair(), f"g-{i:02d}") for i in range(4)))
    assert world.checker.prepared == ["fake-0"]
    assert world.runtime.taken == ["fake-0"]
    assert sorted(spec.image for spec in specs) == ["fake", *["snapshot-1"] * 3]
    assert {spec.labels["rollout"] for spec in specs} == {"g-00", "g-01", "g-02", "g-03"}
    assert world.worlds.next_spec(repair()).image == "snapshot-1"
    assert world.runtime.open == []


async def test_a_quick_preparation_is_done_in_each() -> None:
    world = World(seconds=0.1)
    await asyncio.gather(*(world.open(repair(), f"g-{i:02d}") for i in range(3)))
    assert len(world.checker.prepared) == 3
    assert world.runtime.taken == []


async def test_tasks_that_need_no_preparation_wait_for_nobody() -> None:
    world = World(seconds=3.0)
    world.runtime.start_gate = asyncio.Event()
    waiting = [asyncio.create_task(world.open(a_task("plain"), f"g-{i:02d}")) for i in range(2)]
    world.runtime.start_gate.set()
    await asyncio.gather(*waiting)
    assert world.runtime.taken == []


async def test_a_snapshot_that_fails_or_is_removed_costs_only_time() -> None:
    full = World(seconds=3.0, failing={"snapshot": DiskFull("no room")})
    for i in range(2):
        await full.open(repair(), f"g-{i:02d}")
    assert len(full.checker.prepared) == 2
    assert [type(event) for event in full.feed if not isinstance(event, SandboxStarted)] == [Warned]
    gone = World(seconds=3.0)
    await gone.open(repair(), "g-00")

    async def start(spec: SandboxSpec) -> Any:
        if spec.image.startswith("snapshot"):
            raise ImageMissing("removed")
        return await FakeRuntime.start(gone.runtime, spec)

    gone.runtime.start = start  # type: ignore[method-assign]
    assert (await gone.open(repair(), "g-01")).image == "fake"
    assert len(gone.checker.prepared) == 2


async def test_a_failed_preparation_is_tried_by_the_next_member_and_leaves_no_sandbox() -> None:
    world = World(seconds=3.0)
    world.checker.fails = True
    with pytest.raises(CheckFailed):
        await world.open(repair(), "g-00")
    assert world.runtime.open == []
    world.checker.fails = False
    await world.open(repair(), "g-01")
    assert world.runtime.taken == ["fake-1"]


async def test_the_oldest_snapshot_goes_when_there_are_many(tmp_path: Path) -> None:
    world = World(seconds=3.0)
    for i in range(FORKS_KEPT + 1):
        await world.open(repair(f"task-{i}"), "g-00")
    assert world.runtime.forgotten == ["snapshot-1"]
