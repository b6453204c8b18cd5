"""The next step's sandboxes start once this step's all have theirs, and never too many are alive."""

import asyncio

from sandboxes import Pool, SandboxSpec
from tests.fakes import FakeRuntime, a_task
from thundersync.ahead import Ahead, sandbox_gauge, sandbox_metrics
from thundersync.core.types import Task, group_id, rollout_id
from thundersync.monitor.events import (
    RolloutFailed,
    RolloutScored,
    RolloutStarted,
    StepCommitted,
    StepOpened,
)


def spec_of(task: Task) -> SandboxSpec:
    return SandboxSpec(image=task.task_id)


class Run:
    """Two steps of two groups of two, told event by event."""

    def __init__(self, *, most: int = 8, steps: int = 2) -> None:
        self.runtime = FakeRuntime()
        self.pool = Pool(self.runtime)
        self.ahead = Ahead(
            self.pool,
            tasks_of=lambda step: [a_task(f"{step}-a"), a_task(f"{step}-b")],
            spec_of=spec_of,
            group_size=2,
            steps=steps,
            most=most,
        )
        self.groups = [group_id(0, 0), group_id(0, 1)]
        self.ids = [rollout_id(group, i) for group in self.groups for i in range(2)]
        self.ahead.see(
            StepOpened(at_s=0.0, step=0, policy_version=0, group_ids=self.groups, task_ids=["0-a", "0-b"], group_size=2)
        )

    def start(self, name: str, attempt: int = 1) -> None:
        self.ahead.see(RolloutStarted(at_s=0.0, rollout_id=name, group_id=name[:-3], task_id="", attempt=attempt))

    def end(self, name: str) -> None:
        self.ahead.see(
            RolloutScored(
                at_s=0.0, rollout_id=name, group_id=name[:-3], reward=0.0, stop="submitted", turns=1,
                sampled_tokens=1, score_s=0.0,
            )
        )  # fmt: skip

    def begun(self) -> int:
        state = self.pool.state()
        return state.ready + state.starting


async def test_nothing_starts_ahead_while_a_rollout_of_the_step_waits_for_its_sandbox() -> None:
    run = Run()
    for name in run.ids[:3]:
        run.start(name)
        run.end(name)
    assert run.begun() == 0
    run.start(run.ids[3])
    assert run.begun() == 4
    await run.pool.close()
    assert run.runtime.open == []


async def test_lent_and_waiting_together_stay_within_the_limit() -> None:
    run = Run(most=4)
    for name in run.ids:
        run.start(name)
    assert run.begun() == 0  # four are lent
    run.end(run.ids[0])
    assert run.begun() == 1
    run.ahead.see(
        RolloutFailed(at_s=0.0, rollout_id=run.ids[1], group_id="", failure="sandbox", detail="", will_retry=True)
    )
    run.start(run.ids[1], attempt=2)
    run.end(run.ids[2])
    assert run.begun() == 2
    run.ahead.see(StepCommitted(at_s=0.0, step=0, policy_version=1, empty=False, metrics={}))
    assert run.begun() == 4
    for name in ("eval-000001-00-00", "eval-000001-01-00"):  # an evaluation takes their room
        run.start(name)
    assert run.begun() == 2
    run.end("eval-000001-00-00")
    assert run.begun() == 3
    await run.pool.close()
    assert run.runtime.open == []


async def test_what_was_started_ahead_is_what_the_next_step_gets() -> None:
    run = Run()
    for name in run.ids:
        run.start(name)
        run.end(name)
    while run.pool.state().ready < 4:  # noqa: ASYNC110 - the pool starts them on this loop
        await asyncio.sleep(0)
    for image in ("1-a", "1-a", "1-b", "1-b"):
        await run.pool.start(SandboxSpec(image=image, labels={"rollout": "x"}))
    assert len(run.runtime.sandboxes) == 4
    metrics = sandbox_metrics(run.pool)
    assert (metrics["sandboxes_from_stock"], metrics["sandboxes_started_late"]) == (4.0, 0.0)
    assert metrics["sandbox_start_p95_s"] >= metrics["sandbox_start_p50_s"] >= 0.0
    assert sandbox_gauge(run.pool).ready == 0
    await run.pool.close()


async def test_there_is_nothing_to_prepare_after_the_last_step() -> None:
    run = Run(steps=1)
    for name in run.ids:
        run.start(name)
        run.end(name)
    assert run.begun() == 0
    await run.pool.close()
