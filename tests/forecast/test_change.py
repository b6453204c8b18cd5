"""A step under other circumstances: each change does what it says, and nothing else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests.forecast.traces import rewarded, step
from thundersync.forecast import StepTrace, simulate
from thundersync.forecast.change import even_costs, faster, fewer_turns, generated_by, spread_by
from thundersync.forecast.path import critical_path
from thundersync.forecast.split import one_more, splits, what_ifs

FEW = settings(max_examples=40, deadline=None)


def generating(trace: StepTrace, share: float) -> StepTrace:
    """Each rollout spent that share of its time generating."""
    return structs.replace(trace, rollouts=[structs.replace(r, generate_s=share * r.release_s) for r in trace.rollouts])


def test_more_engines_divide_the_load_and_nothing_else() -> None:
    trace = generating(step([(10, 0.0, 1), (4, 1.0, 1)], generated_s=8.0), 0.5)
    assert [r.release_s for r in generated_by(trace, 2).rollouts] == [7.5, 3.0]
    assert [r.release_s for r in generated_by(structs.replace(trace, engine_load=0.0), 2).rollouts] == [10.0, 4.0]
    assert generated_by(trace, 2).generated_s == 6.0
    halved = generated_by(structs.replace(trace, engines=2), 1)
    assert [r.release_s for r in halved.rollouts] == [15.0, 6.0]
    # Colocated: two devices generate, then both learn.
    assert simulate(structs.replace(trace, max_tokens=1), "colocated").step_s == 7.5 + 1.0


@FEW
@given(rewarded(overheads=True), st.integers(1, 5))
def test_there_and_back_again_is_the_same_step(trace: StepTrace, engines: int) -> None:
    trace = generating(trace, 0.25)
    again = generated_by(generated_by(trace, engines), 1)
    for before, after in zip(trace.rollouts, again.rollouts, strict=True):
        assert after.release_s == pytest.approx(before.release_s)


def test_each_kind_of_seconds_has_a_factor_of_its_own() -> None:
    trace = generating(step([(10, 0.0, 4), (4, 1.0, 2)], commit_s=3.0, pass_s=1.0), 0.5)
    assert [r.release_s for r in faster(trace, tools=0.5).rollouts] == [7.5, 3.0]
    assert [r.release_s for r in faster(trace, tools=0.5, generating=0.5).rollouts] == [5.0, 2.0]
    slow = faster(trace, learning=2.0)
    assert ([r.cost_s for r in slow.rollouts], slow.pass_s, slow.commit_s) == ([8.0, 4.0], 2.0, 3.0)
    assert faster(trace, after=0.5).commit_s == 1.5


@FEW
@given(rewarded(all_wanted=True))
def test_spread_keeps_the_last_release_and_so_what_lazy_takes(trace: StepTrace) -> None:
    wide = spread_by(trace, 2.0)
    assert wide.released_s == trace.released_s
    assert simulate(wide, "lazy").step_s == simulate(trace, "lazy").step_s
    narrow = spread_by(trace, 0.0)
    assert simulate(narrow, "stream").step_s == simulate(narrow, "lazy").step_s


def test_fewer_turns_shorten_time_and_tokens_alike() -> None:
    trace = structs.replace(step([(10, 0.0, 4), (4, 1.0, 2)]))
    shorter = fewer_turns(trace, 0.5)
    assert [(r.release_s, r.cost_s) for r in shorter.rollouts] == [(5.0, 2.0), (2.0, 1.0)]


def test_one_cost_per_token_keeps_the_sum_over_all_steps() -> None:
    trace = step([(10, 0.0, 4), (4, 1.0, 2)])
    long = structs.replace(trace, rollouts=[structs.replace(r, tokens=5) for r in trace.rollouts])
    even = even_costs([trace, long])
    assert sum(r.cost_s for t in even for r in t.rollouts) == pytest.approx(12.0)
    assert [r.cost_s for r in even[1].rollouts] == [5.0, 5.0]


def test_the_split_that_balances_both_sides_is_the_best_one() -> None:
    # 12 rollouts that generate 16 s on one engine each, 1 s of learning each: 3 engines and 1 trainer are level.
    groups = [[(16.0 * (i + 1) / 12, float(i % 2), 1.0) for i in range(j, j + 4)] for j in (0, 4, 8)]
    trace = generating(step(*groups, engines=2, workers=2, max_tokens=1), 1.0)
    found = splits([trace], "stream")
    assert (found[0].engines, found[0].trainers) == (3, 1)
    assert {(s.engines, s.trainers) for s in found} == {(1, 3), (2, 2), (3, 1)}
    assert found[0].step_s < next(s.step_s for s in found if s.engines == 2)
    assert [(s.engines, s.trainers) for s in one_more([trace], "stream", unit=2)] == [(4, 2), (2, 3)]
    assert [(s.engines, s.trainers) for s in splits([trace], "stream", unit=2)] == [(2, 2)]
    assert [each.speedup >= 1.0 for each in what_ifs([trace], "stream")] == [True] * 3


@FEW
@given(rewarded(overheads=True), st.sampled_from(["stream", "group", "lazy"]))
def test_the_critical_path_adds_up_to_the_step(trace: StepTrace, arm: str) -> None:
    forecast = simulate(generating(trace, 0.5), arm)  # type: ignore[arg-type]
    path = critical_path(generating(trace, 0.5), forecast)
    assert sum(path.values()) == pytest.approx(forecast.step_s)
    assert all(spent >= -1e-9 for spent in path.values())


def test_the_critical_path_names_what_was_waited_for() -> None:
    trace = generating(step([(2, 0.0, 3), (12, 1.0, 3)], commit_s=1.0), 0.25)
    assert critical_path(trace, simulate(trace, "stream")) == {
        "generating": 3.0,
        "tools": 9.0,
        "learning": 3.0,
        "after": 1.0,
    }
    busy = generating(step([(2, 0.0, 30), (12, 1.0, 3)]), 0.25)
    assert critical_path(busy, simulate(busy, "stream")) == {
        "generating": 0.5,
        "tools": 1.5,
        "learning": 33.0,
        "after": 0.0,
    }
