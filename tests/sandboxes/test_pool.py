"""Stock, lending and figures of a pool. The world is a runtime without sandboxes, then real boxes."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from sandboxes import (
    Command,
    DaemonGone,
    Origin,
    Pool,
    Result,
    RuntimeUnavailable,
    Sandbox,
    SandboxGone,
    SandboxSpec,
    StartFailed,
)
from sandboxes.latency import Latencies
from tests.boxes import process_runtime

A = SandboxSpec(context="/a", labels={"rollout": "r1"}, ttl_s=100.0)
B = SandboxSpec(context="/b")


class Empty:
    """A sandbox with nothing in it."""

    def __init__(self, world: "World", number: int, spec: SandboxSpec) -> None:
        self.world, self.spec, self.dead = world, spec, False
        self.sandbox_id = f"empty-{number}"
        self.origin = Origin(image=f"sha256:{number}")

    async def run(self, command: Command) -> Result:
        if self.dead:
            raise SandboxGone(self.sandbox_id, "it died")
        return Result(exit_code=0, stdout=b"", stderr=b"")

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None: ...

    async def read(self, path: str, *, limit_bytes: int = 1) -> bytes:
        return b""

    async def put_tree(self, source: Path, target: str) -> None: ...

    async def get_tree(self, source: str, target: Path, *, limit_bytes: int = 1) -> None: ...

    async def kill_all(self) -> None:
        if self.dead:
            raise SandboxGone(self.sandbox_id, "it died")

    async def close(self) -> None:
        self.world.alive.discard(self)


class World:
    """A runtime that starts as many as its gate lets through."""

    name, isolation, outage_limit_s = "world", "none", 0.0

    def __init__(self) -> None:
        self.alive: set[Empty] = set()
        self.count = self.at_once = self.most_at_once = self.reaped = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.failing = False
        self.away = 0
        """How many more calls find no daemon."""
        self.closed = False

    async def check(self) -> None:
        if self.away:
            self.away -= 1
            raise RuntimeUnavailable("no daemon", remedy="start one")

    async def prepare(self, spec: SandboxSpec) -> None: ...

    async def start(self, spec: SandboxSpec) -> Sandbox:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
            if self.away:
                self.away -= 1
                raise DaemonGone("the daemon went away", remedy="start it")
            if self.failing:
                raise RuntimeUnavailable("no daemon", remedy="start one")
        finally:
            self.at_once -= 1
        self.count += 1
        sandbox = Empty(self, self.count, spec)
        self.alive.add(sandbox)
        return sandbox

    async def snapshot(self, sandbox: Sandbox, spec: SandboxSpec) -> SandboxSpec:
        return spec

    async def forget(self, spec: SandboxSpec) -> None: ...

    async def reap(self, labels: Mapping[str, str]) -> int:
        self.reaped += 1
        return 0

    async def close(self) -> None:
        self.closed = True
        self.alive.clear()


async def ready(pool: Pool, count: int) -> None:
    async with asyncio.timeout(30):
        while pool.state().ready < count or pool.state().starting:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_what_was_prepared_is_lent_without_another_start_and_only_once() -> None:
    world = World()
    pool = Pool(world)
    assert pool.prepare_ahead([A, A, B]) == 3
    assert pool.prepare_ahead([A, A, B]) == 0
    await ready(pool, 3)
    lent = [await pool.start(A) for _ in range(3)]
    assert len({one.sandbox_id for one in lent}) == 3 and world.count == 4
    assert (pool.state().from_stock, pool.state().started_late, pool.state().ready) == (2, 1, 1)
    await pool.close()
    assert world.closed and not world.alive


async def test_labels_and_lifetimes_differ_but_waiting_does_not_shorten_a_life() -> None:
    world = World()
    pool = Pool(world, idle_limit_s=50.0)
    pool.prepare_ahead([A])
    await ready(pool, 1)
    other = SandboxSpec(context="/a", labels={"rollout": "r2"}, ttl_s=90.0)
    await pool.start(other)
    (sandbox,) = world.alive
    assert pool.state().from_stock == 1 and sandbox.spec.ttl_s == 150.0
    await pool.close()


async def test_no_more_start_at_once_than_the_width() -> None:
    world = World()
    pool = Pool(world, width=3)
    pool.prepare_ahead([A] * 20)
    await ready(pool, 20)
    assert world.most_at_once == 3
    await pool.close()


async def test_what_is_asked_for_now_does_not_stand_behind_what_is_prepared() -> None:
    world = World()
    world.gate.clear()
    pool = Pool(world, width=1)
    pool.prepare_ahead([B, A])
    await asyncio.sleep(0)
    asked = asyncio.create_task(pool.start(A))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert world.at_once == 2
    world.gate.set()
    await asked
    await pool.close()


async def test_the_stock_is_bounded_and_makes_room_for_the_next_step() -> None:
    world = World()
    pool = Pool(world, ahead=4)
    assert pool.prepare_ahead([A] * 9) == 4
    await ready(pool, 4)
    assert pool.prepare_ahead([B] * 4) == 4
    await ready(pool, 4)
    assert {one.spec.context for one in world.alive} == {"/b"}
    await pool.close()


async def test_one_that_died_or_grew_old_while_waiting_is_not_lent() -> None:
    world = World()
    pool = Pool(world)
    pool.prepare_ahead([A])
    await ready(pool, 1)
    (dead,) = world.alive
    dead.dead = True
    assert (await pool.start(A)).sandbox_id != dead.sandbox_id
    await pool.close()
    old = Pool(world, idle_limit_s=-1.0)
    old.prepare_ahead([A])
    await ready(old, 1)
    await old.start(A)
    assert old.state().from_stock == 0
    await old.close()


async def test_a_start_that_failed_ahead_is_tried_again_and_told_when_asked_for() -> None:
    world = World()
    world.failing = True
    pool = Pool(world)
    pool.prepare_ahead([A])
    await ready(pool, 1)
    with pytest.raises(RuntimeUnavailable):
        await pool.start(A)
    pool.prepare_ahead([A])
    await ready(pool, 1)
    world.failing = False
    await pool.start(A)
    assert pool.latencies()["start"].failed == 3
    await pool.close()


async def test_whoever_is_cancelled_while_waiting_leaves_the_sandbox_to_the_next() -> None:
    world = World()
    world.gate.clear()
    pool = Pool(world)
    pool.prepare_ahead([A])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asked = asyncio.create_task(pool.start(A))
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    world.gate.set()
    await pool.start(A)
    assert world.count == 1 and pool.state().from_stock == 1
    await pool.close()


async def test_closing_ends_starts_under_way_and_reaps_before_and_after() -> None:
    world = World()
    world.gate.clear()
    pool = Pool(world)
    await pool.check()
    pool.prepare_ahead([A] * 5)
    await asyncio.sleep(0)
    await pool.close()
    assert world.closed and world.count == 0 and world.at_once == 0 and world.reaped == 2
    with pytest.raises(StartFailed):
        await pool.start(A)
    with pytest.raises(StartFailed):
        pool.prepare_ahead([A])
    await pool.close()


async def test_a_daemon_that_is_away_is_waited_for_by_all_and_told_once() -> None:
    world, said = World(), list[str]()
    pool = Pool(world, look_again_s=0.001, say=said.append)
    for _ in range(2):  # and every time it goes
        world.away = 40
        lent = await asyncio.gather(*(pool.start(A) for _ in range(5)))
        assert len({one.sandbox_id for one in lent}) == 5 and world.away == 0
        assert len(said) == 2 and "sandboxes wait" in said[0] and "answers again" in said[1]
        said.clear()
    await pool.close()


async def test_a_daemon_that_stays_away_is_told_to_everyone_after_the_limit_and_may_come_back_later() -> None:
    world, said = World(), list[str]()
    pool = Pool(world, outage_limit_s=0.05, look_again_s=0.001, say=said.append)
    world.away = 10**9
    ends = await asyncio.gather(*(pool.start(A) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(end, DaemonGone) and "away for more than" in str(end) and end.remedy for end in ends)
    with pytest.raises(DaemonGone):  # nobody waits a second time
        await pool.start(A)
    assert len(said) == 2
    world.away = 0
    await pool.start(A)
    assert len(said) == 3 and "answers again" in said[2]
    await pool.close()


async def test_an_outage_is_over_once_a_sandbox_is_had_from_stock() -> None:
    world, said = World(), list[str]()
    pool = Pool(world, outage_limit_s=0.05, look_again_s=0.001, say=said.append)
    pool.prepare_ahead([A])
    while not pool.state().ready:  # noqa: ASYNC110
        await asyncio.sleep(0)
    world.away = 10**9
    with pytest.raises(DaemonGone):
        await pool.start(B)
    await pool.start(A)  # from stock
    assert "answers again" in said[-1]
    await pool.close()


async def test_a_daemon_that_answers_but_starts_nothing_is_not_waited_for_for_ever() -> None:
    class Busy(World):
        async def check(self) -> None: ...

    world, said = Busy(), list[str]()
    world.away = 10**9
    pool = Pool(world, outage_limit_s=0.05, look_again_s=0.001, say=said.append)
    with pytest.raises(DaemonGone):
        await pool.start(A)
    assert len(said) == 2
    await pool.close()


async def test_who_waits_for_a_daemon_is_told_when_the_pool_closes() -> None:
    world = World()
    waits = asyncio.Event()
    pool = Pool(world, look_again_s=0.001, say=lambda text: waits.set())
    world.away = 10**9
    waiting = asyncio.create_task(pool.start(A))
    await waits.wait()
    await pool.close()
    with pytest.raises(StartFailed, match="closed"):
        await waiting


async def test_figures_tell_kinds_of_calls_apart() -> None:
    latencies = Latencies()
    for n in range(1, 5001):
        latencies.add("start", n / 1000)
    latencies.add("command", 1.0, failed=True)
    figures = latencies.read()
    assert figures["start"].count == 5000 and figures["start"].max_s == 5.0
    assert 2.952 < figures["start"].p50_s < 5.0 and figures["start"].p95_s > figures["start"].p50_s
    assert figures["command"].failed == 1


async def test_real_boxes_wait_ready_and_are_gone_afterwards() -> None:
    runtime = await process_runtime()
    pool = Pool(runtime)
    pool.prepare_ahead([SandboxSpec()] * 4)
    await ready(pool, 4)
    sandbox = await pool.start(SandboxSpec())
    assert (await sandbox.run(Command(script="echo lent"))).stdout == b"lent\n"
    await sandbox.close()
    figures = pool.latencies()
    assert figures["start"].count == 4 and figures["command"].count == figures["close"].count == 1
    await pool.close()
