"""Agent functions over fakes: their tokens are captured exactly, and whatever they do ends in an honest outcome."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sandboxes.base import Command
from sandboxes.errors import SandboxError, SandboxGone
from tests.fakes import Asked, ByteTokenizer, FakeGenerator, FakeRuntime, Feed, Reply, a_task, done, turns
from thundersync.config import RolloutConfig
from thundersync.core.types import Failed, FinalContent, Message, Rollout, SampledTurn, Scored
from thundersync.errors import EngineFailed, StaleRollout, ThundersyncError
from thundersync.rollout.dialogue import Renderer
from thundersync.rollout.functions import FunctionAgent
from thundersync.rollout.policy import Policy
from thundersync.rollout.sampler import LimitReached
from thundersync.score.judge import CheckerJudge, FunctionJudge
from thundersync.score.reward import RewardChecker


async def roll(
    function: Callable[..., Awaitable[Any]],
    *,
    says: Any = "well",
    reward: Callable[..., Awaitable[Any]] | None = None,
    runtime: FakeRuntime | None = None,
    feed: Feed | None = None,
    tokenizer: Any = None,
    on_turn: Callable[[SampledTurn], None] | None = None,
    on_content: Callable[[FinalContent], None] | None = None,
    task: Any = None,
    version: int = 0,
    **config: Any,
) -> Rollout:
    runtime = runtime or FakeRuntime()
    checker = RewardChecker()
    script = says if callable(says) else (lambda asked: Reply(text=says))
    agent = FunctionAgent(
        function,
        renderer=Renderer(tokenizer or ByteTokenizer()),
        runtime=runtime,
        checker=checker,
        judge=FunctionJudge(reward) if reward else CheckerJudge(checker),
        config=RolloutConfig(**config),
        prompt=[],
        emit=feed if feed is not None else Feed(),
        on_turn=on_turn,
        on_content=on_content,
    )
    rollout = await agent.run(
        task or a_task(),
        rollout_id="000000-00-00",
        group_id="000000-00",
        generator=FakeGenerator(script, policy_version=version),
        policy_version=0,
    )
    assert not runtime.open
    for index, sequence in enumerate(rollout.sequences):
        own = [turn for turn in rollout.turns if turn.sequence == index]
        sampled = {at for turn in own for at in range(turn.start, turn.end)}
        assert sampled == {at for at, was in enumerate(sequence.sampled) if was}
        assert sequence.prompt_tokens == min(sampled)
    for turn in rollout.turns:
        assert turn.message is not None and turn.conversation <= turn.message
        said = Renderer(ByteTokenizer()).decode(rollout.sequences[turn.sequence].token_ids[turn.start : turn.end])
        assert rollout.messages[turn.message].role == "assistant"
        assert said.startswith(rollout.messages[turn.message].content)
    return rollout


async def talk(task: Any, policy: Policy, sandbox: Any) -> None:
    messages = policy.opening
    for _ in range(3):
        reply = await policy.chat(messages)
        messages += [reply.message, {"role": "user", "content": "and?"}]


async def test_a_conversation_is_one_sequence_that_only_grows() -> None:
    feed = Feed()
    rollout = await roll(talk, says=turns("one", "two", "three"), feed=feed)
    assert rollout.outcome == Scored(reward=1.0, rewards={"reward": 1.0}, stop="submitted")
    [sequence] = rollout.sequences
    renderer = Renderer(ByteTokenizer())
    assert renderer.decode(sequence.token_ids) + "\n" == renderer.text(rollout.messages, generation_prompt=False)
    assert [message.content for message in rollout.messages] == ["Do it.", "one", "and?", "two", "and?", "three"]
    assert feed.kinds == [
        "rollout_started",
        *["turn_started", "turn_generated"] * 3,
        "scoring_started",
        "sandbox_started",  # for the checker: the function needed none
        "rollout_scored",
    ]


async def test_an_edited_history_goes_on_in_a_sequence_of_its_own_and_is_told() -> None:
    replies = []

    async def agent(task: Any, policy: Policy, sandbox: Any) -> None:
        messages = policy.opening
        replies.append(await policy.chat(messages))
        edited = Message(role="assistant", content="WELL")
        replies.append(await policy.chat([*messages, edited, Message(role="user", content="and?")]))
        assert policy.forks == 1

    feed = Feed()
    rollout = await roll(agent, feed=feed)
    assert [reply.extends for reply in replies] == [False, False]
    assert [turn.sequence for turn in rollout.turns] == [0, 1]
    assert len(rollout.sequences) == 2
    assert "warned" in feed.kinds


async def test_a_template_that_rewrites_forks_without_losing_a_token() -> None:
    class Forgetful(ByteTokenizer):
        """Drops all but the last reply, as templates drop earlier reasoning."""

        def apply_chat_template(self, conversation: Any, **fields: Any) -> str:
            said = [each for each in conversation if each["role"] == "assistant"]
            kept = [each for each in conversation if each["role"] != "assistant" or each is said[-1]]
            return super().apply_chat_template(kept, **fields)

    rollout = await roll(talk, says=turns("one", "two", "three"), tokenizer=Forgetful())
    text = [Renderer(ByteTokenizer()).decode(sequence.token_ids) for sequence in rollout.sequences]
    assert len(text) == 2 and text[0].endswith("two<|im_end|>") and text[1].endswith("three<|im_end|>")


async def test_exact_ids_are_continued_as_they_are() -> None:
    async def agent(task: Any, policy: Policy, sandbox: Any) -> None:
        first = await policy.sample([1, 2, 3])
        second = await policy.sample([*first.prompt_ids, *first.token_ids, 9, 9])
        assert second.extends and second.prompt_ids[:3] == [1, 2, 3]
        await policy.sample([1, 2, 3])

    rollout = await roll(agent, says="ab")
    assert [sequence.token_ids for sequence in rollout.sequences] == [
        [1, 2, 3, 97, 98, 257, 9, 9, 97, 98, 257],
        [1, 2, 3, 97, 98, 257],
    ]
    assert [message.role for message in rollout.messages] == ["user", "assistant"] * 3


async def test_replies_may_be_asked_for_side_by_side() -> None:
    async def agent(task: Any, policy: Policy, sandbox: Any) -> None:
        await asyncio.gather(*(policy.chat([*policy.opening, Message(role="user", content=c)]) for c in "abc"))

    told: list[SampledTurn] = []
    rollout = await roll(agent, on_turn=told.append)
    assert sorted(turn.sequence for turn in rollout.turns) == [0, 1, 2]
    assert [turn.index for turn in rollout.turns] == [0, 1, 2]
    for turn in told:
        assert turn.token_ids == rollout.sequences[turn.sequence].token_ids[: turn.end]


async def test_two_answers_to_one_reply_are_one_extension_and_one_fork() -> None:
    async def agent(task: Any, policy: Policy, sandbox: Any) -> None:
        first = await policy.chat(policy.opening)
        then = [[*policy.opening, first.message, Message(role="user", content=c)] for c in "ab"]
        replies = await asyncio.gather(*map(policy.chat, then))
        assert sorted(reply.extends for reply in replies) == [False, True]

    rollout = await roll(agent)
    assert len(rollout.sequences) == 2


@pytest.mark.parametrize(
    ("returned", "outcome"),
    [
        (Scored(reward=0.25), Scored(reward=0.25)),
        (Failed(reason="agent", detail="no"), Failed(reason="agent", detail="no")),
        (Scored(reward=float("nan")), Failed(reason="no_reward", detail="the agent function gave a reward of nan")),
    ],
)
async def test_an_agent_may_judge_itself(returned: Any, outcome: Any) -> None:
    async def agent(task: Any, policy: Policy, sandbox: Any) -> Any:
        await policy.chat(policy.opening)
        return returned

    async def reward(*_: Any) -> float:
        raise AssertionError("nobody asks")

    assert (await roll(agent, reward=reward)).outcome == outcome


async def test_a_reward_function_sees_the_rollout_and_its_sandbox() -> None:
    async def agent(task: Any, policy: Policy, sandbox: Any) -> None:
        await policy.chat(policy.opening)
        await sandbox.run(Command(script="touch x"))

    async def reward(task: Any, rollout: Any, sandbox: Any) -> float:
        assert rollout.reply == "well" and rollout.stop == "submitted" and rollout.task_id == task.task_id
        assert (await sandbox.run(Command(script="ls"))).stdout == b"out"
        return 0.5

    feed = Feed()
    runtime = FakeRuntime(shell=lambda sandbox, command: done(b"out"))
    rollout = await roll(agent, reward=reward, runtime=runtime, feed=feed)
    assert rollout.outcome == Scored(reward=0.5, rewards={"reward": 0.5})
    assert len(runtime.sandboxes) == 1
    assert rollout.image == "sha256:fake"
    assert [(turn.command, turn.output) for turn in rollout.turns] == [("touch x", "out")]
    assert feed.kinds.count("tool_started") == feed.kinds.count("tool_finished") == 1


async def test_a_sandbox_that_nobody_uses_never_starts() -> None:
    async def reward(*_: Any) -> float:
        return 1.0

    runtime = FakeRuntime()
    rollout = await roll(talk, reward=reward, runtime=runtime)
    assert runtime.sandboxes == [] and rollout.image == ""


async def test_a_sandbox_that_a_forgotten_task_starts_is_closed_too() -> None:
    runtime = FakeRuntime()
    runtime.start_gate = asyncio.Event()
    left: list[asyncio.Task[Any]] = []

    async def agent(task: Any, policy: Policy, sandbox: Any) -> Any:
        await policy.chat(policy.opening)
        left.append(asyncio.create_task(sandbox.run(Command(script="ls"))))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.01, runtime.start_gate.set)
        return Scored(reward=1.0)

    await roll(agent, runtime=runtime)  # which looks that no sandbox is open
    assert len(runtime.sandboxes) == 1
    with contextlib.suppress(SandboxError):
        await left[0]


async def raises(*_: Any) -> float:
    return 1.0 / 0.0


async def gives_nan(*_: Any) -> float:
    return float("nan")


async def gives_none(*_: Any) -> None:
    return None


@pytest.mark.parametrize(
    ("reward", "reason", "said"),
    [
        (raises, "checker", "ZeroDivisionError"),
        (gives_nan, "no_reward", "nan"),
        (gives_none, "no_reward", "None"),
    ],
)
async def test_a_reward_that_is_none_is_a_failure_and_no_zero(reward: Any, reason: str, said: str) -> None:
    outcome = (await roll(talk, reward=reward)).outcome
    assert isinstance(outcome, Failed) and outcome.reason == reason and said in outcome.detail


async def test_a_reward_function_has_the_checkers_deadline() -> None:
    async def reward(*_: Any) -> float:
        await asyncio.Event().wait()
        return 1.0

    task = a_task()
    task = type(task)(**{f: getattr(task, f) for f in task.__struct_fields__} | {"checker": _short(task.checker)})
    outcome = (await roll(talk, reward=reward, task=task)).outcome
    assert isinstance(outcome, Failed) and "ran past 0.01 s" in outcome.detail


def _short(checker: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(checker, timeout_s=0.01)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("its server is down"), "function"),
        (TimeoutError("its own"), "function"),
        (SandboxGone("s", "died"), "sandbox"),
        (EngineFailed("died"), "engine"),
    ],
)
async def test_an_agent_that_raises_is_a_failed_world(error: Exception, reason: str) -> None:
    async def agent(task: Any, policy: Policy, sandbox: Any) -> None:
        await policy.chat(policy.opening)
        raise error

    outcome = (await roll(agent)).outcome
    assert isinstance(outcome, Failed) and outcome.reason == reason


async def test_limits_end_a_rollout_that_is_then_judged_as_it_is() -> None:
    async def chatters(task: Any, policy: Policy, sandbox: Any) -> None:
        while True:
            await policy.chat(policy.opening)

    rollout = await roll(chatters, max_turns=3)
    assert rollout.outcome == Scored(reward=1.0, rewards={"reward": 1.0}, stop="max_turns")
    assert len(rollout.turns) == 3

    async def dawdles(task: Any, policy: Policy, sandbox: Any) -> None:
        await policy.chat(policy.opening)
        await asyncio.Event().wait()

    rollout = await roll(dawdles, timeout_s=0.05)
    assert isinstance(rollout.outcome, Scored) and rollout.outcome.stop == "time"


async def test_a_sandbox_that_never_started_is_no_reward_when_time_is_up() -> None:
    runtime = FakeRuntime()
    runtime.start_gate = asyncio.Event()  # its daemon is away

    async def agent(task: Any, policy: Policy, sandbox: Any) -> None:
        await policy.chat(policy.opening)
        await sandbox.run(Command(script="true"))

    outcome = (await roll(agent, runtime=runtime, timeout_s=0.2)).outcome
    assert isinstance(outcome, Failed) and outcome.reason == "sandbox"


async def test_a_limit_may_be_caught() -> None:
    async def agent(task: Any, policy: Policy, sandbox: Any) -> Any:
        await policy.chat(policy.opening)
        assert policy.turns_left == 0
        with pytest.raises(LimitReached, match="max_turns"):
            await policy.chat(policy.opening)
        return Scored(reward=0.125)

    assert (await roll(agent, max_turns=1)).outcome == Scored(reward=0.125)


async def test_an_agent_that_let_the_policy_say_nothing_has_no_reward() -> None:
    async def silent(task: Any, policy: Policy, sandbox: Any) -> Any:
        return Scored(reward=1.0)

    outcome = (await roll(silent)).outcome
    assert isinstance(outcome, Failed) and outcome.reason == "agent"


async def test_nothing_is_sampled_for_a_rollout_that_has_ended() -> None:
    kept: list[Policy] = []

    async def agent(task: Any, policy: Policy, sandbox: Any) -> None:
        kept.append(policy)
        await policy.chat(policy.opening)

    rollout = await roll(agent)
    with pytest.raises(LimitReached, match="has ended"):
        await kept[0].chat(kept[0].opening)
    assert len(rollout.turns) == 1


async def test_viewers_are_told_that_a_request_was_given_up_and_it_counts_as_no_turn() -> None:
    async def agent(task: Any, policy: Policy, sandbox: Any) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(policy.chat(policy.opening), 0.01)
        await policy.chat(policy.opening)

    def script(asked: Asked) -> Reply:
        return Reply(text="never", before=asyncio.Event().wait) if asked.turn == 0 else Reply(text="said")

    feed = Feed()
    rollout = await roll(agent, says=script, feed=feed)
    told = [kind for kind in feed.kinds if kind.startswith("turn_")]
    assert told == ["turn_started", "turn_aborted", "turn_started", "turn_generated"]
    assert [turn.index for turn in rollout.turns] == [1]


async def test_a_request_that_outlives_its_rollout_ends_for_viewers_before_the_scoring() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()
    left: list[asyncio.Task[Any]] = []

    async def hang() -> None:
        begun.set()
        await go_on.wait()

    async def agent(task: Any, policy: Policy, sandbox: Any) -> None:
        await policy.chat(policy.opening)
        left.append(asyncio.create_task(policy.chat(policy.opening)))
        await begun.wait()

    def script(asked: Asked) -> Reply:
        return Reply(text="late", before=hang) if asked.turn == 1 else Reply(text="said")

    feed = Feed()
    await roll(agent, says=script, feed=feed)
    go_on.set()
    with pytest.raises(LimitReached, match="ended while"):
        await left[0]
    scoring = feed.kinds.index("scoring_started")
    assert feed.kinds[1:scoring] == ["turn_started", "turn_generated", "turn_started", "turn_aborted"]
    assert "turn_aborted" not in feed.kinds[scoring:]


async def test_a_stale_reply_breaks_the_run() -> None:
    with pytest.raises(StaleRollout):
        await roll(talk, version=1)


async def test_an_agent_that_gives_something_else_breaks_the_run() -> None:
    async def agent(task: Any, policy: Policy, sandbox: Any) -> Any:
        await policy.chat(policy.opening)
        return 1.0

    with pytest.raises(ThundersyncError, match=r"gave 1\.0"):
        await roll(agent)


async def test_content_is_final_before_the_reward_is_known() -> None:
    seen: list[FinalContent] = []

    async def reward(task: Any, rollout: Any, sandbox: Any) -> float:
        assert [content.rollout_id for content in seen] == [rollout.rollout_id]
        assert seen[0].sequences == rollout.sequences
        return 1.0

    assert isinstance((await roll(talk, reward=reward, on_content=seen.append)).outcome, Scored)


@pytest.mark.parametrize("wrong", ["hello", {"role": "user"}, {"role": "king", "content": "x"}])
async def test_what_is_no_message_is_the_agents_error(wrong: Any) -> None:
    async def agent(task: Any, policy: Policy, sandbox: Any) -> None:
        with pytest.raises(ValueError, match="is no message"):
            await policy.chat([wrong])
        await policy.chat(policy.opening)

    assert isinstance((await roll(agent)).outcome, Scored)


async def test_sampling_settings_can_only_be_narrowed() -> None:
    async def agent(task: Any, policy: Policy, sandbox: Any) -> None:
        assert len((await policy.chat(policy.opening, max_tokens=2)).token_ids) == 2
        assert len((await policy.chat(policy.opening, max_tokens=99)).token_ids) == 4

    await roll(agent, says="long enough", max_tokens=4)
