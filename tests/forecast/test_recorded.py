"""Traces read from a run's events give back the steps that the run had."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests.forecast.told import run_of
from tests.forecast.traces import step
from thundersync.core.objective import Objective
from thundersync.forecast import Arm, StepTrace, simulate
from thundersync.forecast.recorded import read_traces
from thundersync.monitor import events as e

RULES = StepTrace(rollouts=[], commit_s=0.0, publish_s=0.0)
SLOW_PASS_S = 0.5


def told_step(releases: list[float], rewards: list[float | None], tokens: list[int], **others: object) -> StepTrace:
    """Two groups; a token costs 10 ms, a pass 0.5 s more."""
    pairs = list(zip(releases, rewards, strict=True))
    half = len(pairs) // 2
    made = step(*[[(at, r, 0.0) for at, r in part] for part in (pairs[:half], pairs[half:])], **others)
    rollouts = [
        structs.replace(
            r,
            rollout_id=f"{r.group_id}-{i % half:02d}",
            cost_s=0.01 * n,
            tokens=n,
            generate_s=r.release_s / 2,
        )
        for i, (r, n) in enumerate(zip(made.rollouts, tokens, strict=True))
    ]
    return structs.replace(made, rollouts=rollouts, pass_s=SLOW_PASS_S, commit_s=1.0, publish_s=0.5)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 40).map(float), min_size=6, max_size=6),
    st.lists(st.sampled_from([0.0, 0.25, 1.0, None]), min_size=6, max_size=6),
    st.lists(st.integers(50, 90).map(lambda n: n * 10), min_size=6, max_size=6),
    st.sampled_from(["stream", "group", "lazy"]),
    st.integers(1, 2),
)
def test_a_step_read_back_takes_what_it_took(
    releases: list[float], rewards: list[float | None], tokens: list[int], arm: Arm, workers: int
) -> None:
    trace = told_step(releases, rewards, tokens, workers=workers, max_tokens=1500)
    read = read_traces(run_of([trace], arm), structs.replace(RULES, max_tokens=1500))
    if not any(interval.what == "pass" for interval in simulate(trace, arm).intervals):
        assert read.steps == [] and "no pass" in read.left_out[0]
        return
    (again,) = read.steps
    assert [r.release_s for r in again.rollouts] == pytest.approx(releases)
    assert [r.reward for r in again.rollouts] == rewards
    assert again.workers == workers
    assert simulate(again, arm).step_s == pytest.approx(simulate(trace, arm).step_s)
    assert again.measured_s == pytest.approx(simulate(trace, arm).step_s)


def test_the_cost_of_pieces_that_were_never_worked_is_told_from_the_others() -> None:
    # The second group is flat; were it not, its pieces would cost what their tokens say, here 10 ms each.
    trace = told_step([1, 20, 30, 31], [0.0, 1.0, 1.0, 1.0], [400, 900, 700, 800], max_tokens=1)
    read = read_traces(run_of([trace], "lazy"), RULES)
    assert read.cost is not None
    assert [r.tokens for r in read.steps[0].rollouts] == [400, 900, 700, 800]
    assert read.steps[0].rollouts[2].cost_s == pytest.approx(7.0, rel=0.05)
    assert read.steps[0].rollouts[0].generate_s == pytest.approx(0.5)
    assert read.steps[0].generated_s == 15.5


def test_passes_that_no_formula_fits_are_replayed_exactly_all_the_same() -> None:
    trace = told_step([1, 20, 30, 31], [0.0, 1.0, 1.0, 0.0], [500, 900, 700, 800], max_tokens=1)
    uneven = [structs.replace(r, cost_s=c) for r, c in zip(trace.rollouts, [40.0, 2.0, 31.0, 0.0], strict=True)]
    trace = structs.replace(trace, rollouts=uneven)
    (again,) = read_traces(run_of([trace], "lazy"), structs.replace(RULES, max_tokens=1)).steps
    assert simulate(again, "lazy").step_s == pytest.approx(simulate(trace, "lazy").step_s)


def test_a_closing_is_what_the_trainer_was_busy_with_beyond_its_passes() -> None:
    trace = told_step([1, 20, 30, 31], [0.0, 1.0, 1.0, 0.0], [500, 900, 700, 800], close_s=2.0)
    (again,) = read_traces(run_of([trace]), RULES).steps
    assert again.close_s == pytest.approx(2.0)


def test_steps_that_cannot_be_simulated_are_left_out_by_name() -> None:
    trace = told_step([1, 20, 30, 31], [0.0, 1.0, 1.0, 0.0], [500, 900, 700, 800])
    events = run_of([trace, trace, trace, trace])
    lost = next(i for i, event in enumerate(events) if isinstance(event, e.RolloutScored))
    committed = [i for i, event in enumerate(events) if isinstance(event, e.StepCommitted)]
    audit = e.Audited(at_s=9000.0, step=1, relative_l2=0.0, worst=0.0, worst_name="", tolerance=1.0, ok=True)
    told = [*events[:lost], *events[lost + 1 : committed[1]], audit, *events[committed[1] : committed[3]]]
    read = read_traces(told, RULES)  # the last step never committed
    assert [each.step for each in read.steps] == [2]
    assert read.left_out == ["step 0: 3 of its 4 rollouts are in the events", "step 1: its audit took part of its time"]


def test_steps_of_another_arm_are_no_steps_of_the_run() -> None:
    trace = told_step([1, 20, 30, 31], [0.0, 1.0, 1.0, 0.0], [500, 900, 700, 800])
    events = [
        structs.replace(event, mode="lazy") if isinstance(event, e.StepOpened) and event.step == 1 else event
        for event in run_of([trace, trace])
    ]
    read = read_traces(events, RULES)
    assert ([each.step for each in read.steps], read.left_out) == ([0], ["step 1: it ran as lazy"])


def test_a_step_that_a_resumed_run_worked_again_counts_once() -> None:
    trace = told_step([1, 20, 30, 31], [0.0, 1.0, 1.0, 0.0], [500, 900, 700, 800])
    whole = run_of([trace])
    read = read_traces([*whole[: len(whole) // 2], *whole], RULES)
    assert [each.step for each in read.steps] == [0]
    assert len(read.steps[0].rollouts) == 4


def test_devices_come_from_the_run_where_it_tells_them() -> None:
    trace = told_step([1, 20, 30, 31], [0.0, 1.0, 1.0, 0.0], [500, 900, 700, 800], engines=3, workers=2)
    events = run_of([trace])
    (again,) = read_traces(events, RULES).steps
    assert (again.engines, again.workers) == (3, 2)
    silent = structs.replace(events[0], engine_devices=0, trainer_workers=0)
    (again,) = read_traces([silent, *events[1:]], RULES).steps
    assert again.engines == 1


def test_distilled_turns_are_read_with_their_scores_and_sweeps() -> None:
    at, name, group = 100.0, "000000-00-00", "000000-00"
    rules = structs.replace(RULES, objective=Objective(rule=None, distils=True), longest=64)
    busy = [(1, 40, 2.0), (2, 60, 3.0), (3, 0, 5.0)]
    events: list[e.AnyEvent] = [
        e.StepOpened(at_s=at, step=0, policy_version=0, group_ids=[group], task_ids=["t"], group_size=1),
        e.RolloutStarted(at_s=at, rollout_id=name, group_id=group, task_id="t"),
    ]
    for turn, (prompt, sampled, generated, scored) in enumerate([(10, 40, 2.0, 3.0), (70, 60, 6.0, 7.0)]):
        events += [
            e.TurnGenerated(
                at_s=at + generated,
                rollout_id=name,
                turn=turn,
                sampled_tokens=sampled,
                prompt_tokens=prompt,
                cached_tokens=0,
                generate_s=1.0,
                finish_reason="stop",
            ),
            e.TurnScored(at_s=at + scored, rollout_id=name, turn=turn, tokens=sampled, score_s=1.0, held=False),
        ]
    events.append(
        e.RolloutScored(
            at_s=at + 8,
            rollout_id=name,
            group_id=group,
            reward=1.0,
            stop="submitted",
            turns=2,
            sampled_tokens=100,
            score_s=0.0,
        )
    )
    for number, tokens, busy_s in busy:
        events += [
            e.PassStarted(at_s=at + 8 + number, worker=0, pass_id=number, rollout_ids=[name], tokens=tokens, queued=0),
            e.PassDone(at_s=at + 8 + number + busy_s, worker=0, pass_id=number, rollout_ids=[name], busy_s=busy_s),
        ]
    metrics = {"step_s": 20.0, "between_s": 1.0, "publish_s": 0.25, "commit_s": 0.75, "trainer_busy": 10.75 / 20}
    events.append(e.StepCommitted(at_s=at + 20, step=0, policy_version=1, empty=False, metrics=metrics))
    (trace,) = read_traces(events, rules).steps
    (rollout,) = trace.rollouts
    assert [(turn.release_s, turn.tokens) for turn in rollout.turns] == [(3.0, 40), (7.0, 80)]
    assert (rollout.release_s, trace.sweep_share, trace.commit_s) == (8.0, 0.5, 0.75)
    assert sum(t.cost_s for t in rollout.turns) + 3 * trace.pass_s == pytest.approx(10.0)
