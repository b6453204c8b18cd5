"""Draws docs/step.svg, the picture of a real step in docs/concepts.md: what ran when, read off a run's events.

    python tools/draw_step.py runs/NAME [STEP]

One lane per rollout, grouped; below them how many replies the engines sampled at once, and the trainer's passes.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

from thundersync.monitor.events import from_line
from thundersync.report.timeline import Kind, Lane, Span, StepTimeline, running, shares, step_timeline

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "step.svg"
WIDTH, LEFT, RIGHT, TOP = 1000, 76, 16, 44
LANE, BAR, GAP = 9, 7, 7
PAPER, INK, MUTED, FAINT, COMMIT = "#ffffff", "#1f2328", "#59636e", "#d1d9e0", "#1a7f37"
# Blue, orange, grey: apart for every kind of colour vision, and in lightness.
FILLS: dict[Kind, str] = {
    "prepare": "#d1d9e0",
    "generate": "#2f6fde",
    "tool": "#a9c4f5",
    "score": "#8250df",
    "queue": "#f3d9bb",
    "backward": "#c9701a",
    "retry": "#cf222e",
    "teacher": "#1b7c83",
}
SAID: dict[Kind, str] = {
    "prepare": "sandbox",
    "generate": "generation",
    "tool": "tool",
    "score": "checker",
    "queue": "waiting for the trainer",
    "backward": "backward",
}


class Drawing:
    """Collects shapes; times become places."""

    def __init__(self, seconds: float) -> None:
        self._scale = (WIDTH - LEFT - RIGHT) / seconds
        self._seconds = seconds
        self.shapes: list[str] = []

    def x(self, at_s: float) -> float:
        return round(LEFT + min(max(at_s, 0.0), self._seconds) * self._scale, 1)

    def box(self, start_s: float, end_s: float, y: float, height: float, fill: str) -> None:
        width = max(round(self.x(end_s) - self.x(start_s), 1), 0.4)
        self.shapes.append(f'<rect x="{self.x(start_s)}" y="{y:g}" width="{width}" height="{height:g}" fill="{fill}"/>')

    def text(self, x: float, y: float, said: str, *, fill: str = MUTED, anchor: str = "start", size: int = 12) -> None:
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}">{escape(said)}</text>'
        )

    def line(self, x: float, top: float, bottom: float, stroke: str) -> None:
        self.shapes.append(
            f'<line x1="{x:g}" y1="{top:g}" x2="{x:g}" y2="{bottom:g}" stroke="{stroke}" stroke-dasharray="4 3"/>'
        )


def draw(timeline: StepTimeline) -> str:
    """The whole picture."""
    drawing = Drawing(timeline.seconds)
    y = _legend(drawing, timeline)
    for group in timeline.groups:
        drawing.text(LEFT - 8, y + 12, group.group_id.rpartition("-")[2].lstrip("0") or "0", anchor="end")
        for lane in timeline.lanes:
            if lane.group_id == group.group_id:
                _lane(drawing, lane, y)
                y += LANE
        y += GAP
    y = _engines(drawing, timeline, y + 6)
    y = _trainer(drawing, timeline, y + 10)
    y = _clock(drawing, timeline, y)
    font = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:g}" font-family="{font}" role="img" '
            f'aria-label="{escape(_label(timeline))}">',
            f'<rect width="{WIDTH}" height="{y:g}" rx="8" fill="{PAPER}"/>',
            *drawing.shapes,
            "</svg>\n",
        ]
    )


def _legend(drawing: Drawing, timeline: StepTimeline) -> float:
    here = {span.kind for lane in timeline.lanes for span in (*lane.spans, *lane.backward)}
    at = float(LEFT)
    for kind, said in SAID.items():
        if kind in here:
            drawing.shapes.append(f'<rect x="{at:g}" y="15" width="20" height="9" fill="{FILLS[kind]}"/>')
            drawing.text(at + 26, 24, said)
            at += 26 + 6.6 * len(said) + 20
    drawing.text(LEFT - 8, TOP - 4, "group", anchor="end")
    return TOP


def _lane(drawing: Drawing, lane: Lane, y: float) -> None:
    for span in (*lane.spans, *lane.backward):
        drawing.box(span.start_s, span.end_s, y, BAR, FILLS[span.kind])
    if lane.state == "skipped":
        end_s = max((span.end_s for span in lane.spans), default=0.0)
        drawing.shapes.append(f'<circle cx="{drawing.x(end_s) + 5}" cy="{y + BAR / 2:g}" r="2" fill="{MUTED}"/>')


def _engines(drawing: Drawing, timeline: StepTimeline, y: float) -> float:
    """How many replies were being sampled, as a filled curve: of all engines together."""
    height = 34
    spans: list[Span] = [span for engine in timeline.engines.values() for span in engine]
    counts = running(spans)
    most = max((count for _, count in counts), default=1)
    drawing.text(LEFT - 8, y + height / 2 + 4, "engines", fill=INK, anchor="end")
    for (start_s, count), (end_s, _) in zip(counts, [*counts[1:], (timeline.seconds, 0)], strict=True):
        tall = round(height * count / most, 1)
        drawing.box(start_s, end_s, y + height - tall, tall, FILLS["generate"])
    return y + height


def _trainer(drawing: Drawing, timeline: StepTimeline, y: float) -> float:
    height = 20
    for worker, passes in sorted(timeline.workers.items()):
        drawing.text(LEFT - 8, y + 14, "trainer" if len(timeline.workers) == 1 else f"trainer {worker}", fill=INK,
                     anchor="end")  # fmt: skip
        for work in passes:
            drawing.box(work.start_s, work.end_s, y, height, FILLS["backward"])
            drawing.shapes[-1] = drawing.shapes[-1].replace("/>", f' stroke="{PAPER}" stroke-width="0.6"/>')
        y += height + 4
    if timeline.commit is not None:
        drawing.box(*timeline.commit, y - height - 4, height, COMMIT)
        drawing.line(drawing.x(timeline.commit[0]), TOP, y, COMMIT)
    return y


def _clock(drawing: Drawing, timeline: StepTimeline, y: float) -> float:
    every = next(each for each in (1, 2, 5, 10, 20, 30, 60, 120, 300, 600) if timeline.seconds / each <= 12)
    for mark in range(0, int(timeline.seconds) + 1, every):
        drawing.text(drawing.x(mark), y + 14, f"{mark} s", anchor="middle", size=11)
    return y + 24


def _label(timeline: StepTimeline) -> str:
    parts = shares(timeline)
    return (
        f"A real step of {len(timeline.lanes)} rollouts, {timeline.seconds:.0f} seconds: for {parts.both:.0f} of them "
        f"rollouts ran while the trainer worked, for {parts.rollouts:.0f} only rollouts ran, for {parts.learning:.0f} "
        "only the trainer worked; then one commit."
    )


def main(run: Path, step: int) -> int:
    known = [event for line in (run / "events.jsonl").read_bytes().splitlines() if (event := from_line(line))]
    opened = [i for i, event in enumerate(known) if event.__struct_config__.tag == "step_opened"]
    wanted = [i for i in opened if known[i].step == step]  # type: ignore[union-attr]
    if not wanted:
        print(f"{run} has no step {step}; it has {len(opened)}", file=sys.stderr)
        return 1
    end = next((i for i in opened if i > wanted[0]), len(known))
    timeline = step_timeline(known[wanted[0] : end])
    assert timeline is not None
    PICTURE.write_text(draw(timeline))
    print(_label(timeline))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
