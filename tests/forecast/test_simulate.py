"""The simulated arms against each other, against the bound, and against steps worked out by hand."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests.forecast.traces import SECONDS, distilled, rewarded, step
from thundersync.core.ready_queue import PartRoom
from thundersync.forecast import Arm, StepTrace, TurnTrace, bound, simulate
from thundersync.forecast.trace import UnusableTrace

ARMS: tuple[Arm, ...] = ("stream", "group", "lazy")
NEAR = 1e-9
FEW = settings(max_examples=60, deadline=None)


def seconds(trace: StepTrace, arm: Arm) -> float:
    return simulate(trace, arm).step_s


def test_a_step_worked_out_by_hand_is_simulated_as_such() -> None:
    # Worker: a0 1-3, b0 3-5, a1 5-7 (released at 4), b1 8-10 (released at 8); then 1 s commit and 0.5 s publish.
    trace = step([(1, 0.0, 2), (4, 1.0, 2)], [(2, 0.0, 2), (8, 1.0, 2)], commit_s=1.0, publish_s=0.5, generated_s=8.0)
    stream = simulate(trace, "stream")
    assert [(i.start_s, i.end_s, i.rollout_ids, i.what) for i in stream.intervals] == [
        (1.0, 3.0, ["0-0"], "pass"),
        (3.0, 5.0, ["1-0"], "pass"),
        (5.0, 7.0, ["0-1"], "pass"),
        (8.0, 10.0, ["1-1"], "pass"),
        (10.0, 11.0, [], "commit"),
    ]
    assert (stream.step_s, stream.trainer_busy, stream.engine_busy) == (11.5, 9.0 / 11.5, 8.0 / 11.5)
    # Group a is whole at 4, b at 8: one pass each.
    assert [(i.start_s, i.end_s) for i in simulate(trace, "group").intervals] == [(4.0, 8.0), (8.0, 12.0), (12.0, 13.0)]
    assert seconds(trace, "lazy") == 8 + 8 + 1.5
    assert bound(trace) == 11.5


def test_turns_worked_out_by_hand_are_simulated_as_such() -> None:
    rollout = structs.replace(
        step([(6, 1.0, 0)]).rollouts[0],
        turns=[TurnTrace(release_s=1.0, cost_s=3.0), TurnTrace(release_s=5.0, cost_s=3.0)],
    )
    trace = StepTrace(rollouts=[rollout], commit_s=1.0, publish_s=0.0, longest=1, sweep_share=1 / 3)
    # Forwards 1-3 and 5-7, the sweep of both 7-9; lazily all in one pass from 6.
    assert seconds(trace, "stream") == pytest.approx(10.0)
    assert [i.what for i in simulate(trace, "stream").intervals] == ["pass", "pass", "sweep", "commit"]
    assert seconds(trace, "lazy") == 6 + 6 + 1
    assert seconds(structs.replace(trace, turns_stream=False), "stream") == 13.0


@FEW
@given(rewarded(all_wanted=True))
def test_on_one_worker_without_fixed_costs_streaming_attains_the_bound_and_less_streaming_is_never_faster(
    trace: StepTrace,
) -> None:
    trace = structs.replace(trace, workers=1)
    stream, group, lazy = (seconds(trace, arm) for arm in ARMS)
    assert stream == pytest.approx(bound(trace), abs=NEAR)
    assert stream <= group + NEAR
    assert group <= lazy + NEAR


@FEW
@given(rewarded(all_wanted=True, costs=st.just(1.0)), st.integers(1, 6))
def test_equal_pieces_one_a_pass_keep_the_order_on_any_number_of_workers(trace: StepTrace, workers: int) -> None:
    trace = structs.replace(trace, workers=workers, max_tokens=1)
    stream, group, lazy = (seconds(trace, arm) for arm in ARMS)
    assert bound(trace) <= stream + NEAR
    assert stream <= group + NEAR
    assert group <= lazy + NEAR


@FEW
@given(rewarded(overheads=True))
def test_no_arm_beats_the_bound_whatever_the_step(trace: StepTrace) -> None:
    least = bound(trace)
    for arm in ARMS:
        assert seconds(trace, arm) >= least - NEAR


@FEW
@given(distilled())
def test_no_arm_beats_the_bound_when_turns_are_distilled(trace: StepTrace) -> None:
    least = bound(trace)
    for arm in ARMS:
        assert seconds(trace, arm) >= least - NEAR


@FEW
@given(rewarded(overheads=True))
def test_streaming_loses_to_lazy_at_most_its_extra_work_and_one_uneven_end(trace: StepTrace) -> None:
    """Several workers, fixed costs and groups that turn out flat void the order; this is what is left of it."""
    stream, lazy = simulate(trace, "stream"), simulate(trace, "lazy")
    extra = (sum(stream.busy_s) - sum(lazy.busy_s)) / trace.workers
    longest = max((i.end_s - i.start_s for i in stream.intervals if i.what == "pass"), default=0.0)
    uneven = (1 - 1 / trace.workers) * (longest + len(trace.groups()) * trace.close_s)
    assert stream.step_s <= lazy.step_s + max(0.0, extra) + uneven + NEAR


def test_on_several_workers_a_long_last_piece_can_make_streaming_slower_than_lazy() -> None:
    """Graham's anomaly (1969): two short pieces occupy both workers when the long one lands; lazy begins with it."""
    trace = step([(0, 0.0, 3), (0, 1.0, 3), (1, 4.0, 6)], workers=2, max_tokens=1)
    trace = structs.replace(trace, rollouts=[structs.replace(r, tokens=int(r.cost_s)) for r in trace.rollouts])
    assert (seconds(trace, "stream"), seconds(trace, "lazy"), bound(trace)) == (9.0, 7.0, 7.0)


