"""Evaluation: rollouts on held-out tasks under one committed policy version. Nothing of it is ever trained on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from thundersync.config import EvalConfig
from thundersync.core.types import Rollout, Scored, Task, rollout_id
from thundersync.monitor.events import AnyEvent, EvalFinished, EvalStarted
from thundersync.rollout.runner import GroupPlan, RolloutRunner


class EvalResult(Struct, frozen=True, kw_only=True):
    """Rewards of one evaluation. Failed rollouts are counted, never averaged in as zero."""

    policy_version: int
    reward_mean: float
    """Over tasks, of each task's mean over its scored rollouts; NaN if none was scored."""
    per_task: dict[str, list[float]]
    scored: int
    failed: int
    seconds: float
    rollouts: list[Rollout]


class Evaluator:
    """Runs all evaluation tasks once per call."""

    def __init__(
        self, config: EvalConfig, tasks: Sequence[Task], *, runner: RolloutRunner, emit: Callable[[AnyEvent], None]
    ) -> None:
        self._config = config
        self._tasks = list(tasks)[: config.num_examples or None]
        self._runner = runner
        self._emit = emit

    async def run(self, policy_version: int) -> EvalResult:
        """`group_size` rollouts of every task. Raises what broke an invariant; a failed world is only counted."""
        began_s = time.monotonic()
        plans = [self._plan(policy_version, index, task) for index, task in enumerate(self._tasks)]
        self._emit(
            EvalStarted(
                at_s=time.time(),
                policy_version=policy_version,
                rollouts=sum(len(plan.rollout_ids) for plan in plans),
            )
        )
        rollouts: list[Rollout] = []

        async def keep(rollout: Rollout) -> None:
            rollouts.append(rollout)

        await self._runner.run(plans, policy_version=policy_version, on_rollout=keep)
        rollouts.sort(key=lambda rollout: rollout.rollout_id)
        per_task: dict[str, list[float]] = {}
        for rollout in rollouts:
            if isinstance(rollout.outcome, Scored):
                per_task.setdefault(rollout.task_id, []).append(rollout.outcome.reward)
        means = [statistics.fmean(rewards) for rewards in per_task.values()]
        scored = sum(map(len, per_task.values()))
        result = EvalResult(
            policy_version=policy_version,
            reward_mean=statistics.fmean(means) if means else float("nan"),
            per_task=per_task,
            scored=scored,
            failed=len(rollouts) - scored,
            seconds=time.monotonic() - began_s,
            rollouts=rollouts,
        )
        self._emit(
            EvalFinished(
                at_s=time.time(),
                policy_version=policy_version,
                reward_mean=result.reward_mean,
                scored=scored,
                failed=result.failed,
                seconds=result.seconds,
            )
        )
        return result

    def _plan(self, policy_version: int, index: int, task: Task) -> GroupPlan:
        group = f"eval-{policy_version:06d}-{index:02d}"
        ids = [rollout_id(group, i) for i in range(self._config.group_size)]
        return GroupPlan(group_id=group, task=task, rollout_ids=ids)
