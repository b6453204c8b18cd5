"""A step's rollouts: order, engines, retries, and one rollout's trouble never another's."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.fakes import (
    Asked,
    ByteTokenizer,
    FakeGenerator,
    FakeRuntime,
    Feed,
    Reply,
    a_task,
    turns,
)
from thundersync.config import RolloutConfig
from thundersync.core.types import Failed, Rollout, Scored, Task, rollout_id
from thundersync.errors import EngineFailed, StaleRollout
from thundersync.generate.base import Generation
from thundersync.rollout.agent import ShellAgent
from thundersync.rollout.dialogue import Renderer
from thundersync.rollout.runner import GroupPlan, RolloutRunner
from thundersync.score.reward import RewardChecker

SUBMIT = "```bash\nsubmit\n```"


def group(index: int, *, size: int = 2, task: Task | None = None) -> GroupPlan:
    group_id = f"000000-{index:02d}"
    return GroupPlan(
        group_id=group_id,
        task=task or a_task(f"task-{index}"),
        rollout_ids=[rollout_id(group_id, member) for member in range(size)],
    )


class World:
    """A runner over fakes, and what came out of it."""

    def __init__(self, *generators: FakeGenerator, runtime: FakeRuntime | None = None, **settings: Any) -> None:
        self.runtime = runtime or FakeRuntime()
        self.feed = Feed()
        self.finished: list[Rollout] = []
        agent = ShellAgent(
            renderer=Renderer(ByteTokenizer()),
            runtime=self.runtime,
            checker=RewardChecker(),
            config=RolloutConfig(),
            prompt=[],
            emit=self.feed,
        )
        self.runner = RolloutRunner(
            agent=agent,
            generators=generators,
            emit=self.feed,
            **{"on_failure": "retry", "max_attempts": 3, "retry_delay_s": 0.0, **settings},
        )

    async def run(self, *groups: GroupPlan, **arguments: Any) -> list[Rollout]:
        async def on_rollout(rollout: Rollout) -> None:
            self.finished.append(rollout)

        await self.runner.run(groups, **{"policy_version": 0, "on_rollout": on_rollout, **arguments})
        return self.finished

    @property
    def failures(self) -> list[tuple[str, bool]]:
        return [(event.failure, event.will_retry) for event in self.feed if hasattr(event, "will_retry")]


async def test_every_rollout_is_handed_over_exactly_once() -> None:
    world = World(FakeGenerator(turns(SUBMIT)))
    groups = [group(0, size=3), group(1, size=2)]
    finished = await world.run(*groups)
    assert sorted(rollout.rollout_id for rollout in finished) == [each for plan in groups for each in plan.rollout_ids]
    assert all(isinstance(rollout.outcome, Scored) for rollout in finished)
    assert {rollout.group_id: rollout.task_id for rollout in finished} == {"000000-00": "task-0", "000000-01": "task-1"}
    assert not world.runtime.open


async def test_a_finished_rollout_is_handed_over_while_others_still_run() -> None:
    first_arrived = asyncio.Event()

    def script(asked: Asked) -> Reply:
        late = asked.rollout_id.endswith("-00")
        return Reply(text=SUBMIT, before=first_arrived.wait if late else None)

    world = World(FakeGenerator(script))
    arrived = []

    async def on_rollout(rollout: Rollout) -> None:
        arrived.append(rollout.rollout_id)
        first_arrived.set()

    await world.run(group(0), on_rollout=on_rollout)
    assert arrived == ["000000-00-01", "000000-00-00"]


async def test_no_more_rollouts_live_than_the_bound_and_a_slow_receiver_holds_none_back() -> None:
    generator = FakeGenerator(turns(SUBMIT))
    world = World(generator, concurrency=2)
    everybody = asyncio.Event()
    arrived = []

    async def on_rollout(rollout: Rollout) -> None:
        arrived.append(rollout.rollout_id)
        if len(arrived) == 8:
            everybody.set()
        await everybody.wait()

    await world.run(group(0, size=8), on_rollout=on_rollout)
    assert generator.most_running <= 2
    assert len(arrived) == 8


async def test_the_longest_expected_start_first_and_unknown_tasks_before_them() -> None:
    generator = FakeGenerator(turns(SUBMIT))
    world = World(generator, concurrency=1)
    await world.run(
        *[group(index, size=1) for index in range(4)], expected_s={"task-0": 1.0, "task-1": 9.0, "task-3": 5.0}
    )
    assert [asked.rollout_id for asked in generator.asked] == [f"000000-0{index}-00" for index in (2, 1, 3, 0)]


async def test_groups_spread_over_engines_and_stay_together() -> None:
    engines = [FakeGenerator(turns("```bash\nls\n```", SUBMIT), max_concurrency=8) for _ in range(2)]
    world = World(*engines)
    await world.run(*[group(index, size=4) for index in range(4)])
    for plan in range(4):
        homes = {at for at, engine in enumerate(engines) for asked in engine.asked if f"-0{plan}-" in asked.rollout_id}
        assert len(homes) == 1
    assert [len(engine.asked) for engine in engines] == [16, 16]


async def test_a_group_larger_than_its_engine_spills_over_to_a_free_one() -> None:
    everybody = asyncio.Event()
    engines: list[FakeGenerator] = []

    def before() -> Any:
        if sum(engine.running for engine in engines) == 8:
            everybody.set()
        return everybody.wait()

    engines += [FakeGenerator(turns(Reply(text=SUBMIT, before=before)), max_concurrency=4) for _ in range(2)]
    await World(*engines).run(group(0, size=8))
    assert [len(engine.asked) for engine in engines] == [4, 4]


async def test_all_turns_of_a_rollout_are_on_one_engine() -> None:
    engines = [FakeGenerator(turns(*["```bash\nls\n```"] * 3, SUBMIT), max_concurrency=2) for _ in range(2)]
    await World(*engines).run(group(0, size=4))
    for engine in engines:
        per_rollout = [asked.rollout_id for asked in engine.asked]
        assert all(per_rollout.count(each) == 4 for each in per_rollout)


def failing_until(attempt: int, error: Exception) -> Callable[[Asked], Reply | Exception]:
    """Fails the first rollout's attempts before `attempt`."""

    def script(asked: Asked) -> Reply | Exception:
        return error if asked.rollout_id.endswith("-00") and asked.attempt < attempt else Reply(text=SUBMIT)

    return script


