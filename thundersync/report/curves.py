"""Which curves a report draws, of one run or of several over each other.

Takes records, gives charts; how a chart is drawn is `chart`'s.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from thundersync.report.chart import Chart, Series
from thundersync.report.record import RunRecord

MOST_RUNS = 6
"""As many tones as there are to tell lines apart."""

_HEALTH: tuple[tuple[str, str, str, str], ...] = (
    ("grad_norm", "Gradient norm", "", "before clipping"),
    ("mismatch_mean", "Engine against trainer", "", "mean log-probability gap"),
    ("trainer_memory_peak_gib", "Trainer memory, peak", "GiB", "of the first worker"),
    ("kl_mean", "KL to the reference", "", "mean over sampled tokens"),
    ("entropy_mean", "Entropy", "", "mean over sampled tokens"),
    ("divergence_mean", "Divergence from the teacher", "", "mean over sampled tokens"),
    ("tokens", "Sampled tokens", "", "of a step"),
    ("lr", "Learning rate", "", ""),
)
"""Metric, title, unit, note; a metric that is zero or missing throughout is left out."""


def learning_curves(records: Sequence[RunRecord]) -> list[Chart]:
    """Reward on training and held-out tasks, and what there was to learn from."""
    if len(records) > 1:
        evals = [_line(record, index, _evals(record), dots=True) for index, record in enumerate(records)]
        clock = [_line(record, index, _by_clock(record)) for index, record in enumerate(records)]
        return _kept(
            [
                Chart(title="Reward on held-out tasks", series=evals),
                Chart(title="Reward on training tasks", series=_lines(records, "reward_mean"), note="mean of a step"),
                Chart(title="Reward by wall clock", series=clock, x_name="minute", note="training, steps alone"),
            ]
        )
    (record,) = records
    training = Series(name="training", points=_by_step(record, "reward_mean"), tone=1)
    held_out = Series(name="held-out", points=_evals(record), tone=0, dots=True)
    note = "mean of a step, and of an evaluation" if held_out.points else "mean of a step"
    reward = Chart(title="Reward", series=[training, held_out], wide=True, note=note)
    groups = Chart(
        title="Groups whose rewards differ", series=_lines(records, "groups_mixed"), note="others teach nothing"
    )
    cut = Chart(
        title="Not submitted", series=_lines(records, "truncated_share"), unit="%", note="share of the rollouts"
    )
    turns = Chart(title="Turns of a rollout", series=_lines(records, "turns_mean"), note="mean")
    return _kept([reward, groups, cut if any(y for _, y in cut.series[0].points) else turns])


def time_curves(records: Sequence[RunRecord]) -> list[Chart]:
    """How long steps took and how busy the machines were."""
    steps = _in_minutes(Chart(title="Length of a step", series=_lines(records, "step_s"), unit="s"))
    if len(records) > 1:
        engines = Chart(title="Engines busy", series=_lines(records, "engine_busy"), unit="%")
        trainer = Chart(title="Trainer busy", series=_lines(records, "trainer_busy"), unit="%")
        return _kept([steps, engines, trainer])
    lines = [
        Series(name="engines", points=_by_step(records[0], "engine_busy"), tone=0),
        Series(name="trainer", points=_by_step(records[0], "trainer_busy"), tone=3),
    ]
    busy = Chart(title="Busy", series=lines, unit="%", note="share of a step")
    wait = Chart(
        title="Wait for the trainer", series=_lines(records, "queue_wait_s"), unit="s", note="from reward to backward"
    )
    return _kept([steps, busy, wait])


def health_curves(records: Sequence[RunRecord]) -> list[Chart]:
    charts = [
        Chart(title=title, series=_lines(records, metric), unit=unit, note=note)
        for metric, title, unit, note in _HEALTH
        if any(value for record in records for _, value in record.series(metric))
    ]
    return _kept(charts)


def _lines(records: Sequence[RunRecord], metric: str) -> list[Series]:
    return [_line(record, index, _by_step(record, metric)) for index, record in enumerate(records)]


def _by_step(record: RunRecord, metric: str) -> list[tuple[float, float]]:
    """Steps as people count them, from 1: an evaluation after two of them stands at the second."""
    return [(step + 1, value) for step, value in record.series(metric)]


def _line(record: RunRecord, tone: int, points: list[tuple[float, float]], *, dots: bool = False) -> Series:
    return Series(name=record.name[:28], points=points, tone=tone, dots=dots)


def _in_minutes(chart: Chart) -> Chart:
    """Long steps are told in minutes."""
    if all(y < 300.0 for series in chart.series for _, y in series.points):
        return chart
    minutes = [
        msgspec.structs.replace(series, points=[(x, y / 60.0) for x, y in series.points]) for series in chart.series
    ]
    return msgspec.structs.replace(chart, series=minutes, unit="min")


def _evals(record: RunRecord) -> list[tuple[float, float]]:
    pairs = [(float(each.after), each.finished.reward_mean) for each in record.evals]
    return [(step, reward) for step, reward in pairs if reward == reward]


def _by_clock(record: RunRecord) -> list[tuple[float, float]]:
    """Training reward over the minutes that steps took, evaluations and pauses left out; means of five steps."""
    at_s, points = 0.0, []
    rewards: list[float] = []
    for step, row in sorted(record.rows.items()):
        at_s += row.get("step_s", 0.0)
        rewards.append(row.get("reward_mean", float("nan")))
        recent = [reward for reward in rewards[-5:] if reward == reward]
        if recent and step in record.steps:
            points.append((at_s / 60.0, statistics.fmean(recent)))
    return points


def _kept(charts: list[Chart]) -> list[Chart]:
    return [chart for chart in charts if chart.drawn]
