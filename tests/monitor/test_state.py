import math

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.monitor.fake_run import fake_run
from thundersync.monitor import events as e
from thundersync.monitor.history import History
from thundersync.monitor.state import RolloutState, RunView

STREAM = list(fake_run(steps=3, groups=2, size=4))


def view_of(events: list[e.AnyEvent]) -> RunView:
    view = RunView()
    for event in events:
        view.apply(event)
    return view


def until(kind: type[e.Event], count: int = 1) -> RunView:
    places = [index for index, event in enumerate(STREAM) if isinstance(event, kind)]
    return view_of(STREAM[: places[count - 1] + 1])


def test_a_rollout_goes_through_its_states() -> None:
    view = view_of(
        [
            e.StepOpened(at_s=1, step=1, policy_version=0, group_ids=["000001-00"], task_ids=["t"], group_size=2),
        ]
    )
    name = "000001-00-00"
    seen = []
    ids = {"rollout_id": name, "group_id": "000001-00"}
    for event in (
        e.RolloutStarted(at_s=2, task_id="t", **ids),
        e.TurnStarted(at_s=3, rollout_id=name, turn=0),
        e.ToolStarted(at_s=4, rollout_id=name, turn=0, command="ls"),
        e.ToolFinished(at_s=5, rollout_id=name, turn=0, exit_code=0, tool_s=0.1),
        e.RolloutFailed(at_s=6, failure="sandbox", detail="", will_retry=True, **ids),
        e.RolloutStarted(at_s=7, task_id="t", attempt=2, **ids),
        e.TurnStarted(at_s=8, rollout_id=name, turn=0),
        e.ScoringStarted(at_s=9, rollout_id=name),
        e.RolloutScored(at_s=10, reward=0.5, stop="submitted", turns=1, sampled_tokens=3, score_s=0.1, **ids),
        e.PassStarted(at_s=11, worker=0, pass_id=1, rollout_ids=[name], tokens=3, queued=0),
        e.PassDone(at_s=12, worker=0, pass_id=1, rollout_ids=[name], busy_s=0.1),
    ):
        view.apply(event)
        seen.append(str(view.groups["000001-00"].rollouts[name].state))
    assert " ".join(seen) == ("waiting generating tool generating retry retry generating scoring queued backward done")
    assert view.groups["000001-00"].rewards == [0.5]
    assert view.count(RolloutState.WAITING) == 1 and not view.passes


def test_the_whole_run_is_known_at_its_end() -> None:
    view = view_of(STREAM)
    assert view.phase == "finished" and view.made == view.max_steps == 3
    assert [each.reward_mean for each in view.evals] == [0.16, 0.63]
    assert len(view.curve()) == 3 and all(0 <= value <= 1 for value in view.curve())
    assert all(group.closed for group in view.groups.values())
    assert math.isclose(view.share("engine_busy") or 0, 0.84)


def test_phases_follow_each_other() -> None:
    assert RunView().phase == until(e.RunStarted).phase == "starting"
    assert until(e.EvalStarted).phase == "evaluating"
    assert until(e.StepOpened).phase == "training"
    assert until(e.WeightsPublished).phase == "committing"
    assert until(e.StepCommitted).phase == "between steps"


def test_evaluated_rollouts_are_counted_apart_from_the_step() -> None:
    view = until(e.RolloutScored, 4)
    assert view.evaluating is not None and view.evaluating.finished == 4 and not view.groups


def test_eta_is_the_pace_times_what_is_left() -> None:
    view = view_of([event for event in STREAM if isinstance(event, e.RunStarted)])
    assert view.eta_s(view.at_s) is None
    for step, at_s in ((1, 1e9), (2, 1e9 + 10.0)):
        view.apply(e.StepCommitted(at_s=at_s, step=step, policy_version=step, empty=False, metrics={}))
    assert view.eta_s(1e9 + 14.0) == 6.0
    assert view.eta_s(1e9 + 999.0) == 0.0


def test_a_resumed_run_forgets_the_commits_it_makes_again() -> None:
    again = list(fake_run(steps=3, groups=2, size=4, start=1, evals=False, seed=1))
    view = view_of([*STREAM[: STREAM.index(next(x for x in STREAM if isinstance(x, e.RunFinished)))], *again[:1]])
    assert view.made == 1 and len(view.curve()) == 1 and view.phase == "between steps"
    for event in again[1:]:
        view.apply(event)
    assert view.made == 3 and len(view.curve()) == 3


@given(st.lists(st.sampled_from(STREAM), max_size=120))
@settings(max_examples=60, deadline=None)
def test_no_order_of_events_raises(events: list[e.AnyEvent]) -> None:
    view = view_of(events)
    view.eta_s(0.0)
    assert view.phase and view.made >= 0


@given(st.integers(0, len(STREAM)), st.integers(0, len(STREAM)))
@settings(max_examples=60, deadline=None)
def test_a_late_viewer_knows_what_one_from_the_start_knows(first: int, second: int) -> None:
    joined, now = sorted((first, second))
    history = History()
    for number, event in enumerate(STREAM[:joined], start=1):
        history.add(number, event, e.pack(event))
    kept = [e.unpack(packed) for _, packed in history]
    assert view_of([*kept, *STREAM[joined:now]]) == view_of(STREAM[:now])


def test_an_aborted_request_supersedes_its_start_for_a_late_viewer() -> None:
    name = "000001-00-00"
    events: list[e.AnyEvent] = [
        e.StepOpened(at_s=1, step=1, policy_version=0, group_ids=["000001-00"], task_ids=["t"], group_size=1),
        e.RolloutStarted(at_s=2, rollout_id=name, group_id="000001-00", task_id="t"),
        e.TurnStarted(at_s=3, rollout_id=name, turn=1),
        e.TurnAborted(at_s=4, rollout_id=name, turn=1),
    ]
    history = History()
    for number, event in enumerate(events, start=1):
        history.add(number, event, e.pack(event))
    kept = [e.unpack(packed) for _, packed in history]
    assert kept == [*events[:2], events[3]]
    assert view_of(kept) == view_of(events)  # type: ignore[arg-type]


def test_history_stays_small_however_long_a_rollout_talks() -> None:
    history = History(commits=5, warnings=5)
    for number in range(1000):
        event = e.TurnStarted(at_s=1.0, rollout_id=f"000001-00-{number % 4:02d}", turn=number)
        history.add(3 * number, event, b"")
        history.add(3 * number + 1, e.Warned(at_s=1.0, text=""), b"")
        commit = e.StepCommitted(at_s=1.0, step=number, policy_version=number, empty=True, metrics={})
        history.add(3 * number + 2, commit, b"")
    assert len(list(history)) == 4 + 5 + 5
