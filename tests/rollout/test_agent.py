"""One rollout over fakes: every way to stop, every way to fail, and nothing left behind."""

import asyncio
import math
from typing import Any

import pytest

from sandboxes.errors import SandboxGone, StartFailed
from tests.fakes import ByteTokenizer, FakeClock, FakeGenerator, FakeRuntime, Feed, Reply, a_task, done, turns
from thundersync.config import RolloutConfig
from thundersync.core.types import Failed, Message, Rollout, Scored, Task
from thundersync.errors import EngineFailed, StaleRollout
from thundersync.generate.base import Generation
from thundersync.rollout.agent import ShellAgent
from thundersync.rollout.dialogue import Renderer
from thundersync.rollout.protocol import BASH_TOOL
from thundersync.score.reward import RewardChecker

PROMPT = [Message(role="system", content="You have a shell.")]
LIST = "```bash\nls\n```"
SUBMIT = "```bash\nsubmit\n```"


def agent_over(
    runtime: FakeRuntime, feed: Feed | None = None, *, clock: Any = None, grace_s: float = 30.0, **config: Any
) -> ShellAgent:
    return ShellAgent(
        renderer=Renderer(ByteTokenizer()),
        runtime=runtime,
        checker=RewardChecker(),
        config=RolloutConfig(**config),
        prompt=PROMPT,
        emit=feed if feed is not None else Feed(),
        grace_s=grace_s,
        **({"clock": clock} if clock else {}),
    )


async def roll(
    agent: ShellAgent, generator: FakeGenerator, task: Task | None = None, *, policy_version: int = 0
) -> Rollout:
    return await agent.run(
        task or a_task(),
        rollout_id="000000-00-00",
        group_id="000000-00",
        generator=generator,
        policy_version=policy_version,
    )


def assert_consistent(rollout: Rollout) -> None:
    """Turns name exactly the sampled tokens, and every list has one length."""
    spans: dict[int, set[int]] = {}
    for turn in rollout.turns:
        spans.setdefault(turn.sequence, set()).update(range(turn.start, turn.end))
    for index, sequence in enumerate(rollout.sequences):
        assert len(sequence.token_ids) == len(sequence.sampled) == len(sequence.logprobs)
        assert {at for at, sampled in enumerate(sequence.sampled) if sampled} == spans[index]
        assert sequence.prompt_tokens == sequence.sampled.index(True)
        assert sequence.sampled[-1]
    replies = [index for index, message in enumerate(rollout.messages) if message.role == "assistant"]
    assert [turn.message for turn in rollout.turns] == replies


