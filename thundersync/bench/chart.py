"""A bench as a picture: every arm's step to scale, when engines generated and trainer workers learned. Plain SVG."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from html import escape

from thundersync.bench.arms import Measured
from thundersync.bench.results import Results
from thundersync.bench.watch import Span
from thundersync.config import BenchArm

WIDTH, LEFT, RIGHT = 1000, 110, 30
LANE, GAP, PANEL = 20, 5, 96
INK, MUTED, FAINT, PAPER = "#1f2328", "#59636e", "#d1d9e0", "#ffffff"
GENERATES, LEARNS, COMMITS = "#c9701a", "#2f6fde", "#1a7f37"
SLICES = 400


def draw(results: Results, steps: Mapping[BenchArm, Sequence[Measured]]) -> str:
    """The median step of each arm."""
    typical = {arm: _typical(of_arm) for arm, of_arm in steps.items()}
    longest_s = max(step.step_s for step in typical.values())
    scale = (WIDTH - LEFT - RIGHT) / longest_s
    height = 64 + PANEL * len(typical) + 34
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>',
        _text(16, 24, f"{results.model}: one step in each arm", size=16, weight=600),
        _text(16, 44, results.work, fill=MUTED),
    ]
    for index, (arm, step) in enumerate(typical.items()):
        drawn += _panel(results, arm, step, 64 + index * PANEL, scale)
    drawn += _axis(64 + len(typical) * PANEL, longest_s, scale)
    return "\n".join([*drawn, "</svg>", ""])


def _typical(steps: Sequence[Measured]) -> Measured:
    middle = statistics.median_low([step.step_s for step in steps])
    return next(step for step in steps if step.step_s == middle)


def _panel(results: Results, arm: BenchArm, step: Measured, y: float, scale: float) -> list[str]:
    line = step.timeline
    told = f"{arm}: {results.arms[arm].step_s.median:.1f} s"
    if (speedup := results.speedup.get(f"{arm}_over_lazy")) is not None:
        told += f", {speedup:.2f}x lazy"
    most = max(_alive(line.turns, line.step_s), default=0) or 1
    drawn = [
        _text(LEFT, y + 14, told, size=14, weight=600),
        _text(LEFT - 10, y + 36, "generating", anchor="end", fill=MUTED),
        _text(LEFT - 10, y + 36 + LANE + GAP, "learning", anchor="end", fill=MUTED),
        _box(0.0, line.step_s, y + 22, LANE, "none", scale, stroke=FAINT),
        _box(0.0, line.step_s, y + 22 + LANE + GAP, LANE, "none", scale, stroke=FAINT),
    ]
    slice_s = line.step_s / SLICES
    for index, alive in enumerate(_alive(line.turns, line.step_s)):
        if alive:
            start = index * slice_s
            drawn.append(
                _box(start, start + slice_s, y + 22, LANE, GENERATES, scale, opacity=0.25 + 0.75 * alive / most)
            )
    height = LANE / max(1, len(line.passes))
    for worker, spans in enumerate(line.passes):
        lane_y = y + 22 + LANE + GAP + worker * height
        drawn += [_box(start, end, lane_y, height, LEARNS, scale, stroke=PAPER) for start, end in spans]
    committed_s = line.step_s - step.metrics["between_s"]
    drawn.append(_box(committed_s, line.step_s, y + 22 + LANE + GAP, LANE, COMMITS, scale))
    return drawn


def _alive(turns: Sequence[Span], step_s: float) -> list[int]:
    """Turns in the engines in each slice of the step."""
    middles = [(index + 0.5) * step_s / SLICES for index in range(SLICES)]
    return [sum(start <= at < end for start, end in turns) for at in middles]


def _axis(y: float, longest_s: float, scale: float) -> list[str]:
    tick_s = next(tick for tick in (0.1, 0.5, 1, 2, 5, 10, 20, 60, 120, 600, 3600) if longest_s / tick <= 16)
    drawn = []
    for index in range(int(longest_s / tick_s) + 1):
        at = LEFT + index * tick_s * scale
        drawn.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y - 4}" y2="{y}" stroke="{MUTED}"/>')
        drawn.append(_text(at, y + 14, f"{index * tick_s:g} s", anchor="middle", fill=MUTED))
    return drawn


def _box(
    start_s: float,
    end_s: float,
    y: float,
    height: float,
    fill: str,
    scale: float,
    *,
    stroke: str = "",
    opacity: float = 1.0,
) -> str:
    line = f' stroke="{stroke}" stroke-width="0.5"' if stroke else ""
    pale = f' fill-opacity="{opacity:.2f}"' if opacity < 1.0 else ""
    width = max(0.0, (end_s - start_s) * scale)
    return (
        f'<rect x="{LEFT + start_s * scale:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{fill}"{pale}{line}/>'
    )


def _text(
    x: float, y: float, text: str, *, size: int = 12, fill: str = INK, anchor: str = "start", weight: int = 400
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
