"""The study's steps are what its settings say, and gain what theory has for them."""

import random
from xml.etree import ElementTree

import msgspec
import pytest
from msgspec import structs

from thundersync.forecast import simulate
from tools.study import Outcome, Setting, grid, outcome, picture, report, step

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


@pytest.mark.parametrize("change", [{}, {"balance": 1.55}])
def test_with_eight_workers_little_is_lost_at_the_end_of_a_step(change: dict[str, object]) -> None:
    found = outcome(structs.replace(MIDDLE, workers=8, **change))
    assert found.speedup > 0.9 * found.bound_speedup


def test_what_it_found_is_told_and_drawn() -> None:
    found = [
        outcome(structs.replace(MIDDLE, prompts=4, spread=spread, balance=b))
        for spread in (0.0, 1.0)
        for b in (0.25, 1.0)
    ]
    told = report(found)
    assert told.startswith("4 configurations") and "| 1 | 1.2" in told
    assert msgspec.json.decode(msgspec.json.encode(found), type=list[Outcome]) == found
    drawn = ElementTree.fromstring(picture(found))
    assert len([path for path in drawn.iter() if path.get("stroke-width")]) == 2 * 2  # a line and its key
