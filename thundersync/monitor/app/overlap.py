"""The overlap: a step as lanes of time. Every rollout with what it did, every engine and trainer worker below it.

A view of the app, and pure: a `StepTimeline` in, lines out. What a moment is, is told by shape and by colour.
"""

import math
from collections.abc import Sequence

from rich.text import Text

from thundersync.monitor.app.known import Known, Lines
from thundersync.monitor.panel import span
from thundersync.monitor.shapes import DIM, GREEN, LINE, ORANGE, PURPLE, RED, SKY, YELLOW, fit, padded, strip
from thundersync.monitor.timeline import Doing, Lane, Pass, Span, StepTimeline

MARKS: dict[Doing, tuple[str, str, str]] = {
    Doing.START: ("╌", LINE, "start"),
    Doing.GENERATE: ("▆", SKY, "generate"),
    Doing.TOOL: ("▂", ORANGE, "tool"),
    Doing.SCORE: ("▒", YELLOW, "score"),
    Doing.QUEUE: ("┄", PURPLE, "queue"),
    Doing.BACKWARD: ("◆", f"bold {PURPLE}", "backward"),
    Doing.DONE: ("●", GREEN, "done"),
    Doing.FLAT: ("=", DIM, "flat"),
    Doing.FAIL: ("×", f"bold {RED}", "fail"),
    Doing.WAIT: ("·", LINE, "wait"),
}
"""Shape, colour, word."""
COMMIT = "■"
LABEL, TAIL = 10, 6
_LEVELS = " ▁▂▃▄▅▆▇█"


def overlap(known: Known, width: int, height: int, now_s: float) -> Lines:
    """The view: `height` lines of at most `width` cells."""
    step = known.shown
    if step is None:
        which = known.shown_step
        words = "no step has begun yet" if which is None else f"reading step {which + 1} ..."
        return [Text(words, DIM)]
    end_s = step.ended_s if step.ended_s is not None else known.moment_s(now_s)
    machines = [*_engines(step, end_s), *_workers(step, end_s)]
    room = width - LABEL - TAIL
    scale = Scale(step.opened_s, _right_edge(known, step, end_s), room)
    rows = max(1, height - 4 - len(machines))
    known.cursor.lane = max(0, min(known.cursor.lane, len(step.lanes) - rows))
    lanes = list(step.lanes.values())[known.cursor.lane : known.cursor.lane + rows]
    lines = [_title(known, step, end_s, width), _axis(scale)]
    previous, learned = "", step.backwards()
    for lane in lanes:
        passes = learned.get(lane.rollout_id, ())
        lines.append(_rollout(lane, passes, scale, end_s, first=lane.group_id != previous))
        previous = lane.group_id
    lines += [Text(" " * LABEL) for _ in range(rows - len(lanes))] if len(step.lanes) > rows else []
    lines.append(_rule(step, len(lanes), known.cursor.lane, width))
    lines += [_machine(each, scale, step) for each in machines]
    lines.append(_legend(width))
    return lines


class Scale:
    """Seconds to cells."""

    def __init__(self, start_s: float, end_s: float, room: int) -> None:
        self.start_s, self.room = start_s, room
        self.cell_s = max((end_s - start_s) / room, 1e-6)

    def cell(self, at_s: float) -> int:
        return int((at_s - self.start_s) / self.cell_s)


class Machine:
    """An engine or a worker: stretches of work, each with a weight."""

    def __init__(
        self,
        name: str,
        stretches: Sequence[tuple[float, float]],
        style: str,
        *,
        since_s: float,
        end_s: float,
        most: int,
    ) -> None:
        """`most` is how many stretches at once fill a cell to its top."""
        self.name, self._style, self._most, self._end_s = name, style, most, end_s
        self.learns = style == PURPLE
        self._stretches = sorted((start, min(end, end_s)) for start, end in stretches if start < end_s)
        self.share = _union_s(self._stretches) / max(end_s - since_s, 1e-9)

    def cells(self, scale: Scale) -> list[tuple[str, str]]:
        load = [0.0] * (scale.room + 1)
        for start, end in self._stretches:
            _fill(load, scale, start, end)
        last = scale.cell(self._end_s)
        drawn = []
        for cell, value in enumerate(load[: scale.room]):
            level = min(8, math.ceil(value / self._most * 8 - 0.2)) if value > 0.04 else 0
            drawn.append((_LEVELS[level], self._style) if level else (" " if cell > last else "·", LINE))
        return drawn