async def test_a_rollout_ends_with_its_submission_and_is_scored() -> None:
    runtime = FakeRuntime(verdict=b"0.5\n", shell=lambda sandbox, command: done(b"file\n"))
    feed = Feed()
    generator = FakeGenerator(turns(LIST, "```bash\ntouch x\nsubmit\n```"))
    rollout = await roll(agent_over(runtime, feed), generator)
    assert rollout.outcome == Scored(reward=0.5, rewards={"reward": 0.5}, stop="submitted")
    assert [message.role for message in rollout.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert rollout.messages[3].content == "file"
    assert [turn.command for turn in rollout.turns] == ["ls", "touch x"]
    ran = [command.script.split("; ", 1)[1] for command in runtime.sandboxes[0].commands if command.user == "agent"]
    assert ran == ["ls", "touch x"]
    assert_consistent(rollout)
    assert len(rollout.sequences) == 1
    assert feed.kinds == [
        "rollout_started",
        "sandbox_started",
        *["turn_started", "turn_generated", "tool_started", "tool_finished"] * 2,
        "scoring_started",
        "rollout_scored",
    ]
    assert not runtime.open


async def test_the_engine_gets_exactly_the_tokens_that_are_recorded() -> None:
    generator = FakeGenerator(turns(LIST, LIST, SUBMIT))
    rollout = await roll(agent_over(FakeRuntime()), generator)
    [sequence] = rollout.sequences
    for asked, turn in zip(generator.asked, rollout.turns, strict=True):
        assert asked.prompt_ids == sequence.token_ids[: turn.start]
    renderer = Renderer(ByteTokenizer())
    assert renderer.decode(sequence.token_ids) + "\n" == renderer.text(rollout.messages, generation_prompt=False)


async def test_a_submission_alone_runs_no_command() -> None:
    runtime = FakeRuntime()
    rollout = await roll(agent_over(runtime), FakeGenerator(turns(SUBMIT)))
    assert [command.user for command in runtime.sandboxes[0].commands] == ["root", "root"]
    assert rollout.turns[0].command == "" and rollout.turns[0].exit_code is None


async def test_tool_calls_are_answered_in_the_tool_role_where_the_template_has_tools() -> None:
    class WithTools(ByteTokenizer):
        def apply_chat_template(self, conversation: Any, *, tools: Any = None, **fields: Any) -> str:
            declared = "<|im_start|>system\n<tool_call> bash<|im_end|>\n" if tools else ""
            return declared + super().apply_chat_template(conversation, **fields)

    agent = ShellAgent(
        renderer=Renderer(WithTools(), tools=[BASH_TOOL]),
        runtime=FakeRuntime(shell=lambda sandbox, command: done(b"out")),
        checker=RewardChecker(),
        config=RolloutConfig(),
        prompt=PROMPT,
        emit=Feed(),
    )
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    rollout = await roll(agent, FakeGenerator(turns(call, SUBMIT)))
    assert rollout.messages[3] == Message(role="tool", content="out")
    assert rollout.turns[0].command == "ls"
    assert_consistent(rollout)


async def test_the_second_reply_without_an_action_in_a_row_ends_the_rollout() -> None:
    generator = FakeGenerator(turns("hm", LIST, "hm", "hm", SUBMIT))
    rollout = await roll(agent_over(FakeRuntime()), generator)
    assert isinstance(rollout.outcome, Scored) and rollout.outcome.stop == "no_action"
    assert len(rollout.turns) == 4
    assert rollout.messages[3].content.startswith("Your reply held no ```bash block")


async def test_the_last_allowed_turn_still_runs_its_command() -> None:
    runtime = FakeRuntime()
    rollout = await roll(agent_over(runtime, max_turns=2), FakeGenerator(turns(LIST, LIST, SUBMIT)))
    assert isinstance(rollout.outcome, Scored) and rollout.outcome.stop == "max_turns"
    assert len([command for command in runtime.sandboxes[0].commands if command.user == "agent"]) == 2


async def test_a_reply_cut_at_its_limit_before_any_action_ends_the_rollout() -> None:
    rollout = await roll(agent_over(FakeRuntime(), max_tokens=8), FakeGenerator(turns("I would like to say that")))
    assert isinstance(rollout.outcome, Scored) and rollout.outcome.stop == "reply_limit"
    assert rollout.sampled_tokens == 8


async def test_a_reply_cut_at_its_limit_behind_its_action_goes_on_with_the_end_of_turn_added_unsampled() -> None:
    said = LIST + "\nand then some more words"
    rollout = await roll(agent_over(FakeRuntime(), max_tokens=len(LIST) + 5), FakeGenerator(turns(said, SUBMIT)))
    assert isinstance(rollout.outcome, Scored) and rollout.outcome.stop == "submitted"
    [sequence] = rollout.sequences
    first = rollout.turns[0]
    assert sequence.token_ids[first.end] == ByteTokenizer.eos_token_id
    assert not sequence.sampled[first.end]
    assert_consistent(rollout)


async def test_a_full_context_ends_the_rollout_with_what_was_sampled_before() -> None:
    renderer = Renderer(ByteTokenizer())
    opening = len(renderer.encode(renderer.text([*PROMPT, Message(role="user", content="Do it.")])))
    cut = await roll(agent_over(FakeRuntime()), FakeGenerator(turns("I would like to"), max_model_len=opening + 4))
    assert isinstance(cut.outcome, Scored) and cut.outcome.stop == "context" and cut.sampled_tokens == 4
    full = await roll(agent_over(FakeRuntime()), FakeGenerator(turns(LIST), max_model_len=opening + len(LIST) + 1))
    assert isinstance(full.outcome, Scored) and full.outcome.stop == "context"
    assert len(full.turns) == 1
    assert_consistent(full)


async def test_a_prompt_without_room_for_a_reply_is_told_as_such() -> None:
    runtime = FakeRuntime()
    rollout = await roll(agent_over(runtime), FakeGenerator(turns(LIST), max_model_len=10))
    assert isinstance(rollout.outcome, Failed) and rollout.outcome.reason == "agent"
    assert "leaves no room" in rollout.outcome.detail
    assert not rollout.sequences and not runtime.open


async def test_time_ends_the_rollout_after_the_command_that_used_it_up() -> None:
    clock = FakeClock()

    def slow(sandbox: Any, command: Any) -> Any:
        assert command.timeout_s == 100.0
        clock.advance(100.0)
        return done(timed_out=True, exit_code=137)

    runtime = FakeRuntime(shell=slow)
    agent = agent_over(runtime, clock=clock, timeout_s=100.0, command_timeout_s=500.0)
    rollout = await roll(agent, FakeGenerator(turns(LIST, LIST)))
    assert isinstance(rollout.outcome, Scored) and rollout.outcome.stop == "time"
    assert rollout.turns[0].output == "[stopped after 100 s]"
    assert rollout.tool_s == 100.0


async def test_a_reply_that_time_overtakes_is_aborted_and_the_rest_is_scored() -> None:
    clock = FakeClock()

    def nearly_over(sandbox: Any, command: Any) -> Any:
        clock.advance(99.99)
        return done()

    generator = FakeGenerator(turns(LIST, Reply(text=LIST, before=asyncio.Event().wait)))
    rollout = await roll(agent_over(FakeRuntime(shell=nearly_over), clock=clock, timeout_s=100.0), generator)
    assert isinstance(rollout.outcome, Scored) and rollout.outcome.stop == "time"
    assert generator.aborted == ["000000-00-00/1/1"]
    assert_consistent(rollout)


async def test_an_engine_that_never_answers_is_a_failed_engine() -> None:
    generator = FakeGenerator(turns(Reply(text=LIST, before=asyncio.Event().wait)))
    rollout = await roll(agent_over(FakeRuntime(), timeout_s=0.01), generator)
    assert isinstance(rollout.outcome, Failed) and rollout.outcome.reason == "engine"


async def test_a_task_with_a_shorter_limit_has_it() -> None:
    clock = FakeClock()
    limits = []

    def shell(sandbox: Any, command: Any) -> Any:
        limits.append(command.timeout_s)
        return done()

    agent = agent_over(FakeRuntime(shell=shell), clock=clock, timeout_s=100.0, command_timeout_s=50.0)
    await roll(agent, FakeGenerator(turns(LIST, SUBMIT)), a_task(agent_timeout_s=7.0))
    assert limits == [7.0]


@pytest.mark.parametrize("method", ["start", "run", "put_tree", "kill_all", "read"])
async def test_a_broken_sandbox_is_a_failed_world_wherever_it_breaks(method: str) -> None:
    runtime = FakeRuntime(failing={method: SandboxGone("fake-0", "the daemon died")})
    rollout = await roll(agent_over(runtime), FakeGenerator(turns(LIST, SUBMIT)))
    assert isinstance(rollout.outcome, Failed) and rollout.outcome.reason == "sandbox"
    assert "the daemon died" in rollout.outcome.detail
    assert not runtime.open
    assert_consistent(rollout)


async def test_a_sandbox_that_never_starts_is_a_failed_world() -> None:
    runtime = FakeRuntime()
    runtime.start_gate = asyncio.Event()
    task = a_task(build_timeout_s=0.01)
    rollout = await roll(agent_over(runtime, grace_s=0.0), FakeGenerator(turns(SUBMIT)), task)
    assert rollout.outcome == Failed(reason="sandbox", detail="the sandbox did not start within 0.01 s")


async def test_a_sandbox_that_never_answers_is_a_failed_world() -> None:
    runtime = FakeRuntime(shell=lambda sandbox, command: asyncio.Event().wait())
    agent = agent_over(runtime, command_timeout_s=0.01, grace_s=0.1)
    rollout = await roll(agent, FakeGenerator(turns(LIST)))
    assert isinstance(rollout.outcome, Failed) and rollout.outcome.reason == "sandbox"
    assert "did not run a command within" in rollout.outcome.detail
    assert not runtime.open


async def test_an_empty_prompt_is_told_as_such() -> None:
    class Mute(ByteTokenizer):
        def apply_chat_template(self, *_: Any, **__: Any) -> str:
            return ""

    runtime = FakeRuntime()
    agent = ShellAgent(
        renderer=Renderer(Mute()),
        runtime=runtime,
        checker=RewardChecker(),
        config=RolloutConfig(),
        prompt=PROMPT,
        emit=Feed(),
    )
    rollout = await roll(agent, FakeGenerator(turns(SUBMIT)))
    assert rollout.outcome == Failed(reason="agent", detail="the chat template made an empty prompt")
    assert not runtime.sandboxes


async def test_a_dead_engine_is_a_failed_world() -> None:
    runtime = FakeRuntime()
    rollout = await roll(agent_over(runtime), FakeGenerator(turns(LIST, EngineFailed("the engine died"))))
    assert rollout.outcome == Failed(reason="engine", detail="the engine died")
    assert len(rollout.turns) == 1
    assert not runtime.open


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Generation(token_ids=[65], logprobs=[], finish_reason="stop", policy_version=0), "engine"),
        (Generation(token_ids=[], logprobs=[], finish_reason="stop", policy_version=0), "engine"),
        (Generation(token_ids=[65], logprobs=[-1.0], finish_reason="abort", policy_version=0), "engine"),
        (Generation(token_ids=[65], logprobs=[math.nan], finish_reason="stop", policy_version=0), "nonfinite"),
        (Generation(token_ids=[65], logprobs=[-math.inf], finish_reason="stop", policy_version=0), "nonfinite"),
    ],
)
async def test_nonsense_from_the_engine_is_a_failed_world(answer: Generation, reason: str) -> None:
    rollout = await roll(agent_over(FakeRuntime()), FakeGenerator(turns(answer)))
    assert isinstance(rollout.outcome, Failed) and rollout.outcome.reason == reason


