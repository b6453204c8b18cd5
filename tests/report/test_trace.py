"""The trace is what Perfetto's format asks for: names, whole microseconds, and no slice over another on its track."""

import itertools
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.monitor.fake_run import fake_run
from thundersync.errors import ConfigError
from thundersync.monitor import events as e
from thundersync.report.command import report_or_trace, write_run_trace
from thundersync.report.record import NoRun, RunRecord
from thundersync.report.timeline import step_timeline
from thundersync.report.trace import TEACHER, TRAINER, trace_events


def assert_valid(events: list[dict[str, Any]]) -> None:
    """Of the Trace Event Format, what a viewer relies on."""
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    named = set()
    for event in events:
        assert event["ph"] in "XCiM" and isinstance(event["name"], str) and event["name"]
        assert all(type(event[key]) is int and event[key] >= 0 for key in ("pid", "tid", "ts"))
        if event["ph"] == "M":
            named.add((event["pid"], event["tid"] if event["name"].startswith("thread") else None))
        else:
            tracks[event["pid"], event["tid"]].append(event)
        assert event["ph"] != "C" or all(type(value) in (int, float) for value in event["args"].values())
    for (process, thread), track in tracks.items():
        assert (process, None) in named
        times = [event["ts"] for event in track]
        assert times == sorted(times), (process, thread)
        slices = [event for event in track if event["ph"] == "X"]
        assert not slices or (process, thread) in named
        for one, following in itertools.pairwise(slices):
            assert type(one["dur"]) is int and one["dur"] > 0
            assert one["ts"] + one["dur"] <= following["ts"], (one, following)


def test_a_whole_runs_trace_is_valid_and_complete(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    count = write_run_trace(made, out)
    document = json.loads(out.read_text())
    events = document["traceEvents"]
    assert len(events) == count
    assert_valid(events)
    names = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    assert {"steps", "engines", "trainer"} < names
    assert sum(event["name"] == "commit" for event in events) == 6
    assert {event["tid"] for event in events if event["ph"] == "X" and event["pid"] == TRAINER} == {0, 1}
    assert {event["name"] for event in events if event["ph"] == "C"} == {
        "engine 0: turns being generated", "engine 1: turns being generated",
    }  # fmt: skip


def test_one_step_can_be_traced_alone(made: Path, tmp_path: Path) -> None:
    said = report_or_trace([made], out=None, trace=tmp_path / "t.json", steps=[2])
    assert "ui.perfetto.dev" in said
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event.get("cat") == "step"] == ["step 2"]
    rollouts = {event["args"]["rollout"] for event in events if "rollout" in event.get("args", {})}
    assert {name[:6] for name in rollouts} == {"000001"}  # as in its files, which count from 0
    with pytest.raises(NoRun, match="no step 7"):
        report_or_trace([made], out=None, trace=tmp_path / "t.json", steps=[7])


def test_a_killed_steps_trace_is_valid_too() -> None:
    for count in (40, 150, 400):
        timeline = step_timeline(itertools.islice(fake_run(groups=3), count))
        assert timeline is not None
        assert_valid(list(trace_events(timeline)))


def test_a_trace_is_valid_whatever_of_a_steps_events_is_missing_or_out_of_order() -> None:
    dice = random.Random(1)
    for _ in range(10):
        others = [event for event in fake_run(steps=1, groups=2) if not isinstance(event, e.RunStarted)]
        kept = [event for event in others if dice.random() < 0.8]
        dice.shuffle(kept)
        timeline = step_timeline([next(event for event in others if isinstance(event, e.StepOpened)), *kept])
        assert timeline is not None
        assert_valid(list(trace_events(timeline)))


def test_a_trace_is_of_one_run(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one run"):
        report_or_trace([made, made], out=None, trace=tmp_path / "t.json", steps=[])


def test_a_teachers_requests_go_to_rows_of_their_own() -> None:
    ids = ["000000-00-00", "000000-00-01"]
    events: list[e.AnyEvent] = [
        e.StepOpened(at_s=100.0, step=0, policy_version=0, group_ids=["000000-00"], task_ids=["t"], group_size=2)
    ]
    for at, name in ((103.0, ids[0]), (104.0, ids[1]), (108.0, ids[0])):
        events.append(e.TurnScored(at_s=at, rollout_id=name, turn=0, tokens=3, score_s=2.0, held=False))
    timeline = step_timeline(events)
    assert timeline is not None
    told = list(trace_events(timeline))
    assert_valid(told)
    assert [event["tid"] for event in told if event["pid"] == TEACHER and event["ph"] == "X"] == [0, 1, 0]


def test_slices_that_would_overlap_are_cut_at_the_next(record: RunRecord) -> None:
    events: list[e.AnyEvent] = [
        e.StepOpened(at_s=100.0, step=0, policy_version=0, group_ids=["000000-00"], task_ids=["t"], group_size=1),
        e.PassStarted(at_s=101.0, worker=0, pass_id=1, rollout_ids=[], tokens=1, queued=0),
        e.PassStarted(at_s=102.0, worker=0, pass_id=2, rollout_ids=[], tokens=1, queued=0),
        e.PassDone(at_s=103.0, worker=0, pass_id=2, rollout_ids=[], busy_s=1.0),
        e.PassDone(at_s=104.0, worker=0, pass_id=1, rollout_ids=[], busy_s=3.0),
    ]
    timeline = step_timeline(events)
    assert timeline is not None
    assert_valid(list(trace_events(timeline)))
