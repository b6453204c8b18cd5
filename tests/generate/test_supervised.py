"""An engine that dies comes back with the open step's weights and version; one that keeps dying ends the run."""

import asyncio

import pytest

from tests.fakes import Asked, FakeGenerator, Reply, Script
from thundersync.errors import EngineFailed, EngineLost
from thundersync.generate.base import Sampling, WeightArena
from thundersync.generate.supervised import MAX_RESTARTS, SupervisedGenerator
from thundersync.monitor.events import AnyEvent, Warned

ARENA = WeightArena(path="arena", tensors=[])


def fine(asked: Asked) -> Reply:
    return Reply(text="fine")


class Rack:
    """Makes engines; remembers them and what was said."""

    def __init__(self, script: Script = fine) -> None:
        self.script = script
        self.made: list[FakeGenerator] = []
        self.said: list[AnyEvent] = []
        self.supervised = SupervisedGenerator(self.make, self.said.append)

    def make(self, restarts: int) -> FakeGenerator:
        assert restarts == len(self.made)
        self.made.append(FakeGenerator(self.script))
        return self.made[-1]

    async def ask(self) -> int:
        reply = await self.supervised.generate([1, 2], Sampling(), request_id="r/1/0")
        return reply.policy_version


async def test_a_dead_engine_is_replaced_under_the_same_version_and_weights() -> None:
    rack = Rack()
    await rack.supervised.start()
    await rack.supervised.publish(ARENA, version=7)
    rack.made[0].dead = True
    with pytest.raises(EngineFailed):
        await rack.ask()
    assert await rack.ask() == 7
    assert rack.made[0].closed
    assert rack.made[1].published == [7]
    assert any(isinstance(event, Warned) and "restarted" in event.text for event in rack.said)


async def test_many_rollouts_of_one_dead_engine_cause_one_restart() -> None:
    rack = Rack()
    await rack.supervised.start()
    rack.made[0].dead = True
    results = await asyncio.gather(*(rack.ask() for _ in range(8)), return_exceptions=True)
    assert any(isinstance(result, EngineFailed) for result in results)
    await rack.ask()
    assert len(rack.made) == 2


async def test_an_engine_that_keeps_dying_ends_the_run() -> None:
    rack = Rack()
    await rack.supervised.start()
    for _ in range(MAX_RESTARTS):
        rack.made[-1].dead = True
        with pytest.raises(EngineFailed):
            await rack.ask()
        await rack.ask()
    rack.made[-1].dead = True
    with pytest.raises(EngineFailed):
        await rack.ask()
    with pytest.raises(EngineLost, match="died 6 times"):
        await rack.ask()


async def test_a_failed_request_of_a_living_engine_restarts_nothing() -> None:
    rack = Rack(lambda asked: EngineFailed("bad request"))
    await rack.supervised.start()
    with pytest.raises(EngineFailed, match="bad request"):
        await rack.ask()
    assert len(rack.made) == 1


async def test_a_cancelled_waiter_does_not_stop_the_restart() -> None:
    rack = Rack()
    await rack.supervised.start()
    rack.made[0].dead = True
    with pytest.raises(EngineFailed):
        await rack.ask()
    waiter = asyncio.create_task(rack.ask())
    await asyncio.sleep(0)
    waiter.cancel()
    assert await rack.ask() == 0
    assert len(rack.made) == 2


async def test_counts_go_on_across_a_restart() -> None:
    rack = Rack()
    await rack.supervised.start()
    await rack.ask()
    before = rack.supervised.stats().sampled_tokens
    rack.made[0].dead = True
    with pytest.raises(EngineFailed):
        await rack.ask()
    await rack.ask()
    assert rack.supervised.stats().sampled_tokens == 2 * before