async def test_a_failed_rollout_is_tried_again_under_the_same_version() -> None:
    world = World(FakeGenerator(failing_until(3, EngineFailed("hiccup")), policy_version=5))
    finished = await world.run(group(0), policy_version=5)
    assert {rollout.rollout_id: rollout.attempt for rollout in finished} == {"000000-00-00": 3, "000000-00-01": 1}
    assert all(rollout.policy_version == 5 and isinstance(rollout.outcome, Scored) for rollout in finished)
    assert world.failures == [("engine", True), ("engine", True)]


async def test_after_the_last_attempt_the_failure_is_handed_over() -> None:
    world = World(FakeGenerator(failing_until(9, EngineFailed("hiccup"))))
    finished = await world.run(group(0))
    outcomes = {rollout.rollout_id: rollout.outcome for rollout in finished}
    assert outcomes["000000-00-00"] == Failed(reason="engine", detail="hiccup")
    assert isinstance(outcomes["000000-00-01"], Scored)
    assert world.failures == [("engine", True), ("engine", True), ("engine", False)]


@pytest.mark.parametrize("on_failure", ["shrink", "drop"])
async def test_without_retry_the_first_failure_is_final(on_failure: str) -> None:
    world = World(FakeGenerator(failing_until(9, EngineFailed("hiccup"))), on_failure=on_failure)
    await world.run(group(0))
    assert world.failures == [("engine", False)]


async def test_a_prompt_that_can_never_fit_is_not_tried_again() -> None:
    world = World(FakeGenerator(turns(SUBMIT), max_model_len=4))
    await world.run(group(0, size=1))
    assert world.failures == [("agent", False)]


async def test_a_dead_engines_rollouts_go_on_on_the_other() -> None:
    dead, alive = FakeGenerator(turns(SUBMIT)), FakeGenerator(turns(SUBMIT))
    dead.dead = True
    finished = await World(dead, alive).run(group(0), group(1), group(2))
    assert all(isinstance(rollout.outcome, Scored) for rollout in finished)
    assert len(alive.asked) == 6


async def test_a_rollout_that_hangs_keeps_no_other_from_finishing() -> None:
    others_done = asyncio.Event()

    def script(asked: Asked) -> Reply:
        return Reply(text=SUBMIT, before=others_done.wait if asked.rollout_id == "000000-00-00" else None)

    world = World(FakeGenerator(script), concurrency=2)
    arrived = []

    async def on_rollout(rollout: Rollout) -> None:
        arrived.append(rollout.rollout_id)
        if len(arrived) == 5:
            others_done.set()

    await world.run(group(0, size=3), group(1, size=3), on_rollout=on_rollout)
    assert arrived[-1] == "000000-00-00" and len(arrived) == 6


async def test_a_broken_invariant_ends_the_step_and_leaves_nothing() -> None:
    hang = asyncio.Event()

    def script(asked: Asked) -> Reply | Generation:
        if asked.rollout_id.endswith("-01"):
            return Generation(token_ids=[65], logprobs=[-1.0], finish_reason="stop", policy_version=7)
        return Reply(text=SUBMIT, before=hang.wait)

    generator = FakeGenerator(script)
    world = World(generator)
    with pytest.raises(ExceptionGroup) as caught:
        await world.run(group(0, size=3))
    assert caught.group_contains(StaleRollout)
    assert len(world.runtime.sandboxes) == 3 and not world.runtime.open
    assert generator.running == 0


async def test_a_cancelled_step_leaves_nothing() -> None:
    started = asyncio.Event()
    generator = FakeGenerator(turns(Reply(text=SUBMIT, before=lambda: started.set() or asyncio.Event().wait())))
    world = World(generator)
    running = asyncio.create_task(world.run(group(0, size=8), group(1, size=8)))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert world.runtime.sandboxes and not world.runtime.open
    assert generator.running == 0 and not world.finished
