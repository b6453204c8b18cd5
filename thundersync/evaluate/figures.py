"""What an evaluation's rewards come to: pass@k, mean reward, and how sure these are. Pure: values in, figures out.

A task counts once, however many samples it has. A sample whose world failed is no attempt: it is counted apart, and a
task without one scored sample is in no mean. Knows nothing of models, files or tasks' formats.
"""

import math
import random
import statistics
from collections.abc import Sequence

from msgspec import Struct

PASS_REWARD = 1.0
"""A sample passes with this reward or more: all tests pass, whatever partial rewards a task gives below it."""
RESAMPLES = 2000
CONFIDENCE = 0.95
METHOD = (
    "Every task weighs the same. pass@k: the unbiased estimator 1 - C(n - c, k) / C(n, k) of each task with n >= k "
    "scored samples, c of them passed (Chen et al. 2021, arXiv:2107.03374), averaged over tasks. Intervals: 95 %, "
    f"percentile bootstrap over tasks, {RESAMPLES} resamples, seeded; with few tasks they are too narrow, and with one "
    "task there is none. Failed samples are counted apart and are in no mean."
)


class TaskFigures(Struct, frozen=True, kw_only=True):
    """One task's samples."""

    suite: str
    task_id: str
    rewards: list[float]
    """Of its scored samples."""
    failed: int = 0
    """Samples whose world failed for good."""

    @property
    def passed(self) -> int:
        return sum(reward >= PASS_REWARD for reward in self.rewards)


class Estimate(Struct, frozen=True, kw_only=True):
    """A mean over tasks. NaN where there is nothing to tell it from."""

    value: float
    low: float
    high: float
    tasks: int
    """Tasks it is the mean of."""


class SuiteFigures(Struct, frozen=True, kw_only=True):
    """One suite, or all of an evaluation's."""

    suite: str
    tasks: int
    samples: int
    """Asked of each task."""
    scored: int
    failed: int
    unscored_tasks: int
    """Tasks without one scored sample."""
    pass_at: dict[str, Estimate]
    """By k, as text: 1, 2, 4, ... and `samples`."""
    reward: Estimate


def pass_at_k(scored: int, passed: int, k: int) -> float:
    """Probability that one of `k` samples drawn from `scored` without repetition passes, `passed` of which do.

    Raises: ValueError unless 1 <= k <= scored. Source: Chen et al. 2021, arXiv:2107.03374, equation 1.
    """
    if not 1 <= k <= scored:
        raise ValueError(f"pass@{k} cannot be told from {scored} samples")
    if scored - passed < k:
        return 1.0
    return 1.0 - math.comb(scored - passed, k) / math.comb(scored, k)


def suite_figures(suite: str, tasks: Sequence[TaskFigures], *, samples: int, seed: int) -> SuiteFigures:
    """The figures of `tasks`; `samples` were asked of each, `seed` draws the resamples."""
    scored = [task for task in tasks if task.rewards]
    pass_at = {
        str(k): estimate(
            [pass_at_k(len(task.rewards), task.passed, k) for task in scored if len(task.rewards) >= k], seed=seed
        )
        for k in some_k(samples)
    }
    return SuiteFigures(
        suite=suite,
        tasks=len(tasks),
        samples=samples,
        scored=sum(len(task.rewards) for task in tasks),
        failed=sum(task.failed for task in tasks),
        unscored_tasks=len(tasks) - len(scored),
        pass_at=pass_at,
        reward=estimate([statistics.fmean(task.rewards) for task in scored], seed=seed),
    )


def some_k(samples: int) -> list[int]:
    """The k that are told: powers of two below `samples`, and `samples`."""
    return [*(1 << power for power in range(samples.bit_length()) if 1 << power < samples), samples]


def estimate(values: Sequence[float], *, seed: int) -> Estimate:
    """The mean of one value per task, with its percentile bootstrap interval over tasks."""
    if not values:
        return Estimate(value=math.nan, low=math.nan, high=math.nan, tasks=0)
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Estimate(value=mean, low=math.nan, high=math.nan, tasks=1)
    draw = random.Random(seed)
    means = sorted(statistics.fmean(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = (1.0 - CONFIDENCE) / 2
    low, high = means[int(tail * RESAMPLES)], means[int((1.0 - tail) * RESAMPLES) - 1]
    return Estimate(value=mean, low=low, high=high, tasks=len(values))
