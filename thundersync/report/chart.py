"""Line charts as inline SVG: few lines, each named where it ends, ticks at round numbers.

Takes numbers, gives markup whose colours are the page's CSS variables, so that one drawing serves light and dark. Knows
nothing of runs. Every text goes through `escape`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import TypeAlias

import msgspec

Scale: TypeAlias = Callable[[float], float]
MOST_POINTS = 400
"""Of one line; longer ones are drawn as means of neighbours."""
LABEL_GAP = 13.0
"""Least distance of two line ends' names, in pixels."""


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One line: `points` are (x, y) by rising x; `tone` 0 to 5 chooses its colour and dash."""

    name: str
    points: list[tuple[float, float]]
    tone: int = 0
    dots: bool = False
    """Few measurements with time between them: each is marked."""


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    series: list[Series]
    unit: str = ""
    """`s`, `%` (of shares 0 to 1), `GiB`, or nothing; how values are written."""
    x_name: str = "step"
    note: str = ""
    """What is measured, in one line."""
    from_zero: bool = True
    wide: bool = False

    @property
    def drawn(self) -> list[Series]:
        return [series for series in self.series if series.points]


def draw(chart: Chart) -> str:
    """The SVG element; empty without a point."""
    if not chart.drawn:
        return ""
    width, height = (640.0, 355.0) if chart.wide else (350.0, 190.0)
    lines = [msgspec.structs.replace(series, points=thinned(series.points)) for series in chart.drawn]
    xs = [x for series in lines for x, _ in series.points]
    ys = [y for series in lines for _, y in series.points]
    y_ticks = ticks(min(0.0, *ys) if chart.from_zero else min(ys), max(ys), 5 if chart.wide else 4)
    named = len(lines) > 1
    names = [_end_name(series, chart.unit, named) for series in lines]
    left = 10.0 + 6.6 * max(len(written(tick, chart.unit)) for tick in y_ticks)
    right = 14.0 + 6.7 * max(map(len, names))
    x_low, x_high = min(xs), max(xs)
    if x_low == x_high:
        x_low, x_high = x_low - 0.5, x_high + 0.5

    def across(x: float) -> float:
        return round(left + (x - x_low) / (x_high - x_low) * (width - left - right), 1)

    def down(y: float) -> float:
        return round(10.0 + (y_ticks[-1] - y) / (y_ticks[-1] - y_ticks[0]) * (height - 38.0), 1)

    parts = []
    for tick in y_ticks:
        y = down(tick)
        kind = "zero" if tick == 0 else "grid"
        parts.append(f'<line class="{kind}" x1="{left}" x2="{width - right}" y1="{y}" y2="{y}"/>')
        parts.append(
            f'<text class="tick" x="{left - 6}" y="{y + 4}" text-anchor="end">{written(tick, chart.unit)}</text>'
        )
    shown = _whole(ticks(x_low, x_high, 6 if chart.wide else 4), x_low, x_high)
    for tick in shown:
        text = written(tick, "") if tick != shown[-1] else f"{chart.x_name} {written(tick, '')}"
        parts.append(
            f'<text class="tick" x="{across(tick)}" y="{height - 10}" text-anchor="middle">{escape(text)}</text>'
        )
    ends = _spread([down(series.points[-1][1]) for series in lines], 12.0, height - 34.0)
    for series, name, end in zip(lines, names, ends, strict=True):
        parts += _line(series, across, down)
        x, y = across(series.points[-1][0]), down(series.points[-1][1])
        parts.append(f'<circle class="tone{series.tone} end" cx="{x}" cy="{y}" r="3.2"/>')
        beside = width - right if x > width - right - 0.06 * width else x  # names of ends that are close line up
        parts.append(
            f'<text class="label tone{series.tone}" x="{beside + 8:.1f}" y="{end + 4:.1f}">{escape(name)}</text>'
        )
    hover = escape(msgspec.json.encode(_hover(chart, lines, across, down)).decode(), quote=True)
    label = escape(f"{chart.title}: {', '.join(names)}", quote=True)
    return (
        f'<svg class="chart" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{label}" data-hover="{hover}" '
        f'data-top="10" data-bottom="{height - 28:g}">{"".join(parts)}</svg>'
    )


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers that span low..high, roughly `about` of them, at least two."""
    if not math.isfinite(high - low):
        low, high = 0.0, 1.0
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # all the same, as far as a float tells
        spare = abs(low) * 0.1 or 1.0
        low, high = (low - spare, high + spare) if low else (0.0, spare)
    rough = (high - low) / about
    scale = 10.0 ** math.floor(math.log10(rough))
    size = next(factor * scale for factor in (1, 2, 2.5, 5, 10) if factor * scale >= rough * 0.999)
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return [float(f"{index * size:.12g}") for index in range(first, last + 1)]


