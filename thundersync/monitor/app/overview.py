"""The overview: how far the run is, what everything is busy with, what was learned so far. A view of the app, pure."""

import math
from collections import Counter

from rich.text import Text

from thundersync.monitor.app.known import Known, Lines
from thundersync.monitor.panel import chart, chart_legend, progress, span
from thundersync.monitor.shapes import DIM, GLYPHS, LINE, ORANGE, PURPLE, SKY, YELLOW, bar, one_line, padded


def overview(known: Known, width: int, height: int, now_s: float) -> Lines:
    """`height` lines of at most `width` cells."""
    view = known.view
    machines = [
        _machine("engines", view.gauges.engine_busy if view.gauges else None, view.share("engine_busy"), SKY, width),
        _machine(
            "trainer", view.gauges.trainer_busy if view.gauges else None, view.share("trainer_busy"), PURPLE, width
        ),
    ]
    head = [progress(view, known.moment_s(now_s), width), _rollouts(known), Text()]
    below = [Text(), *_heading("busy", "idle is the rest", width), *machines, Text()]
    commits = min(max(3, height // 5), max(1, len(view.commits)))
    tail = [*_heading("commits", "", width), *_commits(known, commits, width)]
    if view.warnings:
        tail.append(padded(Text(f"! {one_line(view.warnings[-1].text)}", YELLOW), width))
    rows = max(3, height - len(head) - 1 - len(below) - len(tail))
    lines = [*head, _chart_head(known, width), *chart(view, width, rows), *below, *tail]
    return [padded(line, width) for line in lines[:height]]


def _heading(word: str, right: str, width: int) -> Lines:
    line = Text.assemble((f"{word} ", "bold"))
    room = width - line.cell_len - len(right) - 1
    return [line.append("─" * max(0, room) + " ", LINE).append(right, DIM)]


def _chart_head(known: Known, width: int) -> Text:
    legend = chart_legend(known.view)
    line = Text().append("reward ", "bold").append("─" * max(0, width - 8 - legend.cell_len), LINE)
    return line.append(" ").append_text(legend)


def _rollouts(known: Known) -> Text:
    """How many rollouts of the step are at what."""
    rows = [row for group in known.view.groups.values() for row in group.rollouts.values()]
    if not rows:
        return Text("no step is open" if known.view.commits else "loading the model, preparing the sandboxes", DIM)
    counts = Counter(row.state for row in rows)
    line = Text().append(f"{len(rows)} rollouts  ", DIM)
    for state, (shape, style, word) in GLYPHS.items():
        if counts[state]:
            line.append(f"{shape} ", style).append(f"{counts[state]}", "bold").append(f" {word}  ", DIM)
    return line


def _machine(name: str, now: float | None, whole: float | None, colour: str, width: int) -> Text:
    """Busy now and over all steps so far, what is left of it is idle."""
    room = max(8, width - 50)
    line = Text().append(f"{name}  ", "bold").append_text(bar(now or 0.0, room, colour, "█", "░"))
    line.append(f" {now:4.0%}" if now is not None else "    –", f"bold {colour}").append(" now", DIM)
    if whole is not None and math.isfinite(whole):
        line.append("   all steps ", DIM).append(f"{whole:4.0%}", "bold").append(" busy ", DIM)
        line.append(f"{max(0.0, 1 - whole):4.0%}", f"bold {ORANGE}").append(" idle", DIM)
    return line


_COLUMNS = (
    ("step", 5), ("reward", 8), ("±", 6), ("seconds", 9), ("engines", 9), ("trainer", 9), ("tokens", 9), ("grad", 8),
    ("mismatch", 10),
)  # fmt: skip


def _commits(known: Known, rows: int, width: int) -> Lines:
    if not known.view.commits:
        return [Text("no commit yet", DIM)]
    lines = [Text("".join(f"{word:>{room}}" for word, room in _COLUMNS), DIM)]
    made = known.view.made
    for index, commit in list(enumerate(known.view.commits))[-rows:]:
        metrics = commit.metrics
        number = made - len(known.view.commits) + index + 1
        cells = [
            f"{number}", _number(metrics, "reward_mean", ".2f"), _number(metrics, "reward_std", ".2f"),
            span(metrics.get("step_s", math.nan)), _number(metrics, "engine_busy", ".0%"),
            _number(metrics, "trainer_busy", ".0%"), _number(metrics, "tokens", ",.0f").replace(",", " "),
            _number(metrics, "grad_norm", ".2g"), _number(metrics, "mismatch_mean", ".1g"),
        ]  # fmt: skip
        text = "".join(f"{cell:>{room}}" for cell, (_, room) in zip(cells, _COLUMNS, strict=True))
        line = Text().append(text, "" if index == len(known.view.commits) - 1 else DIM)
        if commit.empty:
            line.append("  empty: no update", YELLOW)
        lines.append(line)
    return lines


def _number(metrics: dict[str, float], key: str, form: str) -> str:
    value = metrics.get(key, math.nan)
    return format(value, form) if math.isfinite(value) else "–"
