"""Evaluation counts failed worlds and never averages them in; what is known is not asked again."""

import math
from collections.abc import Sequence

from tests.fakes import Feed, a_task
from thundersync.core.types import Failed, Outcome, Rollout, Scored
from thundersync.evaluate.evaluator import Evaluator
from thundersync.monitor.events import EvalFinished, EvalStarted
from thundersync.rollout.runner import GroupPlan, OnRollout


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


def evaluator(*names: str, runner: ScriptedRunner, feed: Feed, samples: int = 2) -> Evaluator:
    tasks = [a_task(name) for name in names]
    return Evaluator(tasks, samples=samples, runner=runner, emit=feed)  # type: ignore[arg-type]


def scored(reward: float) -> Scored:
    return Scored(reward=reward, stop="submitted")


async def test_the_mean_is_over_tasks_and_failed_rollouts_are_only_counted() -> None:
    runner = ScriptedRunner([scored(1.0), Failed(reason="sandbox", detail="x"), scored(0.0), scored(0.5)])
    feed = Feed()
    result = await evaluator("a", "b", runner=runner, feed=feed).run(3)
    assert result.per_task == {"a": [1.0], "b": [0.0, 0.5]}
    assert result.reward_mean == (1.0 + 0.25) / 2
    assert (result.scored, result.failed) == (3, 1)
    last = feed[-1]
    assert isinstance(last, EvalFinished)
    assert last.pass_at_1 == 0.5


async def test_without_a_single_score_the_mean_is_unknown_not_zero() -> None:
    runner = ScriptedRunner([Failed(reason="engine", detail="x")] * 4)
    feed = Feed()
    result = await evaluator("a", "b", runner=runner, feed=feed).run(0)
    assert math.isnan(result.reward_mean)
    assert isinstance(feed[-1], EvalFinished) and math.isnan(feed[-1].pass_at_1)


async def test_known_samples_are_not_run_again_and_count_in_their_places() -> None:
    feed = Feed()
    first = await evaluator("a", "b", runner=ScriptedRunner([scored(1.0)] + [scored(0.0)] * 3), feed=feed).run(0)
    known = {rollout.rollout_id: rollout for rollout in first.rollouts}
    del known["eval-000000-01-00"]
    runner, kept = ScriptedRunner([scored(0.5)]), []

    async def keep(rollout: Rollout) -> None:
        kept.append(rollout.rollout_id)

    again = evaluator("a", "b", runner=runner, feed=feed)
    result = await again.run(0, known=known, keep=keep)
    assert [plan.rollout_ids for plan in runner.plans] == [["eval-000000-01-00"]]
    assert kept == ["eval-000000-01-00"]
    assert result.per_task == {"a": [1.0, 0.0], "b": [0.5, 0.0]}
    started = [event for event in feed if isinstance(event, EvalStarted)]
    assert [event.rollouts for event in started] == [4, 1]


async def test_tasks_of_two_suites_may_share_an_id() -> None:
    runner = ScriptedRunner([scored(1.0), scored(0.0)])
    both = evaluator("same", "same", runner=runner, feed=Feed(), samples=1)
    rows = both.tasks_of(await both.run(0), ["one", "two"])
    assert [(row.suite, row.task_id, row.rewards) for row in rows] == [("one", "same", [1.0]), ("two", "same", [0.0])]
