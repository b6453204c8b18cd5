"""What can be read of a rollout while it lives, and while it waits for its step to be written."""

import asyncio
from typing import Any

import pytest

from tests.fakes import ByteTokenizer, FakeGenerator, FakeRuntime, Feed, a_task, turns
from thundersync import live as live_module
from thundersync.config import RolloutConfig
from thundersync.core.types import Message, Rollout, TokenSequence
from thundersync.generate.base import EngineStats, Generation
from thundersync.generate.meter import Meter
from thundersync.live import AT_ONCE, LiveRollouts
from thundersync.monitor.archive import Transcript, sampled_ids
from thundersync.rollout.agent import ShellAgent
from thundersync.rollout.dialogue import Renderer
from thundersync.rollout.functions import FunctionAgent
from thundersync.rollout.policy import Policy
from thundersync.score.judge import CheckerJudge
from thundersync.score.reward import RewardChecker

NAME = "000001-00-00"


async def test_a_rollout_is_read_as_far_as_it_has_come_and_whole_once_it_has_landed() -> None:
    renderer, landed, seen = Renderer(ByteTokenizer()), list[Rollout](), list[Transcript | None]()
    agent = ShellAgent(
        renderer=renderer,
        runtime=FakeRuntime(),
        checker=RewardChecker(),
        config=RolloutConfig(),
        prompt=[Message(role="system", content="You have a shell.")],
        emit=Feed(),
    )
    live = LiveRollouts([agent], lambda: landed, renderer)

    class Watched(FakeGenerator):
        async def generate(self, *given: object, **named: object) -> Generation:
            seen.append(await asyncio.to_thread(live.look, NAME))  # as the feed's thread does
            return await super().generate(*given, **named)  # type: ignore[arg-type]

    generator = Watched(turns("```bash\nls\n```", "```bash\nsubmit\n```"))
    assert live.look(NAME) is None
    rollout = await agent.run(a_task(), rollout_id=NAME, group_id=NAME[:-3], generator=generator, policy_version=0)
    first, second = seen
    assert first is not None and first.turns == [] and [each.role for each in first.messages] == ["system", "user"]
    assert second is not None and second.outcome is None and len(second.turns) == 1
    assert second.messages == rollout.messages[:4]
    texts = live.texts(second)
    turn, ids = second.turns[0], second.sequences[0].token_ids
    assert "".join(texts[token] for token in ids[turn.start : turn.end]).startswith("```bash\nls\n```")
    assert set(texts) == sampled_ids(second)
    assert live.look(NAME) is None and agent.alive(NAME) is None  # it has ended, and has not landed yet
    landed.append(rollout)
    whole = live.look(NAME)
    assert whole is not None and whole.outcome == rollout.outcome and whole.sequences == rollout.sequences


async def test_a_rollout_of_an_agent_function_is_read_while_it_lives() -> None:
    renderer, seen = Renderer(ByteTokenizer()), list[Transcript | None]()

    async def agent(task: object, policy: Policy, sandbox: object) -> None:
        first = await policy.chat(policy.opening)
        seen.append(await asyncio.to_thread(live.look, NAME))
        await policy.chat([*policy.opening, first.message, Message(role="user", content="and?")])
        await policy.sample([1, 2, 3], told=[Message(role="user", content="anew")])
        seen.append(await asyncio.to_thread(live.look, NAME))

    checker = RewardChecker()
    function = FunctionAgent(
        agent,
        renderer=renderer,
        runtime=FakeRuntime(),
        checker=checker,
        judge=CheckerJudge(checker),
        config=RolloutConfig(),
        prompt=[],
        emit=Feed(),
    )
    live = LiveRollouts([function], list, renderer)
    generator = FakeGenerator(turns("one", "two", "three"))
    rollout = await function.run(a_task(), rollout_id=NAME, group_id=NAME[:-3], generator=generator, policy_version=0)
    first, second = seen
    assert first is not None and [each.content for each in first.messages] == ["Do it.", "one"]
    assert [turn.message for turn in first.turns] == [1] and first.outcome is None
    assert second is not None and second.messages == rollout.messages and second.turns == rollout.turns
    assert [(turn.message, turn.conversation) for turn in second.turns] == [(1, 0), (3, 0), (5, 4)]
    assert live.look(NAME) is None


def test_the_texts_of_many_tokens_leave_the_runs_tokenizer_to_others_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoded, pauses = [0], list[int]()

    class Counting(ByteTokenizer):
        def decode(self, *given: Any, **named: Any) -> str:
            decoded[0] += 1
            return super().decode(*given, **named)

    def pause(seconds: float) -> None:
        assert seconds > 0 and not renderer._lock.locked()
        pauses.append(decoded[0])

    monkeypatch.setattr(live_module.time, "sleep", pause)
    renderer = Renderer(Counting())
    live = LiveRollouts([], list, renderer)
    decoded[0], ids = 0, list(range(200))
    sequence = TokenSequence(token_ids=ids, sampled=[True] * 200, logprobs=[0.0] * 200, prompt_tokens=0)
    found = Transcript(
        rollout_id=NAME, group_id="g", task_id="t", policy_version=0, messages=[], sequences=[sequence], turns=[]
    )
    assert set(live.texts(found)) == set(ids)
    assert pauses == list(range(AT_ONCE, 201, AT_ONCE))
    assert live.texts(found)[65] == "A" and decoded == [200]  # known from the first time


def test_an_engine_says_how_much_of_its_cache_is_asked_for() -> None:
    meter = Meter()
    meter.kv_tokens = 4096
    meter.began(0.0, prompt_tokens=1000)
    meter.began(1.0, prompt_tokens=500)
    assert (meter.stats(2.0).asked_tokens, meter.stats(2.0).kv_tokens) == (1500, 4096)
    meter.ended(3.0, prompt_tokens=1000)
    meter.ended(4.0, prompt_tokens=500)
    stats = meter.stats(5.0)
    assert stats.asked_tokens == 0 and stats.busy_s == 4.0
    assert EngineStats(running=0, busy_s=0, prompt_tokens=0, cached_tokens=0, sampled_tokens=0).kv_tokens == 0
