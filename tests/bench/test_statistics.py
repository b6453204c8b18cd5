"""Orders that drift cannot favour, and what repeats say."""

import pytest

from thundersync.bench.statistics import spread, turns_taken
from thundersync.bench.watch import covered_s


def test_two_arms_take_turns_as_a_b_b_a() -> None:
    assert turns_taken(["a", "b"], 4) == [["a", "b"], ["b", "a"], ["b", "a"], ["a", "b"]]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_over_enough_repeats_every_arm_has_every_place_equally_often(count: int) -> None:
    names = [str(index) for index in range(count)]
    orders = turns_taken(names, 2 * count)
    for place in range(count):
        assert sorted(order[place] for order in orders) == sorted(names * 2)


def test_the_spread_of_repeats_is_told_by_quartiles_and_by_where_the_median_lies() -> None:
    found = spread([4.0, 1.0, 2.0, 3.0, 5.0])
    assert (found.low, found.median, found.high) == (2.0, 3.0, 4.0)
    assert 1.0 <= found.median_low <= found.median <= found.median_high <= 5.0
    assert spread([2.0]) == spread([2.0])
    assert (spread([2.0]).low, spread([2.0]).median_high) == (2.0, 2.0)


def test_spans_that_overlap_are_counted_once() -> None:
    assert covered_s([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.5, 5.6)]) == 4.0
    assert covered_s([]) == 0.0
