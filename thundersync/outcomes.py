"""What the rollouts of a step came to, in figures and in words. Reads them; changes and tells nothing."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

from thundersync.core.types import Failed, FailureKind, Rollout, Scored, TaskId
from thundersync.learn.stream import GradientStream
from thundersync.learn.turn_stream import TurnStream

_TASKS_OWN: tuple[FailureKind, ...] = ("sandbox", "checker", "no_reward", "agent")
"""Failures that the same task is likely to meet again."""


def step_metrics(stream: GradientStream | TurnStream, *, groups: int, bound_to: int) -> dict[str, float]:
    """What the rollouts of a step came to; rewards are those that voted."""
    rollouts, counted = stream.rollouts, stream.counted
    rewards = [reward for group in counted for reward in group]
    scored = sum(isinstance(r.outcome, Scored) for r in rollouts)
    stops = [r.outcome.stop for r in rollouts if isinstance(r.outcome, Scored)]
    mixed = sum(len(set(group)) > 1 for group in counted)
    return {
        "reward_mean": statistics.fmean(rewards) if rewards else math.nan,
        "reward_std": statistics.pstdev(rewards) if rewards else math.nan,
        "groups_mixed": float(mixed),
        "groups_flat": float(len(counted) - mixed),
        "groups_dropped": float(groups - len(counted)),
        "rollouts_scored": float(scored),
        "rollouts_failed": float(len(rollouts) - scored),
        "truncated_share": sum(s not in ("submitted", "no_action") for s in stops) / len(stops) if stops else math.nan,
        "turns_mean": statistics.fmean(len(r.turns) for r in rollouts) if rollouts else math.nan,
        "tokens": float(sum(r.sampled_tokens for r in rollouts)),
        "staleness": float(max((bound_to - t.policy_version for r in rollouts for t in r.turns), default=0)),
    }


def tasks_without_score(rollouts: Sequence[Rollout]) -> Iterator[str]:
    """A sentence for each task that costs rollouts and gives nothing: it failed every time, by what may be its own
    fault. Other tasks were scored.
    """
    outcomes = defaultdict[TaskId, list[Failed | Scored]](list)
    for rollout in rollouts:
        outcomes[rollout.task_id].append(rollout.outcome)
    for task_id, found in outcomes.items():
        failed = [each for each in found if isinstance(each, Failed)]
        if len(failed) == len(found) and all(each.reason in _TASKS_OWN for each in failed):
            yield (
                f"not one of the {len(failed)} rollouts of task {task_id} could be scored; the first: "
                f"{failed[0].detail} (`tasks check` tells such tasks, and env.checked leaves them out)"
            )
