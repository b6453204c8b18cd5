"""pass@k is the share of k-subsets that hold a pass; intervals are seeded; nothing failed is in a mean."""

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thundersync.evaluate.figures import TaskFigures, estimate, pass_at_k, some_k, suite_figures


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(case: tuple[int, int, int]) -> None:
    scored, passed, k = case
    samples = [True] * passed + [False] * (scored - passed)
    subsets = list(itertools.combinations(samples, k))
    assert pass_at_k(scored, passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_more_samples_than_there_are_cannot_be_told() -> None:
    with pytest.raises(ValueError, match="pass@3"):
        pass_at_k(2, 1, 3)


def task(name: str, *rewards: float, failed: int = 0) -> TaskFigures:
    return TaskFigures(suite="s", task_id=name, rewards=list(rewards), failed=failed)


def test_a_failed_sample_is_counted_apart_and_leaves_its_task_out_of_pass_at_k() -> None:
    rows = [task("a", 1.0, 0.0), task("b", 1.0, failed=1), task("c", failed=2)]
    figures = suite_figures("s", rows, samples=2, seed=0)
    assert (figures.scored, figures.failed, figures.unscored_tasks) == (3, 3, 1)
    assert figures.pass_at["1"].value == pytest.approx((0.5 + 1.0) / 2)
    assert (figures.pass_at["2"].value, figures.pass_at["2"].tasks) == (1.0, 1)
    assert figures.reward.value == pytest.approx(0.75)


def test_a_partial_reward_is_no_pass() -> None:
    figures = suite_figures("s", [task("a", 0.9, 2.0)], samples=2, seed=0)
    assert figures.pass_at["1"].value == 0.5


def test_intervals_are_seeded_hold_the_mean_and_need_two_tasks() -> None:
    values = [0.0, 0.0, 1.0, 1.0, 1.0, 0.5]
    first, same, other = estimate(values, seed=1), estimate(values, seed=1), estimate(values, seed=2)
    assert first == same
    assert first.low <= statistics.fmean(values) <= first.high
    assert (other.low, other.high) == pytest.approx((first.low, first.high), abs=0.1)
    assert math.isnan(estimate([1.0], seed=1).low)
    assert math.isnan(estimate([], seed=1).value)


def test_the_interval_narrows_with_the_root_of_the_tasks() -> None:
    few, many = estimate([0.0, 1.0] * 8, seed=3), estimate([0.0, 1.0] * 128, seed=3)
    assert (few.high - few.low) / (many.high - many.low) == pytest.approx(4.0, rel=0.2)


def test_the_k_that_are_told_end_with_all_samples() -> None:
    assert [some_k(1), some_k(2), some_k(6), some_k(8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
