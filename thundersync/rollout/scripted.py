"""Rollouts without a model: one that runs the reference solution, one that does nothing.

In the place of `rollout.agent.ShellAgent` in an evaluation: what the first scores is the ceiling of a suite on this
machine, and the second must score nothing. Sandboxes, preparation and judging are the same. Knows nothing of engines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from sandboxes.base import Sandbox
from thundersync.core.types import GroupId, Outcome, Rollout, RolloutId, Scored, Task
from thundersync.generate.base import Generator
from thundersync.monitor.events import AnyEvent, ScoringStarted
from thundersync.rollout.attempt import Attempt, Broken, outcome_of
from thundersync.rollout.said import Said
from thundersync.rollout.worlds import Worlds
from thundersync.score.reward import RewardChecker, Verdict
from thundersync.score.solution import run_solution
from thundersync.score.stages import in_stages

FULL = 1.0 - 1e-9


class ScriptedAgent:
    """`oracle` runs the task's reference solution, as root where it does not work otherwise; `idle` does nothing."""

    def __init__(
        self,
        kind: Literal["oracle", "idle"],
        *,
        worlds: Worlds,
        checker: RewardChecker,
        emit: Callable[[AnyEvent], None],
    ) -> None:
        self._kind = kind
        self._worlds = worlds
        self._checker = checker
        self._emit = emit

    async def run(
        self,
        task: Task,
        *,
        rollout_id: RolloutId,
        group_id: GroupId,
        generator: Generator,
        policy_version: int,
        attempt: int = 1,
    ) -> Rollout:
        """One attempt at `task`; `generator` is not asked. A world that fails is an outcome, not an error."""
        live = Attempt(
            task,
            rollout_id=rollout_id,
            group_id=group_id,
            generator=generator,
            policy_version=policy_version,
            number=attempt,
        )
        self._emit(live.started())
        outcome = await outcome_of(self._judged(live))
        return live.rollout(outcome, Said())

    async def _judged(self, live: Attempt) -> Outcome:
        try:
            verdict = await self._verdict(live)
        finally:
            live.score_s = time.time() - live.started_s
        outcome = Scored(reward=verdict.reward, rewards=verdict.rewards, stop="submitted", change=verdict.change)
        self._emit(live.scored(outcome))
        return outcome

    async def _verdict(self, live: Attempt) -> Verdict:
        if self._kind == "idle":
            return await self._attempt(live, lambda sandbox, task: asyncio.sleep(0))
        if not live.task.solution:
            raise Broken("agent", f"task {live.task.task_id} has no reference solution to run")
        verdict = await self._attempt(live, lambda sandbox, task: run_solution(sandbox, task, "agent"))
        if verdict.reward >= FULL:
            return verdict
        return await self._attempt(live, lambda sandbox, task: run_solution(sandbox, task, "root"))

    async def _attempt(self, live: Attempt, act: Callable[[Sandbox, Task], Awaitable[object]]) -> Verdict:
        async with self._worlds.open(live.task, live.rollout_id) as sandbox:
            live.origin = sandbox.origin

            async def work(stage: Task, last: bool) -> None:
                await act(sandbox, stage)

            async def judge(stage: Task) -> Verdict:
                self._emit(ScoringStarted(at_s=time.time(), rollout_id=live.rollout_id))
                return await self._checker.score(sandbox, stage, rollout_id=live.rollout_id)

            return await in_stages(sandbox, live.task, act=work, judge=judge, checker=self._checker)