def _fill(load: list[float], scale: Scale, start_s: float, end_s: float) -> None:
    """Add the share of each cell that a stretch covers."""
    start = max(0.0, (start_s - scale.start_s) / scale.cell_s)
    end = min(float(scale.room), (end_s - scale.start_s) / scale.cell_s)
    if end <= start:
        return
    first, last = int(start), int(end)
    if first == last:
        load[first] += end - start
        return
    load[first] += first + 1 - start
    for cell in range(first + 1, last):
        load[cell] += 1.0
    load[last] += end - last


def _engines(step: StepTimeline, end_s: float) -> list[Machine]:
    stretches: dict[int | None, list[tuple[float, float]]] = {}
    for lane in step.lanes.values():
        for each in lane.spans():
            if each.doing is Doing.GENERATE:
                stretches.setdefault(lane.engine, []).append((each.start_s, each.end_s))
    names = sorted(stretches, key=lambda engine: -1 if engine is None else engine)
    most = max((_most_at_once(each) for each in stretches.values()), default=1)
    return [
        Machine(
            "engines" if engine is None else f"engine {engine}",
            stretches[engine], SKY, since_s=step.opened_s, end_s=end_s, most=most,
        )
        for engine in names
    ] or [Machine("engines", [], SKY, since_s=step.opened_s, end_s=end_s, most=1)]  # fmt: skip


def _workers(step: StepTimeline, end_s: float) -> list[Machine]:
    return [
        Machine(
            f"trainer {worker}", [(each.start_s, each.end_s) for each in step.passes[worker].values()], PURPLE,
            since_s=step.opened_s, end_s=end_s, most=1,
        )
        for worker in sorted(step.passes)
    ] or [Machine("trainer", [], PURPLE, since_s=step.opened_s, end_s=end_s, most=1)]  # fmt: skip


def _machine(machine: Machine, scale: Scale, step: StepTimeline) -> Text:
    commits_from = scale.room
    if machine.learns and step.worked_s is not None:
        commits_from = scale.cell(step.worked_s)
    cells = (
        (COMMIT, GREEN) if cell >= commits_from and drawn[0] == "·" else drawn
        for cell, drawn in enumerate(machine.cells(scale))
    )
    line = Text().append(fit(machine.name, LABEL), "bold").append_text(strip(cells))
    return line.append(f" {machine.share:4.0%}", "bold")


def _rollout(lane: Lane, passes: Sequence[Pass], scale: Scale, end_s: float, *, first: bool) -> Text:
    group, _, member = lane.rollout_id.rpartition("-")
    label = f"{'g' + group.rpartition('-')[2] if first else '':<4}{member}"
    line = Text().append(f"{label:<{LABEL}}", "bold" if first else DIM)
    line.append_text(lane_cells(lane, passes, scale, end_s))
    if lane.reward is not None:
        return line.append(f" {lane.reward:5.2f}", GREEN if lane.reward > 0 else DIM)
    return line.append(f"{f't{lane.turns}':>{TAIL}}" if lane.turns else "", DIM)


def lane_cells(lane: Lane, passes: Sequence[Pass], scale: Scale, end_s: float) -> Text:
    """One rollout over the width: each cell is what took the most of it, backward before anything else."""
    took: list[dict[Doing, float]] = [{} for _ in range(scale.room + 1)]
    for each in lane.spans():
        _spend(took, scale, each, end_s)
    learned = [0.0] * (scale.room + 1)
    for one in passes:
        _fill(learned, scale, one.start_s, min(one.end_s, end_s))
    cells: list[tuple[str, str]] = []
    over = False
    for cell in range(min(scale.room, scale.cell(end_s) + 1)):
        spent = took[cell]
        doing = Doing.BACKWARD if learned[cell] > 0.35 else max(spent, key=spent.__getitem__, default=Doing.WAIT)
        shape, style, _ = MARKS[doing]
        cells.append((" " if over and doing in _OVER else shape, style))
        over = over or doing in _OVER
    return padded(strip(cells), scale.room)


