"""Charts: round ticks, readable numbers, names that do not cover each other, nothing of a run as markup."""

import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thundersync.report.chart import LABEL_GAP, Chart, Series, draw, duration, thinned, ticks, written

numbers = st.floats(min_value=-1e9, max_value=1e9, allow_subnormal=False)


@given(numbers, numbers, st.integers(2, 8))
def test_ticks_span_the_data_in_equal_round_steps(first: float, second: float, about: int) -> None:
    low, high = min(first, second), max(first, second)
    found = ticks(low, high, about)
    assert 2 <= len(found) <= 2 * about + 3
    slack = (found[-1] - found[0]) * 1e-6
    assert found[0] <= low + slack and found[-1] >= high - slack
    assert found == sorted(found)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0, "", "0"),
        (0.123456, "", "0.123"),
        (0.00002, "", "2e-5"),
        (12345.0, "", "12.35k"),
        (0.831, "%", "83.1 %"),
        (61.7, "s", "61.7 s"),
        (185.0, "s", "185 s"),
        (5.8, "GiB", "5.8 GiB"),
        (math.nan, "", "–"),
    ],
)
def test_numbers_are_written_as_a_reader_wants_them(value: float, unit: str, text: str) -> None:
    assert written(value, unit) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0312, "31 ms"),
        (8.44, "8.4 s"),
        (59.6, "1 min"),
        (130.0, "2 min 10 s"),
        (3600.0, "1 h"),
        (5400.0, "1 h 30 min"),
    ],
)
def test_durations_are_told_in_the_units_people_use(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_long_series_are_thinned_to_means_and_keep_their_last_point() -> None:
    points = [(float(x), float(x % 2)) for x in range(10_001)]
    fewer = thinned(points, 100)
    assert len(fewer) <= 100 and fewer[-1] == points[-1]
    assert all(abs(y - 0.5) < 0.02 for _, y in fewer[:-1])
    assert thinned(points[:50], 100) == points[:50]


@given(st.lists(st.floats(0, 1), min_size=2, max_size=6))
def test_names_of_lines_never_cover_each_other(ends: list[float]) -> None:
    series = [Series(name=f"run {i}", points=[(0.0, 0.5), (1.0, end)], tone=i) for i, end in enumerate(ends)]
    svg = draw(Chart(title="t", series=series))
    heights = sorted(float(y) for y in re.findall(r'class="label tone\d" x="[\d.]+" y="([-\d.]+)"', svg))
    assert len(heights) == len(ends)
    assert all(later - earlier >= LABEL_GAP - 0.2 for earlier, later in itertools.pairwise(heights))
    assert heights[0] > 0 and heights[-1] < 190


def test_a_name_of_a_run_is_text_in_a_chart() -> None:
    svg = draw(
        Chart(
            title='"><script>',
            series=[Series(name="<b>'\"", points=[(0.0, 1.0)]), Series(name="x", points=[(0.0, 2.0)])],
        )
    )
    assert "<script" not in svg and "<b>" not in svg


def test_a_chart_without_a_number_is_not_drawn() -> None:
    assert draw(Chart(title="t", series=[Series(name="x", points=[])])) == ""
    assert "<svg" in draw(Chart(title="t", series=[Series(name="x", points=[(3.0, 3.0)])]))
