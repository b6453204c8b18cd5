"""Events of a step as spans: who did what, and where the time went."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.monitor.fake_run import fake_run
from tests.report.made_run import MadeRun, make_run
from thundersync.monitor import events as e
from thundersync.report.record import RunRecord, read_run, step_events
from thundersync.report.timeline import Span, both_of, length, running, shares, step_timeline, union

NAME = "000000-00-00"


def opened(at: float = 100.0, size: int = 1) -> e.StepOpened:
    return e.StepOpened(at_s=at, step=0, policy_version=0, group_ids=["000000-00"], task_ids=["task"], group_size=size)


def test_one_rollout_is_told_phase_by_phase() -> None:
    ids = {"rollout_id": NAME, "group_id": "000000-00"}
    timeline = step_timeline(
        [
            opened(),
            e.RolloutSeated(at_s=101.0, rollout_id=NAME, engine=3),
            e.RolloutStarted(at_s=101.0, task_id="task", **ids),
            e.RolloutFailed(at_s=102.0, failure="sandbox", detail="gone", will_retry=True, **ids),
            e.RolloutStarted(at_s=103.0, task_id="task", attempt=2, **ids),
            e.TurnStarted(at_s=104.0, rollout_id=NAME, turn=0),
            e.TurnGenerated(
                at_s=106.0, rollout_id=NAME, turn=0, sampled_tokens=9, prompt_tokens=50, cached_tokens=0,
                generate_s=2.0, finish_reason="stop",
            ),
            e.ToolStarted(at_s=106.0, rollout_id=NAME, turn=0, command="ls -la\nrm x"),
            e.ToolFinished(at_s=109.0, rollout_id=NAME, turn=0, exit_code=0, tool_s=3.0),
            e.ScoringStarted(at_s=109.0, rollout_id=NAME),
            e.RolloutScored(at_s=110.0, reward=0.5, stop="submitted", turns=1, sampled_tokens=9, score_s=1.0, **ids),
            e.PassStarted(at_s=112.0, worker=1, pass_id=1, rollout_ids=[NAME], tokens=59, queued=0),
            e.PassDone(at_s=115.0, worker=1, pass_id=1, rollout_ids=[NAME], busy_s=3.0),
            e.GroupClosed(at_s=115.0, group_id="000000-00", rewards=[0.5], flat=True),
            e.WeightsPublished(at_s=118.0, policy_version=1, publish_s=1.0),
            e.StepCommitted(at_s=118.5, step=0, policy_version=1, empty=False, metrics={"commit_s": 1.5}),
        ]
    )  # fmt: skip
    assert timeline is not None
    (lane,) = timeline.lanes
    assert [(span.kind, span.start_s, span.end_s) for span in lane.spans] == [
        ("prepare", 1.0, 2.0), ("retry", 2.0, 3.0), ("prepare", 3.0, 4.0), ("generate", 4.0, 6.0), ("tool", 6.0, 9.0),
        ("score", 9.0, 10.0), ("queue", 10.0, 12.0),
    ]  # fmt: skip
    assert lane.spans[4].note == "ls -la" and "9 tokens" in lane.spans[3].note
    assert [(span.start_s, span.end_s) for span in lane.backward] == [(12.0, 15.0)]
    assert (lane.engine, lane.attempts, lane.reward, lane.state) == (3, 2, 0.5, "scored")
    assert timeline.commit == (15.5, 17.0) and timeline.publish == (17.0, 18.0)
    assert timeline.seconds == 18.5 and timeline.committed
    spent = shares(timeline)
    assert spent.rollouts == 9.0 and spent.learning == 3.0 and spent.commit == 2.5 and spent.both == 0.0
    assert sum(spent) == pytest.approx(timeline.seconds)


def test_replies_that_are_sampled_side_by_side_count_each_and_end_with_the_last() -> None:
    name = "000000-00-00"
    started = [e.TurnStarted(at_s=101.0, rollout_id=name, turn=turn) for turn in (0, 1)]
    ended = [
        e.TurnGenerated(
            at_s=at, rollout_id=name, turn=turn, sampled_tokens=5, prompt_tokens=7, cached_tokens=0, generate_s=1.0,
            finish_reason="stop",
        )
        for turn, at in ((0, 102.0), (1, 106.0))
    ]  # fmt: skip
    timeline = step_timeline([opened(), *started, *ended, e.ScoringStarted(at_s=107.0, rollout_id=name)])
    assert timeline is not None
    (lane,) = timeline.lanes
    assert [(span.kind, span.start_s, span.end_s) for span in lane.spans] == [
        ("generate", 1.0, 2.0), ("generate", 2.0, 6.0),
    ]  # fmt: skip
    assert [span.note[:6] for span in lane.spans] == ["turn 1", "turn 2"]
    assert running(timeline.engines[0]) == [(1.0, 2), (2.0, 1), (6.0, 0)]


def test_an_aborted_request_keeps_its_engine_until_it_was_aborted_and_counts_as_no_turn() -> None:
    timeline = step_timeline(
        [
            opened(),
            e.RolloutStarted(at_s=100.0, rollout_id=NAME, group_id="000000-00", task_id="task"),
            e.TurnStarted(at_s=101.0, rollout_id=NAME, turn=0),
            e.TurnAborted(at_s=102.0, rollout_id=NAME, turn=0),
            e.TurnStarted(at_s=103.0, rollout_id=NAME, turn=1),
            e.TurnGenerated(
                at_s=104.0, rollout_id=NAME, turn=1, sampled_tokens=5, prompt_tokens=7, cached_tokens=0, generate_s=1.0,
                finish_reason="stop",
            ),
            e.ToolStarted(at_s=105.0, rollout_id=NAME, turn=1, command="ls"),
            e.ToolFinished(at_s=108.0, rollout_id=NAME, turn=1, exit_code=0, tool_s=3.0),
            e.ScoringStarted(at_s=109.0, rollout_id=NAME),
        ]
    )  # fmt: skip
    assert timeline is not None
    (lane,) = timeline.lanes
    assert [(span.kind, span.start_s, span.end_s) for span in lane.spans] == [
        ("prepare", 0.0, 1.0), ("generate", 1.0, 2.0), ("generate", 3.0, 4.0), ("tool", 5.0, 8.0),
    ]  # fmt: skip
    assert [(span.start_s, span.end_s) for span in lane.replies] == [(1.0, 2.0), (3.0, 4.0)]
    assert lane.spans[1].note == "turn 1: aborted" and lane.turns == 1


def test_what_was_going_on_when_a_run_was_killed_ends_with_the_last_thing_heard() -> None:
    timeline = step_timeline(
        [
            opened(),
            e.RolloutStarted(at_s=101.0, rollout_id=NAME, group_id="000000-00", task_id="task"),
            e.TurnStarted(at_s=102.0, rollout_id=NAME, turn=0),
            e.PassStarted(at_s=104.0, worker=0, pass_id=1, rollout_ids=["000000-00-01"], tokens=5, queued=0),
            e.ToolStarted(at_s=107.0, rollout_id="000000-00-01", turn=0, command="true"),
        ]
    )
    assert timeline is not None and not timeline.committed and timeline.seconds == 4.0
    assert timeline.lanes[0].spans[-1] == Span("generate", 2.0, 4.0, "turn 1")
    assert timeline.workers[0][0].end_s == 4.0


def test_a_teachers_scores_and_backwards_of_single_turns_may_lie_over_the_rollout() -> None:
    timeline = step_timeline(
        [
            opened(),
            e.RolloutStarted(at_s=100.0, rollout_id=NAME, group_id="000000-00", task_id="task"),
            e.ToolStarted(at_s=102.0, rollout_id=NAME, turn=0, command="make"),
            e.TurnScored(at_s=104.0, rollout_id=NAME, turn=0, tokens=7, score_s=1.5, held=False),
            e.PassStarted(at_s=104.0, worker=0, pass_id=1, rollout_ids=[NAME], tokens=5, queued=0),
            e.PassDone(at_s=105.0, worker=0, pass_id=1, rollout_ids=[NAME], busy_s=1.0),
            e.ToolFinished(at_s=108.0, rollout_id=NAME, turn=0, exit_code=0, tool_s=6.0),
        ]
    )
    assert timeline is not None
    lane = timeline.lanes[0]
    assert [(span.start_s, span.end_s) for span in lane.teacher] == [(2.5, 4.0)]
    assert [(span.start_s, span.end_s) for span in lane.backward] == [(4.0, 5.0)]
    assert [(span.kind, span.end_s) for span in lane.spans] == [("prepare", 2.0), ("tool", 8.0)]


def test_events_in_any_order_and_number_never_break_a_timeline() -> None:
    dice = random.Random(0)
    for _ in range(20):
        events = [event for event in fake_run(steps=1) if dice.random() < 0.7]
        dice.shuffle(events)
        step_timeline(events)


def test_the_shares_of_a_real_step_add_up_to_it(record: RunRecord) -> None:
    for step in record.steps:
        timeline = step_timeline(step_events(record, step))
        assert timeline is not None
        spent = shares(timeline)
        assert min(spent) >= 0.0 and sum(spent) == pytest.approx(timeline.seconds)
        assert spent.both > 0.0


def test_a_lazy_run_learns_nothing_while_rollouts_run(tmp_path: Path) -> None:
    record = read_run(make_run(tmp_path, MadeRun(steps=1, mode="lazy")))
    timeline = step_timeline(step_events(record, 0))
    assert timeline is not None and shares(timeline).both == pytest.approx(0.0, abs=1e-6)


intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair))))


@given(intervals, intervals)
def test_unions_and_overlaps_count_every_second_once(
    first: list[tuple[float, float]], second: list[tuple[float, float]]
) -> None:
    def covered(spans: list[tuple[float, float]]) -> set[int]:
        return {at for start, end in spans for at in range(int(start), int(end))}

    assert length(union(first)) == len(covered(first))
    assert both_of(union(first), union(second)) == len(covered(first) & covered(second))


@given(intervals)
def test_running_counts_what_is_going_on(spans: list[tuple[float, float]]) -> None:
    steps = running(Span("generate", start, end) for start, end in spans)
    for at in range(31):
        told = [count for when, count in steps if when <= at + 0.5]
        assert (told[-1] if told else 0) == sum(start <= at + 0.5 < end for start, end in spans)
