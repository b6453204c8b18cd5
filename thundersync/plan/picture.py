"""One step drawn under lazy and under stream, on one time axis: what runs, what learns, what waits.

A self-contained SVG without scripts: colours that colour-blind people tell apart (Okabe and Ito), labels where things
are if there is room, light and dark after the viewer's own setting.
"""

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from thundersync.forecast.bound import bound
from thundersync.forecast.simulate import Interval, StepForecast, simulate
from thundersync.forecast.trace import StepTrace
from thundersync.plan.outlook import Outlook
from thundersync.plan.words import seconds

WIDTH, LEFT, RIGHT = 960, 118, 92
AREA, ROW, GAP = 46, 20, 5
MOST_WORKERS = 8
_STYLE = """
    .page { fill: #ffffff } .ink { fill: #1a1a1a } .soft { fill: #5f6368 } .rule { stroke: #d0d4d9 }
    .lane { fill: #f1f3f4 } .end { stroke: #1a1a1a } .on { fill: #1a1a1a }
    .run { fill: #0072b2; fill-opacity: .22 } .line { fill: none; stroke: #0072b2; stroke-width: 1.5 }
    .learn { fill: #e69f00 } .commit { fill: #009e73 } .publish { fill: #cc79a7 }
    .bound { stroke: #d55e00; stroke-width: 1.5; stroke-dasharray: 5 4 }
    text { font: 12px system-ui, sans-serif } .big { font-weight: 600; font-size: 14px }
    @media (prefers-color-scheme: dark) {
      .page { fill: #16181b } .ink { fill: #e8eaed } .soft { fill: #9aa0a6 } .rule { stroke: #3c4043 }
      .lane { fill: #23262a } .end { stroke: #e8eaed } .run { fill: #56b4e9 } .line { stroke: #56b4e9 }
    }
"""


def draw(steps: Sequence[StepTrace], outlook: Outlook) -> str:
    """The step whose forecast is nearest to the mean one, as SVG."""
    trace = min(steps, key=lambda step: abs(simulate(step, outlook.mode).step_s - outlook.forecast_s))
    lazy, stream = simulate(trace, "lazy"), simulate(trace, "stream")
    scale = _Scale(max(lazy.step_s, stream.step_s))
    height = 54.0
    body: list[str] = []
    for forecast in (lazy, stream):
        lines, used = _panel(trace, forecast, scale, height)
        body += lines
        height += used + 26
    title = f"Step {trace.step + 1} of {outlook.run}: streaming is {lazy.step_s / stream.step_s:.2f} x as fast as lazy"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height + 32:.0f}" role="img">',
            f"  <title>{escape(title)}</title>",
            f"  <style>{_STYLE}  </style>",
            f'  <rect class="page" width="{WIDTH}" height="{height + 32:.0f}"/>',
            f'  <text class="ink big" x="16" y="28">{escape(title)}</text>',
            *_key(("learn", "learns"), ("commit", "commit"), ("publish", "publish")),
            *_axis(scale, 44.0, height - 12),
            *_bound(bound(trace), scale, 44.0, height - 12),
            *body,
            "</svg>",
            "",
        ]
    )


