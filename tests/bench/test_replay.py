"""A replayed rollout has exactly the recorded tokens, whatever the engine would have ended with."""

import pytest

from tests.fakes import Asked, FakeGenerator, Reply
from thundersync.bench.replay import ReplayAgent, Script
from thundersync.bench.workload import GroupWork, RolloutWork, StepWork, TurnWork, Workload
from thundersync.core.types import Failed, FinalContent, Rollout, SampledTurn, Scored
from thundersync.errors import EngineFailed, StaleRollout
from thundersync.monitor.events import AnyEvent

TURNS = [
    TurnWork(given_tokens=0, sampled_tokens=5),
    TurnWork(given_tokens=3, sampled_tokens=2),
    TurnWork(given_tokens=20, sampled_tokens=4, fresh=True),
]
WORKLOAD = Workload(
    source="a test",
    shared_tokens=6,
    steps=[
        StepWork(
            groups=[
                GroupWork(
                    prompt_tokens=10,
                    rollouts=[RolloutWork(turns=TURNS, reward=0.5), RolloutWork(turns=TURNS[:1], reward=None)],
                )
            ]
        )
    ],
)


def exactly(asked: Asked) -> Reply:
    return Reply(text="x" * asked.sampling.max_tokens, finish_reason="length")


class Bench:
    """One replayed group."""

    def __init__(self, generator: FakeGenerator) -> None:
        self.script = Script(WORKLOAD, vocabulary=250, seed=3)
        self.events: list[AnyEvent] = []
        self.turns: list[SampledTurn] = []
        self.generator = generator
        self.contents: list[FinalContent] = []
        self.agent = ReplayAgent(
            self.script,
            temperature=1.0,
            emit=self.events.append,
            on_turn=self.turns.append,
            on_content=self.contents.append,
        )

    async def rollout(self, index: int, *, version: int = 0) -> Rollout:
        (task,) = self.script.tasks(4)
        return await self.agent.run(
            task,
            rollout_id=f"000004-00-{index:02d}",
            group_id="000004-00",
            generator=self.generator,
            policy_version=version,
        )


async def test_every_turn_has_the_recorded_tokens_and_asks_the_engine_for_no_other_end() -> None:
    bench = Bench(FakeGenerator(exactly))
    rollout = await bench.rollout(0)
    first, second = rollout.sequences
    assert (len(first.token_ids), sum(first.sampled), first.prompt_tokens) == (10 + 5 + 3 + 2, 7, 10)
    assert (len(second.token_ids), sum(second.sampled), second.prompt_tokens) == (24, 4, 20)
    assert [(turn.sequence, turn.start, turn.end) for turn in rollout.turns] == [(0, 10, 15), (0, 18, 20), (1, 20, 24)]
    assert [len(asked.prompt_ids) for asked in bench.generator.asked] == [10, 18, 20]
    assert all(asked.sampling.to_limit for asked in bench.generator.asked)
    assert rollout.outcome == Scored(reward=0.5, stop="submitted")
    assert [turn.end - turn.start for turn in bench.turns] == [5, 2, 4]
    assert [content.sequences for content in bench.contents] == [rollout.sequences]


async def test_what_had_failed_fails_again_and_never_votes() -> None:
    outcome = (await Bench(FakeGenerator(exactly)).rollout(1)).outcome
    assert isinstance(outcome, Failed)
    assert outcome.reason == "agent"  # which no further attempt is made for


async def test_the_same_replay_has_the_same_tokens_and_another_has_others() -> None:
    bench = Bench(FakeGenerator(exactly))
    (task,), (again,), (other,) = (
        bench.script.tasks(4),
        Script(WORKLOAD, vocabulary=250, seed=3).tasks(4),
        bench.script.tasks(5),
    )
    ids = bench.script.prompt_ids(task)
    assert task == again
    assert ids[:6] == bench.script.prompt_ids(other)[:6]  # what all prompts share
    assert ids[6:] != bench.script.prompt_ids(other)[6:]
    assert len(ids) == 10


async def test_a_reply_of_another_length_is_no_replay() -> None:
    bench = Bench(FakeGenerator(lambda asked: Reply(text="x", finish_reason="length")))
    with pytest.raises(EngineFailed, match="was to sample 5 tokens, the engine gave 1"):
        await bench.rollout(0)


async def test_a_reply_of_another_policy_version_is_refused() -> None:
    with pytest.raises(StaleRollout):
        await Bench(FakeGenerator(exactly)).rollout(0, version=1)