_OVER = (Doing.DONE, Doing.FLAT, Doing.FAIL)


def _spend(took: list[dict[Doing, float]], scale: Scale, span_: Span, end_s: float) -> None:
    start = max(0.0, (span_.start_s - scale.start_s) / scale.cell_s)
    end = min(float(scale.room), (min(span_.end_s, end_s) - scale.start_s) / scale.cell_s)
    if end <= start:
        return
    weight = 0.5 if span_.doing is Doing.WAIT else 1.0  # what is done shows before what is waited for
    for cell in range(int(start), min(scale.room - 1, int(end)) + 1):
        seconds = (min(end, cell + 1) - max(start, cell)) * weight
        took[cell][span_.doing] = took[cell].get(span_.doing, 0.0) + seconds


def _title(known: Known, step: StepTimeline, end_s: float, width: int) -> Text:
    live = step is known.timelines.open
    line = Text.assemble(("step ", ""), (f"{step.step + 1}", "bold"), f" of {known.view.max_steps} ")
    line.append("● live " if live else "◂ earlier " if known.cursor.step is not None else "", GREEN if live else YELLOW)
    line.append(f" {span(end_s - step.opened_s)}", "bold")
    total = sum(step.busy_s(worker, end_s) for worker in step.passes)
    if total > 0 and not live:
        line.append(f"   {step.sooner_s() / total:.0%}", f"bold {PURPLE}")
        line.append(" of the backward ran before the last reward", DIM)
    elif live:
        closed = len(step.closed)
        line.append(f"   {closed} of {len(step.tasks)} groups closed", DIM)
    return padded(line, width)


def _axis(scale: Scale) -> Text:
    step_s = next(
        (each for each in (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200) if each / scale.cell_s >= 9), 14400
    )
    cells = [" "] * scale.room
    at_s = 0
    while (cell := round(at_s / scale.cell_s)) < scale.room:
        for offset, character in enumerate(f"╷{_short(at_s)}"):
            if cell + offset < scale.room:
                cells[cell + offset] = character
        at_s += step_s
    return Text(" " * LABEL + "".join(cells), DIM)


def _short(seconds: int) -> str:
    if seconds < 60:
        return f"{seconds}s"
    minutes, rest = divmod(seconds, 60)
    return f"{minutes}m{rest:02d}" if rest else f"{minutes}m" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}"


def _rule(step: StepTimeline, shown: int, first: int, width: int) -> Text:
    more = (
        f" rollouts {first + 1} to {first + shown} of {len(step.lanes)}, ↑↓ for more "
        if shown < len(step.lanes)
        else ""
    )
    return Text("─" * LABEL + more + "─" * max(0, width - LABEL - len(more)), LINE)


def _legend(width: int) -> Text:
    shapes = [*MARKS.values(), (COMMIT, GREEN, "commit")]
    return padded(Text(" ").join(Text.assemble((mark, style), (word, DIM)) for mark, style, word in shapes), width)


def _right_edge(known: Known, step: StepTimeline, end_s: float) -> float:
    """A live step is drawn over the time that a step takes, so that it fills from left to right."""
    if step.ended_s is not None:
        return end_s
    took = [commit.metrics["step_s"] for commit in known.view.commits[-3:] if "step_s" in commit.metrics]
    return max(step.opened_s + max(took, default=0.0), end_s + 0.02 * (end_s - step.opened_s), step.opened_s + 1.0)


def _union_s(stretches: Sequence[tuple[float, float]]) -> float:
    """Seconds covered by at least one; they are sorted."""
    total, reached = 0.0, -math.inf
    for start, end in stretches:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _most_at_once(stretches: Sequence[tuple[float, float]]) -> int:
    edges = sorted([(start, 1) for start, _ in stretches] + [(end, -1) for _, end in stretches])
    most = now = 0
    for _, change in edges:
        now += change
        most = max(most, now)
    return max(1, most)