class _Scale:
    """Seconds -> pixels."""

    def __init__(self, longest_s: float) -> None:
        self.longest_s = longest_s or 1.0

    def x(self, at_s: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * at_s / self.longest_s

    def ticks(self) -> list[float]:
        """Round numbers, five to ten of them."""
        power = 10.0 ** math.floor(math.log10(self.longest_s))
        step = next(s for s in (power / 5, power / 2, power, 2 * power) if self.longest_s / s <= 10)
        return [step * i for i in range(int(self.longest_s / step) + 1)]


def _axis(scale: _Scale, top: float, bottom: float) -> list[str]:
    lines = []
    for tick in scale.ticks():
        x = scale.x(tick)
        lines.append(f'  <line class="rule" x1="{x:.1f}" y1="{top:.0f}" x2="{x:.1f}" y2="{bottom:.0f}"/>')
        lines.append(f'  <text class="soft" x="{x:.1f}" y="{bottom + 16:.0f}" text-anchor="middle">{tick:g} s</text>')
    return lines


def _key(*colours: tuple[str, str]) -> list[str]:
    """At the top right: for bars that are too narrow for a label."""
    lines = []
    for index, (css, text) in enumerate(reversed(colours)):
        x = WIDTH - 84 - 84 * index
        lines.append(f'  <rect class="{css}" x="{x}" y="18" width="11" height="11"/>')
        lines.append(f'  <text class="soft" x="{x + 17}" y="28">{text}</text>')
    return lines


def _bound(bound_s: float, scale: _Scale, top: float, bottom: float) -> list[str]:
    x = scale.x(bound_s)
    return [
        f'  <line class="bound" x1="{x:.1f}" y1="{top:.0f}" x2="{x:.1f}" y2="{bottom:.0f}"/>',
        f'  <text class="ink" x="{x:.1f}" y="{bottom + 31:.0f}" text-anchor="middle">no order is faster: '
        f"{seconds(bound_s)}</text>",
    ]


def _panel(trace: StepTrace, forecast: StepForecast, scale: _Scale, top: float) -> tuple[list[str], float]:
    """An arm, and the height it takes."""
    shown = min(forecast.workers, MOST_WORKERS)
    lines = [f'  <text class="ink big" x="16" y="{top + 14:.0f}">{forecast.arm}</text>']
    lines += _rollouts(trace, scale, top)
    y = top + AREA + GAP
    for worker in range(shown):
        lines += _worker(trace, forecast, worker, scale, y)
        y += ROW + GAP
    if shown < forecast.workers:
        note = f"and {forecast.workers - shown} more workers"
        lines.append(f'  <text class="soft" x="{LEFT}" y="{y + 11:.0f}">{note}</text>')
        y += 18
    end = scale.x(forecast.step_s)
    lines.append(f'  <line class="end" x1="{end:.1f}" y1="{top - 2:.0f}" x2="{end:.1f}" y2="{y - GAP + 2:.0f}"/>')
    lines.append(f'  <text class="ink big" x="{end + 7:.1f}" y="{top + 14:.0f}">{seconds(forecast.step_s)}</text>')
    return lines, y - top


def _rollouts(trace: StepTrace, scale: _Scale, top: float) -> list[str]:
    """How many are not released yet, as stairs that go down."""
    base, count = top + AREA, len(trace.rollouts)
    points, left = [(float(LEFT), top)], count
    for release_s in sorted(rollout.release_s for rollout in trace.rollouts):
        x = scale.x(release_s)
        points.append((x, base - AREA * left / count))
        left -= 1
        points.append((x, base - AREA * left / count))
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return [
        f'  <polygon class="run" points="{LEFT},{base:.1f} {path}"/>',
        f'  <polyline class="line" points="{path}"/>',
        f'  <text class="soft" x="{LEFT - 10}" y="{base - 6:.1f}" text-anchor="end">rollouts</text>',
        f'  <text class="ink" x="{LEFT + 6}" y="{base - 6:.1f}">{count} begin</text>',
    ]


def _worker(trace: StepTrace, forecast: StepForecast, worker: int, scale: _Scale, y: float) -> list[str]:
    """One lane: its passes, the longest time it waits, commit and publish."""
    name = "trainer" if forecast.workers == 1 else f"trainer {worker}"
    end = scale.x(forecast.step_s)
    own = [interval for interval in forecast.intervals if interval.worker == worker]
    lines = [
        f'  <text class="soft" x="{LEFT - 10}" y="{y + 14:.0f}" text-anchor="end">{name}</text>',
        f'  <rect class="lane" x="{LEFT}" y="{y:.0f}" width="{end - LEFT:.1f}" height="{ROW}"/>',
    ]
    for interval in own:
        css = "commit" if interval.what == "commit" else "learn"
        lines.append(_bar(css, interval.start_s, interval.end_s, scale, y))
    if trace.publish_s:
        lines.append(_bar("publish", forecast.step_s - trace.publish_s, forecast.step_s, scale, y))
        lines += _label("publish", forecast.step_s - trace.publish_s, forecast.step_s, scale, y, "on")
    for css, text, start_s, end_s in _spans(own):
        lines += _label(text, start_s, end_s, scale, y, css)
    return lines


def _spans(own: Sequence[Interval]) -> Iterator[tuple[str, str, float, float]]:
    """What is worth a label: the longest wait, the longest stretch of work, the commit."""
    waits, works = [], []
    at_s = begun_s = 0.0
    for interval in own:
        if interval.start_s > at_s:
            waits.append((at_s, interval.start_s))
            works.append((begun_s, at_s))
            begun_s = interval.start_s
        if interval.what == "commit":
            works.append((begun_s, interval.start_s))
            begun_s = interval.end_s
            yield "on", "commit", interval.start_s, interval.end_s
        at_s = interval.end_s
    works.append((begun_s, at_s))
    for css, text, spans in (("soft", "waits", waits), ("on", "learns", works)):
        if spans:
            start_s, end_s = max(spans, key=lambda span: span[1] - span[0])
            yield css, f"{text} {seconds(end_s - start_s)}" if text == "waits" else text, start_s, end_s


def _bar(css: str, start_s: float, end_s: float, scale: _Scale, y: float) -> str:
    """With a hairline between neighbours, so that single passes can be seen."""
    x, wide = scale.x(start_s), scale.x(end_s) - scale.x(start_s)
    return f'  <rect class="{css}" x="{x:.1f}" y="{y:.0f}" width="{max(0.6, wide - 0.8):.1f}" height="{ROW}"/>'


def _label(text: str, start_s: float, end_s: float, scale: _Scale, y: float, css: str) -> list[str]:
    """In the middle, if there is room."""
    wide = scale.x(end_s) - scale.x(start_s)
    if wide < 7.0 * len(text):
        return []
    middle = (scale.x(start_s) + scale.x(end_s)) / 2
    return [f'  <text class="{css}" x="{middle:.1f}" y="{y + 14:.0f}" text-anchor="middle">{escape(text)}</text>']
