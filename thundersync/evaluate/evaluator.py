"""Rollouts on held-out tasks under one committed policy version. Nothing of them is ever trained on.

Place in the flow: between two steps of a run, or the whole of an `eval`. Decides which rollouts there are and what is
kept of them; how one goes is `rollout.runner`'s, what their rewards come to is `figures`'.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from thundersync.core.types import GroupId, Rollout, RolloutId, Scored, Task, rollout_id
from thundersync.evaluate.figures import PASS_REWARD, TaskFigures
from thundersync.monitor.events import AnyEvent, EvalFinished, EvalStarted
from thundersync.rollout.runner import GroupPlan, OnRollout, RolloutRunner


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
    """By id: those of the first task first."""


class Evaluator:
    """Runs all its tasks once per call, `samples` rollouts of each."""

    def __init__(
        self, tasks: Sequence[Task], *, samples: int, runner: RolloutRunner, emit: Callable[[AnyEvent], None]
    ) -> None:
        self._tasks = list(tasks)
        self._samples = samples
        self._runner = runner
        self._emit = emit

    async def run(
        self,
        policy_version: int,
        *,
        known: Mapping[RolloutId, Rollout] | None = None,
        keep: OnRollout | None = None,
    ) -> EvalResult:
        """Every task's samples, less those that are `known`; `keep` gets each new one the moment it is finished.

        Raises what broke an invariant; a failed world is only counted.
        """
        began_s = time.monotonic()
        plans = [self._plan(policy_version, index, task) for index, task in enumerate(self._tasks)]
        rollouts = [known[name] for plan in plans for name in plan.rollout_ids if name in known] if known else []
        left = _less(plans, {rollout.rollout_id for rollout in rollouts})
        self._emit(
            EvalStarted(
                at_s=time.time(),
                policy_version=policy_version,
                rollouts=sum(len(plan.rollout_ids) for plan in left),
            )
        )

        async def finished(rollout: Rollout) -> None:
            rollouts.append(rollout)
            if keep is not None:
                await keep(rollout)

        if left:
            await self._runner.run(left, policy_version=policy_version, on_rollout=finished)
        order = {name: index for index, name in enumerate(name for plan in plans for name in plan.rollout_ids)}
        rollouts.sort(key=lambda rollout: order[rollout.rollout_id])
        result = _result(rollouts, policy_version=policy_version, seconds=time.monotonic() - began_s)
        self._emit(
            EvalFinished(
                at_s=time.time(),
                policy_version=policy_version,
                reward_mean=result.reward_mean,
                scored=result.scored,
                failed=result.failed,
                seconds=result.seconds,
                pass_at_1=_pass_at_1(rollouts),
            )
        )
        return result

    def tasks_of(self, result: EvalResult, suites: Sequence[str]) -> list[TaskFigures]:
        """What each task came to, in the tasks' order; `suites` are the names of theirs."""
        rewards: list[list[float]] = [[] for _ in self._tasks]
        failed = [0] * len(self._tasks)
        place = {self.group_of(result.policy_version, index): index for index in range(len(self._tasks))}
        for rollout in result.rollouts:
            index = place[rollout.group_id]
            if isinstance(rollout.outcome, Scored):
                rewards[index].append(rollout.outcome.reward)
            else:
                failed[index] += 1
        return [
            TaskFigures(suite=suite, task_id=task.task_id, rewards=rewards[index], failed=failed[index])
            for index, (suite, task) in enumerate(zip(suites, self._tasks, strict=True))
        ]

    def group_of(self, policy_version: int, index: int) -> GroupId:
        """The name of the group of the task at `index`."""
        return f"eval-{policy_version:06d}-{index:02d}"

    def _plan(self, policy_version: int, index: int, task: Task) -> GroupPlan:
        group = self.group_of(policy_version, index)
        ids = [rollout_id(group, i) for i in range(self._samples)]
        return GroupPlan(group_id=group, task=task, rollout_ids=ids)


def _less(plans: Sequence[GroupPlan], done: set[RolloutId]) -> list[GroupPlan]:
    left = [
        GroupPlan(
            group_id=plan.group_id,
            task=plan.task,
            rollout_ids=[name for name in plan.rollout_ids if name not in done],
        )
        for plan in plans
    ]
    return [plan for plan in left if plan.rollout_ids]


def _result(rollouts: list[Rollout], *, policy_version: int, seconds: float) -> EvalResult:
    per_task: dict[str, list[float]] = {}
    for rollout in rollouts:
        if isinstance(rollout.outcome, Scored):
            per_task.setdefault(rollout.task_id, []).append(rollout.outcome.reward)
    means = [statistics.fmean(rewards) for rewards in per_task.values()]
    scored = sum(map(len, per_task.values()))
    return EvalResult(
        policy_version=policy_version,
        reward_mean=statistics.fmean(means) if means else float("nan"),
        per_task=per_task,
        scored=scored,
        failed=len(rollouts) - scored,
        seconds=seconds,
        rollouts=rollouts,
    )


def _pass_at_1(rollouts: Sequence[Rollout]) -> float:
    tasks: dict[str, list[float]] = {}
    for rollout in rollouts:
        if isinstance(rollout.outcome, Scored):
            tasks.setdefault(rollout.group_id, []).append(rollout.outcome.reward)
    shares = [statistics.fmean(reward >= PASS_REWARD for reward in rewards) for rewards in tasks.values()]
    return statistics.fmean(shares) if shares else float("nan")