@pytest.mark.parametrize(("verdict", "reason"), [(b"", "no_reward"), (b"nan", "no_reward"), (b"True", "no_reward")])
async def test_a_missing_reward_is_a_failed_world_and_never_zero(verdict: bytes, reason: str) -> None:
    rollout = await roll(agent_over(FakeRuntime(verdict=verdict)), FakeGenerator(turns(SUBMIT)))
    assert isinstance(rollout.outcome, Failed) and rollout.outcome.reason == reason


async def test_another_policy_version_than_the_bound_one_is_loud() -> None:
    runtime = FakeRuntime()
    with pytest.raises(StaleRollout, match="came from policy version 3, its step is bound to 4"):
        await roll(agent_over(runtime), FakeGenerator(turns(LIST), policy_version=3), policy_version=4)
    assert runtime.sandboxes and not runtime.open


@pytest.mark.parametrize("stage", ["sampling", "command", "checker"])
async def test_a_cancelled_rollout_leaves_no_sandbox_and_no_request(stage: str) -> None:
    reached, never = asyncio.Event(), asyncio.Event()

    async def stuck(*_: Any) -> Any:
        reached.set()
        await never.wait()

    reply = Reply(text=LIST, before=stuck) if stage == "sampling" else SUBMIT if stage == "checker" else LIST
    runtime = FakeRuntime(shell=stuck if stage == "command" else None, checker=stuck if stage == "checker" else None)
    generator = FakeGenerator(turns(reply))
    running = asyncio.create_task(roll(agent_over(runtime), generator))
    await reached.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert runtime.sandboxes and not runtime.open
    assert generator.running == 0


