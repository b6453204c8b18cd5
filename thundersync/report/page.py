"""One page of one or several runs: everything in one file, nothing fetched, every word of a run escaped.

Records in, HTML out. The page's own parts (`page/`) are the only markup and the only script: what runs wrote goes
through the template's escaping, and a policy in the page's head forbids any script but that one.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from thundersync.report import lanes
from thundersync.report.arms import Compared, compare, mean_shares
from thundersync.report.chart import Chart, draw, duration
from thundersync.report.conversations import Conversation, clean, conversations
from thundersync.report.curves import MOST_RUNS, health_curves, learning_curves, time_curves
from thundersync.report.record import NoRun, RunRecord, step_events
from thundersync.report.story import Figure, figures, story, weighted
from thundersync.report.timeline import TimeShares, shares, step_timeline

_PARTS = Path(__file__).parent / "page"
_UNIT = re.compile(r"(?<=\d) (?=(?:ms|s|min|h|x)\b|%)")
"""A number and its unit stay on one line."""
MOST_DETAILS = 5
"""Of one kind of failure."""


class Bar(msgspec.Struct, frozen=True):
    """Where the seconds of a mean step went; `parts` are (css class, name, seconds)."""

    name: str
    seconds: float
    parts: list[tuple[str, str, float]]


class RunPage(msgspec.Struct, frozen=True, kw_only=True):
    """What the template shows of one run."""

    record: RunRecord
    story: list[str]
    figures: list[Figure]
    bars: list[Bar]
    bars_of: int
    """Steps that the bars are means of."""
    timelines: dict[int, str]
    left_out: int
    """Committed steps without a timeline."""
    conversations: list[Conversation]
    failures: list[tuple[str, int, int, list[tuple[str, int]], str]]
    config: str

    @property
    def longest_bar(self) -> float:
        return max((bar.seconds for bar in self.bars), default=0.0)


def render(
    records: Sequence[RunRecord],
    *,
    steps: Sequence[int] = (),
    most_bytes: int = lanes.MOST_BYTES,
    deadline_s: float = math.inf,
) -> str:
    """The page. `steps` are shown in the timeline whatever else is left out of its `most_bytes`;
    once `time.monotonic()` is past `deadline_s`, no further one is read.

    Raises: NoRun without a record, or for too many to tell apart.
    """
    if not 1 <= len(records) <= MOST_RUNS:
        raise NoRun(f"a report is of 1 to {MOST_RUNS} runs, not of {len(records)}", remedy="Give fewer run folders.")
    runs = [_run(record, steps, most_bytes // len(records), deadline_s) for record in records]
    environment = Environment(
        loader=FileSystemLoader(_PARTS),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["duration"] = duration
    environment.filters["clean"] = clean
    environment.filters["tied"] = lambda text: _UNIT.sub("\u00a0", text)
    script, style = (_PARTS / "report.js").read_text(), (_PARTS / "report.css").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("report.html").render(
        runs=runs,
        title=" · ".join(record.name for record in records),
        sections=[
            ("learning", "Learning", "", _drawn(learning_curves(records))),
            ("time", "Time", "", _drawn(time_curves(records))),
            ("health", "Health", "", _drawn(health_curves(records))),
        ],
        table=_table(runs) if len(runs) > 1 else [],
        differences=_differences(records) if len(runs) > 1 else [],
        script=Markup(script),
        style=Markup(style),
        digest=digest,
    )


def _run(record: RunRecord, wanted: Sequence[int], most_bytes: int, deadline_s: float) -> RunPage:
    spent: dict[int, TimeShares] = {}
    timelines: dict[int, str] = {}
    telling = lanes.telling_steps({step: _seconds(record, step) for step in record.steps}, wanted)
    left = most_bytes
    for step in telling:
        if time.monotonic() > deadline_s:
            break
        timeline = step_timeline(step_events(record, step))
        if timeline is None:
            continue
        if timeline.committed:
            spent[step] = shares(timeline)
        text = lanes.packed(timeline)
        if len(text) > left:
            text = lanes.packed(timeline, notes=False)
        if len(text) <= left or step in wanted:
            timelines[step], left = text, left - len(text)
    compared = compare(record, telling) if time.monotonic() < deadline_s else None
    like = [spent[step] for step in (compared.steps if compared is not None else spent) if step in spent]
    failures = [
        (
            kind,
            failure.attempts,
            failure.final,
            [(clean(detail), count) for detail, count in failure.details.most_common(MOST_DETAILS)],
            failure.example,
        )
        for kind, failure in sorted(record.failures.items())
    ]
    return RunPage(
        record=record,
        story=story(record, like, compared),
        figures=figures(record, like, compared),
        bars=_bars(record, like, compared),
        bars_of=len(like),
        timelines=dict(sorted(timelines.items())),
        left_out=len(record.steps.keys() - timelines.keys()),
        conversations=conversations(record),
        failures=failures,
        config=_config_text(record),
    )


def _seconds(record: RunRecord, step: int) -> float:
    return record.rows.get(step, {}).get("step_s", 0.0)


def _bars(record: RunRecord, spent: Sequence[TimeShares], compared: Compared | None) -> list[Bar]:
    """The mean step as it was, and as it would have been."""
    if not spent:
        return []
    mode = record.started.mode if record.started is not None else ""
    own = {"stream": "streamed", "group": "by groups"}.get(mode, mode)
    bars = [_bar(f"{own}, measured" if own else "measured", mean_shares(spent))]
    if compared is not None:
        bars.append(_bar("lazy, forecast" if compared.arm == "lazy" else "streamed, forecast", compared.other))
        bars.append(Bar("bound", compared.bound_s, [("bound", "no order can be faster", compared.bound_s)]))
    return bars


def _bar(name: str, mean: TimeShares) -> Bar:
    parts = [
        ("generate", "rollouts alone: generation, tools, checkers", mean.rollouts),
        ("both", "learning while rollouts run", mean.both),
        ("backward", "learning alone", mean.learning),
        ("neither", "neither: groups closing, hand-overs", mean.neither),
        ("commit", "commit and publish", mean.commit),
    ]
    return Bar(name, sum(mean), parts)


def _drawn(charts: Sequence[Chart]) -> list[tuple[Chart, Markup]]:
    return [(chart, Markup(draw(chart))) for chart in charts]


def _table(runs: Sequence[RunPage]) -> list[tuple[str, list[str]]]:
    """Several runs beside each other: (what, a value per run); what no run tells is left out."""

    def share(run: RunPage, metric: str) -> str:
        value = weighted(run.record, metric)
        return "" if value is None else f"{value * 100:.0f} %"

    def median(run: RunPage) -> str:
        seconds = [value for _, value in run.record.series("step_s")]
        return duration(statistics.median(seconds)) if seconds else ""

    def held_out(run: RunPage, index: int) -> str:
        evals = run.record.evals
        return f"{evals[index].finished.reward_mean:.3f}" if len(evals) > (index == 0) else ""

    rows: list[tuple[str, list[str]]] = [
        ("held-out reward, first", [held_out(run, 0) for run in runs]),
        ("held-out reward, last", [held_out(run, -1) for run in runs]),
        ("committed steps", [str(len(run.record.commits)) for run in runs]),
        ("median step", [median(run) for run in runs]),
        ("engines busy", [share(run, "engine_busy") for run in runs]),
        ("trainer busy", [share(run, "trainer_busy") for run in runs]),
        ("wall clock", [duration(max(0.0, run.record.ended_s - run.record.began_s)) for run in runs]),
        ("failed attempts", [str(sum(f.attempts for f in run.record.failures.values())) for run in runs]),
        ("warnings", [str(len(run.record.warnings)) for run in runs]),
    ]
    return [row for row in rows if any(row[1])]


def _differences(records: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Settings that are not the same in all runs."""
    keys = dict.fromkeys(key for record in records for key in record.config)
    rows = [(key, [_setting(record.config.get(key)) for record in records]) for key in keys]
    return [row for row in rows if len(set(row[1])) > 1]


def _setting(value: Any) -> str:
    return "not set" if value is None else clean(msgspec.json.encode(value).decode())


def _config_text(record: RunRecord) -> str:
    try:
        return clean((record.folder / "config.toml").read_text(errors="replace"))
    except OSError:
        return ""
