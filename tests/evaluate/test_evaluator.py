"""Evaluation counts failed worlds and never averages them in."""

import math
from collections.abc import Sequence

from tests.fakes import Feed, a_task
from thundersync.config_file import config_from
from thundersync.core.types import Failed, Outcome, Rollout, Scored
from thundersync.evaluation import Evaluator
from thundersync.monitor.events import EvalFinished
from thundersync.rollout.runner import GroupPlan, OnRollout

EVAL = config_from(
    {"model": {"name": "m"}, "env": {"path": "p"}, "eval": {"env": {"path": "e"}, "group_size": 2, "num_examples": 2}}
).eval


class ScriptedRunner:
    """Gives each rollout the next outcome of a list."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        self.plans: list[GroupPlan] = []

    async def run(self, groups: Sequence[GroupPlan], *, policy_version: int, on_rollout: OnRollout) -> None:
        self.plans = list(groups)
        for plan in groups:
            for rollout_id in plan.rollout_ids:
                await on_rollout(
                    Rollout(
                        rollout_id=rollout_id,
                        group_id=plan.group_id,
                        task_id=plan.task.task_id,
                        policy_version=policy_version,
                        messages=[],
                        sequences=[],
                        turns=[],
                        outcome=self.outcomes.pop(0),
                        started_s=0.0,
                    )
                )


def scored(reward: float) -> Scored:
    return Scored(reward=reward, stop="submitted")


async def test_the_mean_is_over_tasks_and_failed_rollouts_are_only_counted() -> None:
    assert EVAL is not None
    runner = ScriptedRunner([scored(1.0), Failed(reason="sandbox", detail="x"), scored(0.0), scored(0.5)])
    feed = Feed()
    tasks = [a_task("a"), a_task("b"), a_task("c")]
    result = await Evaluator(EVAL, tasks, runner=runner, emit=feed).run(3)  # type: ignore[arg-type]
    assert len(runner.plans) == 2  # num_examples
    assert result.per_task == {"a": [1.0], "b": [0.0, 0.5]}
    assert result.reward_mean == (1.0 + 0.25) / 2
    assert (result.scored, result.failed) == (3, 1)
    assert isinstance(feed[-1], EvalFinished)


async def test_without_a_single_score_the_mean_is_unknown_not_zero() -> None:
    assert EVAL is not None
    runner = ScriptedRunner([Failed(reason="engine", detail="x")] * 4)
    result = await Evaluator(EVAL, [a_task("a"), a_task("b")], runner=runner, emit=Feed()).run(0)  # type: ignore[arg-type]
    assert math.isnan(result.reward_mean)
