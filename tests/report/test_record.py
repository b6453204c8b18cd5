"""A run's folder, read: what is kept, what a resume forgets, what a torn or foreign file is taken for."""

import itertools
from pathlib import Path

import pytest

from tests.monitor.fake_run import fake_run
from tests.report.made_run import MadeRun, make_run
from thundersync.monitor import events as e
from thundersync.report.record import NoRun, ReportTooLong, RunRecord, read_run, step_events


def written(folder: Path, events: list[e.AnyEvent]) -> Path:
    folder.mkdir(exist_ok=True)
    with (folder / "events.jsonl").open("ab") as file:
        file.writelines(map(e.to_line, events))
    return folder


def test_every_step_evaluation_and_metric_is_kept(record: RunRecord) -> None:
    assert [step.opened.step for step in record.commits] == list(range(6))
    assert [each.after for each in record.evals] == [0, 3, 6]
    assert record.series("grad_norm")[0][0] == 0.0 and len(record.series("grad_norm")) == 6
    assert all(len(step.scored) == 32 for step in record.steps.values())
    assert record.config["algo.group_size"] == 8
    assert record.finished is not None and record.finished.ok


def test_a_steps_events_are_exactly_those_between_its_opening_and_its_commit(made: Path, record: RunRecord) -> None:
    everything = [e.from_line(line) for line in (made / "events.jsonl").read_bytes().splitlines()]
    for step in record.steps:
        begin = next(i for i, event in enumerate(everything) if isinstance(event, e.StepOpened) and event.step == step)
        end = next(i for i, event in enumerate(everything) if isinstance(event, e.StepCommitted) and event.step == step)
        assert list(step_events(record, step)) == everything[begin : end + 1]


def test_a_resumed_run_is_told_once_and_its_repeated_steps_are_those_of_the_last_start(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", [*fake_run(steps=4, seed=1)])
    written(folder, [*fake_run(steps=6, seed=2, start=2)])
    record = read_run(folder)
    assert record.starts == 2
    assert [step.opened.step for step in record.commits] == [1, 3, 4, 5, 6]  # the fake counts from 1
    assert [event.step for event in step_events(record, 3) if isinstance(event, e.StepOpened)] == [3]
    assert len(list(step_events(record, 3))) > 100


def test_a_killed_runs_open_step_and_torn_line_are_no_obstacle(tmp_path: Path) -> None:
    events = list(itertools.takewhile(lambda event: not isinstance(event, e.StepCommitted), fake_run()))
    folder = written(tmp_path / "run", events)
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b'{"kind":"step_committed","at_s":17000')
    record = read_run(folder)
    assert record.commits == [] and list(record.steps) == [1]
    assert len(list(step_events(record, 1))) > 100
    assert record.finished is None


def test_kinds_and_fields_of_the_future_are_passed_over(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", list(fake_run(steps=1)))
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b'{"kind":"from_the_future","at_s":1.0}\n\xff\xfe nonsense\n')
    record = read_run(folder)
    assert len(record.commits) == 1 and record.unreadable == 1


def test_failures_and_warnings_are_counted_by_what_they_say(tmp_path: Path) -> None:
    lost = e.RolloutFailed(
        at_s=1.0, rollout_id="000000-00-00", group_id="000000-00", failure="sandbox", detail="gone", will_retry=True
    )
    warned = e.Warned(at_s=1.0, text="late")
    folder = written(tmp_path / "run", [*fake_run(steps=1, groups=1), lost, lost, warned, warned])
    record = read_run(folder)
    assert record.failures["sandbox"].details["gone"] == 2 and record.failures["sandbox"].final == 0
    assert record.warnings["late"] == 2


def test_a_folder_without_a_run_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NoRun, match=r"runs/NAME"):
        read_run(tmp_path)
    (tmp_path / "events.jsonl").write_text("")
    with pytest.raises(NoRun, match="logs/"):
        read_run(tmp_path)


def test_a_step_that_is_not_there_is_refused_with_those_that_are(record: RunRecord) -> None:
    with pytest.raises(NoRun, match="steps 1 to 6"):
        next(step_events(record, 99))


def test_reading_stops_at_its_deadline(tmp_path: Path) -> None:
    folder = make_run(tmp_path, MadeRun(steps=1))
    with pytest.raises(ReportTooLong, match="python -m thundersync report"):
        read_run(folder, deadline_s=5.0, clock=lambda: 6.0)
