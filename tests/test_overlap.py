"""Backwards that start while the world still works: a turn's while its tool runs, a rollout's while its checker runs.

Each tool call (or checker) waits until the backward has started; if that waited for them, nothing here would end.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandboxes.base import Command, Result
from tests.fakes import ByteTokenizer, FakeGenerator, FakeRuntime, FakeSandbox, FakeTeacher, a_task, done, turns
from tests.learn.replay import InProcessLink, setup
from tests.tiny import tiny_model
from thundersync.config import RolloutConfig
from thundersync.core.ledger import Ledger
from thundersync.core.objective import Objective
from thundersync.core.ready_queue import PartRoom
from thundersync.core.turn_ledger import TurnLedger
from thundersync.core.types import Message, SampledTurn
from thundersync.learn import messages as m
from thundersync.learn.stream import GradientStream
from thundersync.learn.turn_stream import TurnStream
from thundersync.learn.worker import Worker
from thundersync.rollout.agent import ShellAgent
from thundersync.rollout.dialogue import Renderer
from thundersync.rollout.runner import GroupPlan, RolloutRunner
from thundersync.score.reward import RewardChecker
from thundersync.score.teacher import TeacherPool
from thundersync.score.turns import TurnScorer

LIMIT_S = 60.0
LOOK = "```bash\nls\n```"
SUBMIT = "```bash\nls\nsubmit\n```"


class Gate:
    """Opens for a rollout when a backward of it has started."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self._passes: dict[str, int] = {}
        self._news = asyncio.Condition()

    def emit(self, event: Any) -> None:
        self.events.append(event)
        if type(event).__name__ == "PassStarted":
            for rollout_id in event.rollout_ids:
                self._passes[rollout_id] = self._passes.get(rollout_id, 0) + 1
            self._told = asyncio.ensure_future(self._tell())

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def passes(self, rollout_id: str, number: int) -> None:
        async with asyncio.timeout(LIMIT_S), self._news:
            await self._news.wait_for(lambda: self._passes.get(rollout_id, 0) >= number)


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    worker = Worker()
    worker.answer(setup(tiny_model(tmp_path / "model"), tmp_path / "weights", terms=m.Terms()))
    return worker


def agent(runtime: FakeRuntime, gate: Gate, **callbacks: Callable[[Any], None]) -> ShellAgent:
    return ShellAgent(
        renderer=Renderer(ByteTokenizer()),
        runtime=runtime,
        checker=RewardChecker(),
        config=RolloutConfig(command_timeout_s=LIMIT_S, timeout_s=2 * LIMIT_S, max_turns=3),
        prompt=[Message(role="system", content="You have a shell.")],
        emit=gate.emit,
        **callbacks,
    )


async def run(agent: ShellAgent, stream: Any, gate: Gate, rollouts: list[str], script: Any) -> None:
    runner = RolloutRunner(
        agent=agent, generators=[FakeGenerator(script)], on_failure="shrink", max_attempts=1, emit=gate.emit
    )
    plan = GroupPlan(group_id="g", task=a_task(), rollout_ids=rollouts)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stream.run())
        tasks.create_task(runner.run([plan], policy_version=0, on_rollout=stream.land, on_retry=stream.attempt_ended))


def prompt_ids() -> list[int]:
    renderer = Renderer(ByteTokenizer())
    opening = [
        Message(role="system", content="You have a shell."),
        Message(role="user", content=a_task().instruction),
    ]
    return renderer.encode(renderer.text(opening))


@pytest.mark.parametrize("schedule", ["forward", "immediate"])
async def test_a_turns_backward_starts_while_its_tool_call_runs(worker: Worker, schedule: Any) -> None:
    gate = Gate()
    ran: dict[str, int] = {}

    def shell(sandbox: FakeSandbox, command: Command) -> Any:
        rollout_id = sandbox.spec.labels["rollout"]
        ran[rollout_id] = ran.get(rollout_id, 0) + 1

        async def after_the_backward(number: int) -> Result:
            await gate.passes(rollout_id, number)
            return done(b"file\n")

        return after_the_backward(ran[rollout_id])

    stream = TurnStream(
        TurnLedger({"g": ["g-0", "g-1"]}),
        [InProcessLink(worker)],  # type: ignore[list-item]
        objective=Objective(rule=None, distils=True),
        score=TurnScorer(TeacherPool([("*", FakeTeacher())]), topk=0),
        policy_version=0,
        prompts={"g": prompt_ids()},
        prefix=[],
        schedule=schedule,
        max_tokens=100_000,
        longest=300,
        stall_timeout_s=LIMIT_S,
        emit=gate.emit,
    )

    def sampled(turn: SampledTurn) -> None:
        stream.sampled(turn)

    await run(
        agent(FakeRuntime(shell=shell), gate, on_turn=sampled), stream, gate, ["g-0", "g-1"], turns(LOOK, LOOK, SUBMIT)
    )
    assert ran == {"g-0": 3, "g-1": 3}
    kinds = [type(event).__name__ for event in gate.events]
    assert kinds.index("ToolStarted") < kinds.index("PassStarted") < kinds.index("ToolFinished")
    assert not stream.bad


async def test_a_rollouts_backward_starts_while_its_checker_runs(worker: Worker) -> None:
    gate = Gate()
    rewards = {"g-0": b"1\n", "g-1": b"0\n"}

    def checker(sandbox: FakeSandbox, command: Command) -> Any:
        rollout_id = sandbox.spec.labels["rollout"]

        async def after_the_backward() -> Result:
            await gate.passes(rollout_id, 1)
            sandbox.files["/logs/verifier/reward.txt"] = rewards[rollout_id]
            return done()

        return after_the_backward()

    ledger = Ledger({"g": ["g-0", "g-1"]}, objective=Objective(), min_group_size=2)
    link = InProcessLink(worker)
    stream = GradientStream(
        ledger,
        [link],  # type: ignore[list-item]
        policy_version=0,
        prompts={"g": prompt_ids()},
        prefix=[],
        shares_prompts=True,
        max_tokens=100_000,
        room=PartRoom(most=4),
        stall_timeout_s=LIMIT_S,
        emit=gate.emit,
    )
    await run(
        agent(FakeRuntime(checker=checker), gate, on_content=stream.content),
        stream,
        gate,
        ["g-0", "g-1"],
        turns(LOOK, SUBMIT),
    )
    assert sum(isinstance(request, m.RunHeld) for request in link.requests) == 2
    assert ledger.settled
    assert worker._gradient.finish([1.0]).abs().max() > 0.0
