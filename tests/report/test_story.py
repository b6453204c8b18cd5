"""The summary says what was measured, in words that fit, and nothing else."""

from pathlib import Path

import msgspec

from tests.monitor.fake_run import fake_run
from thundersync.monitor import events as e
from thundersync.report.record import RunRecord, read_run
from thundersync.report.story import figures, story
from thundersync.report.timeline import TimeShares


def told(folder: Path, events: list[e.AnyEvent], spent: list[TimeShares] | None = None) -> str:
    (folder / "events.jsonl").write_bytes(b"".join(map(e.to_line, events)))
    return " ".join(story(read_run(folder), spent or [], None))


def failed(reason: str, *, will_retry: bool) -> e.RolloutFailed:
    return e.RolloutFailed(
        at_s=1.7e9, rollout_id="000001-00-00", group_id="000001-00", failure=reason, detail="d", will_retry=will_retry
    )


def test_a_run_that_ended_early_says_why(tmp_path: Path) -> None:
    *events, last = fake_run(steps=1)
    assert isinstance(last, e.RunFinished)
    text = told(tmp_path, [*events, msgspec.structs.replace(last, ok=False, reason="interrupted")])
    assert "for 1 step of 32 rollouts" in text and "it ended early: interrupted." in text


def test_a_run_without_an_end_is_not_said_to_have_finished(tmp_path: Path) -> None:
    text = told(tmp_path, list(fake_run(steps=1))[:-1])
    assert "still going when this was written, or it was killed" in text and "it finished" not in text


def test_a_reward_that_fell_is_said_to_have_fallen(tmp_path: Path) -> None:
    events = [
        msgspec.structs.replace(event, reward_mean=0.7 - event.policy_version / 10)
        if isinstance(event, e.EvalFinished)
        else event
        for event in fake_run(steps=3)
    ]
    assert "Reward on held-out tasks fell from 0.70 to 0.40" in told(tmp_path, events)


def test_failures_are_counted_and_those_for_good_are_told_apart(tmp_path: Path) -> None:
    own = [event for event in fake_run(steps=1) if not isinstance(event, e.RolloutFailed | e.Warned)]
    assert "Nothing failed and nothing was warned about." in told(tmp_path, own)
    first = failed("sandbox", will_retry=True)
    assert "1 attempt failed (1 sandbox), each made good" in told(tmp_path, [*own, first])
    assert "2 attempts failed (2 sandbox), 1 of them for good" in told(
        tmp_path, [*own, first, failed("sandbox", will_retry=False)]
    )


def test_time_is_told_with_or_without_an_overlap(tmp_path: Path) -> None:
    events = list(fake_run(steps=1))
    assert "nothing was learned while rollouts ran" in told(tmp_path, events, [TimeShares(0.0, 5.0, 4.0, 1.0, 0.0)])
    text = told(tmp_path, events, [TimeShares(4.0, 5.0, 0.0, 1.0, 0.0)])
    assert "for 40 % of a step (4.0 s) the trainer learned while rollouts ran" in text


def test_an_audit_is_told_with_how_far_it_was(tmp_path: Path) -> None:
    audit = e.Audited(at_s=1.7e9, step=1, relative_l2=3e-7, worst=1e-6, worst_name="w", tolerance=1e-5, ok=True)
    text = told(tmp_path, [*fake_run(steps=1), audit])
    assert "1 of 1 audited steps equalled their one-piece gradient within rounding (at most 3.0e-07 apart)" in text


def test_figures_are_those_that_the_run_can_tell(record: RunRecord) -> None:
    names = [figure.name for figure in figures(record, [], None)]
    assert names == ["held-out reward", "training reward", "median step", "engines busy", "trainer busy"]
