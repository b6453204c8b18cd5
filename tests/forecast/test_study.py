"""The study's steps are what its settings say, and gain what theory has for them."""

import random

import pytest
from msgspec import structs

from thundersync.forecast import simulate
from tools.study import Setting, grid, outcome, step

MIDDLE = Setting(spread=1.0, balance=1.0, group_size=8, prompts=8)


def test_the_grid_has_every_configuration_once() -> None:
    settings = grid()
    assert len(settings) == len(set(settings)) >= 588
    assert {setting.workers for setting in settings} == {1, 2, 4, 8}
    assert any(setting.distils and setting.turns == 20 for setting in settings)


@pytest.mark.parametrize("change", [{}, {"workers": 4}, {"turns": 4}, {"distils": True, "turns": 4}])
def test_learning_takes_as_long_as_generating_times_the_balance(change: dict[str, object]) -> None:
    trace = step(structs.replace(MIDDLE, balance=0.5, commit=0.0, **change), random.Random(1))
    learning_s = simulate(trace, "lazy").learned_s - trace.released_s
    assert 0.5 * trace.released_s == pytest.approx(learning_s, rel=0.1)  # workers end at different moments


def test_balanced_and_spread_steps_gain_most_and_simultaneous_ones_nothing() -> None:
    assert outcome(MIDDLE).speedup > 1.9
    assert outcome(structs.replace(MIDDLE, spread=0.0)).speedup == pytest.approx(1.0)
    lopsided = outcome(structs.replace(MIDDLE, balance=4.0))
    assert 1.15 < lopsided.speedup < 1.3
    assert lopsided.speedup == pytest.approx(lopsided.bound_speedup)  # one worker: no order is better