@FEW
@given(rewarded(all_wanted=True), SECONDS)
def test_released_at_once_all_arms_are_one(trace: StepTrace, at_s: float) -> None:
    trace = structs.replace(trace, rollouts=[structs.replace(r, release_s=at_s) for r in trace.rollouts])
    assert seconds(trace, "stream") == seconds(trace, "group") == seconds(trace, "lazy")


def test_one_rollout_gives_every_arm_nothing_to_overlap() -> None:
    # A single member has no advantage, so its group is flat; a teacher's turn is worked by itself.
    flat = step([(3, 1.0, 5)], commit_s=1.0, min_group_size=1)
    assert [seconds(flat, arm) for arm in ARMS] == [4.0, 4.0, 4.0]
    turn = structs.replace(flat.rollouts[0], turns=[TurnTrace(release_s=3.0, cost_s=5.0)])
    distilled_step = structs.replace(flat, rollouts=[turn])
    assert [seconds(distilled_step, arm) for arm in ARMS] == [9.0, 9.0, 9.0]
    assert bound(distilled_step) == 9.0


@FEW
@given(rewarded(overheads=True))
def test_a_simulation_repeats_itself_and_does_all_the_work_once(trace: StepTrace) -> None:
    for arm in ARMS:
        forecast = simulate(trace, arm)
        assert forecast == simulate(trace, arm)
        worked = [r for i in forecast.intervals if i.what == "pass" for r in i.rollout_ids]
        assert len(worked) == len(set(worked))
        for worker in range(trace.workers):
            own = [i for i in forecast.intervals if i.worker == worker]
            assert all(a.end_s <= b.start_s + NEAR for a, b in pairwise(own))


def test_work_that_is_known_to_weigh_nothing_is_done_in_no_arm() -> None:
    # The second group is flat; streaming finds out only after it has worked its first member while idle.
    trace = step([(1, 0.0, 2), (9, 1.0, 2)], [(3, 1.0, 2), (8, 1.0, 2)])
    assert simulate(trace, "lazy").busy_s == simulate(trace, "group").busy_s == [4.0]
    stream = simulate(trace, "stream")
    assert (stream.busy_s, stream.wasted_s, stream.step_s) == ([6.0], 2.0, 11.0)


def test_held_gradients_start_while_the_checker_runs() -> None:
    # Tokens final at 1 and 4, rewards at 5 and 8: backwards 1-3 and 4-6, and nothing is left to do at 8.
    trace = step([(5, 0.0, 2), (8, 1.0, 2)], commit_s=1.0)
    rollouts = [structs.replace(r, content_s=r.release_s - 4) for r in trace.rollouts]
    trace = structs.replace(trace, rollouts=rollouts)
    assert (seconds(trace, "stream"), bound(trace)) == (11.0, 11.0)
    holding = structs.replace(trace, holds=True)
    assert (seconds(holding, "stream"), bound(holding)) == (9.0, 9.0)
    assert [(i.start_s, i.end_s) for i in simulate(holding, "stream").intervals][:2] == [(1.0, 3.0), (4.0, 6.0)]
    assert seconds(holding, "lazy") == seconds(trace, "lazy")
    # What is held of a rollout whose world then fails was worked for nothing.
    failing = structs.replace(holding, rollouts=[structs.replace(rollouts[0], reward=None), rollouts[1]])
    assert simulate(failing, "stream").wasted_s == 4.0


def test_without_room_for_parts_streaming_waits_for_its_groups() -> None:
    trace = step([(1, 0.0, 2), (9, 1.0, 2)], [(3, 0.0, 2), (8, 1.0, 2)], room=PartRoom(most=0))
    assert seconds(trace, "stream") == seconds(trace, "group")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"rollouts": []}, "no rollouts"),
        ({"commit_s": float("nan")}, "commit or publish takes nan"),
        ({"pass_s": -1.0}, "fixed cost"),
        ({"workers": 0}, "0 trainer devices"),
    ],
)
def test_a_trace_that_no_step_has_is_refused(change: dict[str, object], fault: str) -> None:
    trace = structs.replace(step([(1, 0.0, 1), (2, 1.0, 1)]), **change)
    with pytest.raises(UnusableTrace, match=fault):
        simulate(trace, "stream")