def written(value: float, unit: str) -> str:
    """A number as a reader wants it: three figures, with its unit."""
    if not math.isfinite(value):
        return "–"
    if unit == "%":
        return f"{value * 100:.3g} %"
    return f"{_plain(value)}{f' {unit}' if unit else ''}"


def duration(seconds: float) -> str:
    """`1 h 05 min`, `2 min 10 s`, `8.4 s`."""
    if seconds < 0.95:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60:02d} s" if whole % 60 else "")
    minutes = round(seconds / 60)
    return f"{minutes // 60} h" + (f" {minutes % 60:02d} min" if minutes % 60 else "")


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most `most` points: each is the mean of as many neighbours as it stands for; the last one stays."""
    if len(points) <= most:
        return list(points)
    size = math.ceil((len(points) - 1) / (most - 1))
    parts = [points[start : min(start + size, len(points) - 1)] for start in range(0, len(points) - 1, size)]
    return [
        *((sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts),
        points[-1],
    ]


def _plain(value: float) -> str:
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e6):
        mantissa, _, exponent = f"{value:.2g}".partition("e")
        if exponent:
            return f"{mantissa}e{int(exponent)}"
    if size >= 10_000:
        return f"{value / 1000:.4g}k"
    return f"{value:.3g}" if size < 1000 else f"{value:.0f}"


def _end_name(series: Series, unit: str, named: bool) -> str:
    value = written(series.points[-1][1], unit)
    return f"{series.name} {value}" if named else value


def _whole(values: list[float], low: float, high: float) -> list[float]:
    """Steps are whole numbers, and a tick outside the data has no place."""
    return [value for value in values if low <= value <= high and value == int(value)]


def _line(series: Series, across: Scale, down: Scale) -> list[str]:
    points = " ".join(f"{across(x)},{down(y)}" for x, y in series.points)
    drawn = [f'<polyline class="line tone{series.tone}" points="{points}"/>']
    if series.dots or len(series.points) < 3:
        drawn += [
            f'<circle class="tone{series.tone} dot" cx="{across(x)}" cy="{down(y)}" r="3.2"/>' for x, y in series.points
        ]
    return drawn


def _spread(wanted: list[float], top: float, bottom: float) -> list[float]:
    """The same heights, moved apart so that names do not cover each other."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    placed = dict[int, float]()
    at = top - LABEL_GAP
    for index in order:
        at = max(wanted[index], at + LABEL_GAP)
        placed[index] = at
    over = max(0.0, at - bottom) if order else 0.0
    for index in reversed(order):  # what ran out at the bottom pushes its neighbours up
        if over <= 0:
            break
        placed[index] -= over
        above = order[order.index(index) - 1] if order.index(index) else None
        over = max(0.0, placed[above] + LABEL_GAP - placed[index]) if above is not None else 0.0
    return [placed[index] for index in range(len(wanted))]


def _hover(chart: Chart, lines: list[Series], across: Scale, down: Scale) -> list[list[object]]:
    """What the page's script tells about each x: [x in pixels, title, [[tone, name, value, y in pixels], ...]]."""
    by_x: dict[float, list[list[object]]] = {}
    for series in lines:
        for x, y in series.points:
            by_x.setdefault(x, []).append([series.tone, series.name, written(y, chart.unit), down(y)])
    return [[across(x), f"{chart.x_name} {written(x, '')}", rows] for x, rows in sorted(by_x.items())]
