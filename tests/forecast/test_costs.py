"""Costs told from passes, and from how turns slow each other down."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thundersync.forecast.costs import fit
from thundersync.forecast.engine_load import engine_load


@given(st.floats(0, 5), st.floats(0.001, 1), st.sets(st.integers(1, 5000), min_size=3, max_size=30))
def test_passes_on_a_line_give_the_line(fixed_s: float, token_s: float, sizes: set[int]) -> None:
    sizes |= {2 * min(sizes)}
    cost = fit([(size, fixed_s + token_s * size) for size in sizes])
    assert cost.fixed_s == pytest.approx(fixed_s, rel=1e-6, abs=1e-6)
    assert cost.token_s == pytest.approx(token_s, rel=1e-6)
    assert cost.error == pytest.approx(0.0, abs=1e-6)


def test_a_slow_first_pass_does_not_bend_the_line() -> None:
    passes = [(100.0, 60.0), *((float(size), 1.0 + 0.01 * size) for size in range(50, 500, 50))]
    cost = fit(passes)
    assert (cost.fixed_s, cost.token_s) == (pytest.approx(1.0), pytest.approx(0.01))
    assert cost.error > 0.5  # and is not hidden: the error counts it


def test_passes_of_one_size_put_everything_down_to_the_tokens() -> None:
    cost = fit([(200.0, 4.0), (200.0, 6.0), (200.0, 5.0)])
    assert (cost.fixed_s, cost.token_s, cost.passes) == (0.0, 0.025, 3)
    with pytest.raises(ValueError):
        fit([])


@given(st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 100)), min_size=1, max_size=40))
def test_no_cost_is_negative(passes: list[tuple[int, float]]) -> None:
    cost = fit(passes)
    assert cost.fixed_s >= 0 and cost.token_s >= 0


def test_noise_is_no_fixed_cost_beyond_the_shortest_pass() -> None:
    # Time does not grow with size here: at most the shortest pass can be fixed, and the rest is the tokens'.
    cost = fit([(100.0, 30.0), (200.0, 3.0), (300.0, 25.0), (400.0, 28.0)])
    assert cost.fixed_s == 3.0
    assert cost.token_s == pytest.approx((22 / 300 + 25 / 400) / 2, rel=0.3)
    assert fit([(100.0, 30.0), (200.0, 25.0)], least_s=1.0).fixed_s <= 1.0


def test_the_load_of_an_engine_is_what_neighbours_cost() -> None:
    # One turn alone: 10 tokens at 0.1 s. Then four together, each token 0.1 + 3 x 0.1 = 0.4 s: all of it is sharing.
    alone, together = [(0.0, 1.0, 10)], [(2.0, 6.0, 10)] * 4
    assert engine_load(alone + together) == pytest.approx(1.0)
    # Four together as fast as one alone: latency only.
    assert engine_load(alone + [(2.0, 3.0, 10)] * 4) == 0.0
    # Half of it: 0.1 s alone, 0.25 s beside three others: a = 0.05, b = 0.05, 3.4 neighbours on average.
    assert engine_load(alone + [(2.0, 4.5, 10)] * 4) == pytest.approx(0.05 * 3.4 / (0.05 + 0.05 * 3.4))
    assert engine_load([]) == 1.0