async def test_a_second_cancellation_does_not_cut_the_teardown_short() -> None:
    reached, never = asyncio.Event(), asyncio.Event()

    async def stuck() -> None:
        reached.set()
        await never.wait()

    runtime = FakeRuntime()
    runtime.close_gate = asyncio.Event()
    running = asyncio.create_task(roll(agent_over(runtime), FakeGenerator(turns(Reply(text=LIST, before=stuck)))))
    await reached.wait()
    running.cancel()
    await runtime.closing.wait()
    running.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not running.done()
    runtime.close_gate.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not runtime.open


async def test_a_sandbox_that_does_not_close_is_named_and_the_verdict_stands() -> None:
    feed = Feed()
    runtime = FakeRuntime(failing={"close": StartFailed("the daemon is slow")})
    rollout = await roll(agent_over(runtime, feed), FakeGenerator(turns(SUBMIT)))
    assert isinstance(rollout.outcome, Scored)
    assert "the daemon is slow" in next(event.text for event in feed if event.__class__.__name__ == "Warned")


async def test_the_checker_sees_nothing_before_the_agent_has_ended(tmp_path: Any) -> None:
    (tmp_path / "test.sh").write_text("true")
    seen: list[bool] = []

    def shell(sandbox: Any, command: Any) -> Any:
        seen.append("/tests/test.sh" in sandbox.files)
        return done()

    def check(sandbox: Any, command: Any) -> Any:
        seen.append("/tests/test.sh" in sandbox.files)
        sandbox.files["/logs/verifier/reward.txt"] = b"1"
        return done()

    runtime = FakeRuntime(shell=shell, checker=check)
    await roll(agent_over(runtime), FakeGenerator(turns(LIST, SUBMIT)), a_task(tests=tmp_path))
    assert seen == [False, True]
    calls = runtime.sandboxes[0].calls
    assert calls.index("kill_all") < calls.index("put_tree")


async def test_a_sandbox_is_asked_for_what_the_task_needs() -> None:
    runtime = FakeRuntime()
    task = a_task(workdir="/app", env={"A": "b"}, cpus=2.0, memory_mib=512, disk_mib=99, network=True)
    await roll(agent_over(runtime, timeout_s=10.0), FakeGenerator(turns(SUBMIT)), task)
    spec = runtime.sandboxes[0].spec
    assert (spec.image, spec.workdir, spec.env, spec.network) == ("fake", "/app", {"A": "b"}, True)
    assert (spec.cpus, spec.memory_mib, spec.disk_mib) == (2.0, 512, 99)
    assert spec.ttl_s > 10.0 + task.checker.timeout_s
    assert spec.labels["rollout"] == "000000-00-00"
