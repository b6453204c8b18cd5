"""Sandboxes: how many live, what runs in them, how long they take. A view of the app, pure.

Everything is read off the rollouts' lanes of time, so a viewer that came late knows the same; sandboxes are counted
where one was told to have started, which a rollout's beginning does not say.
"""

from collections.abc import Iterable

from rich.text import Text

from thundersync.monitor.app.known import Known, Lines
from thundersync.monitor.panel import span
from thundersync.monitor.shapes import DIM, LINE, ORANGE, RED, YELLOW, fit, one_line, padded
from thundersync.monitor.timeline import Doing, Lane, StepTimeline


def boxes(known: Known, width: int, height: int, now_s: float) -> Lines:
    """`height` lines of at most `width` cells."""
    step = known.latest
    if step is None:
        return [Text("no step has begun yet", DIM)]
    now_s = step.ended_s if step.ended_s is not None else known.moment_s(now_s)
    doing = {name: _at(lane, now_s) for name, lane in step.lanes.items()}
    kind = known.view.run.runtime if known.view.run else ""
    if kind == "none":
        return [Text('this run has no sandboxes (sandbox.runtime = "none")', DIM)]
    live = sum(lane.has_sandbox(now_s) for lane in step.lanes.values())
    head = Text.assemble((f"{live}", "bold"), (f" {kind} sandboxes".replace("  ", " "), DIM))
    for which, shape, style in ((Doing.TOOL, "$", ORANGE), (Doing.SCORE, "?", YELLOW)):
        words = {Doing.TOOL: "rollouts with a command", Doing.SCORE: "being judged"}[which]
        count = sum(each is which for each in doing.values())
        head.append(f"  {shape} ", style).append(f"{count}", "bold").append(f" {words}", DIM)
    lines = [padded(head, width), Text(), *_table(step, now_s), Text()]
    failed = [text for lane in step.lanes.values() for text in lane.failures.values()]
    if failed:
        lines.append(padded(Text(f"↻ {len(failed)} failed in this step, the last: {one_line(failed[-1])}", RED), width))
        lines.append(Text())
    running = sorted(
        (lane.marks[-1][0], name, lane.command) for name, lane in step.lanes.items() if doing[name] is Doing.TOOL
    )
    lines.append(Text("longest running commands " + "─" * max(0, width - 25), LINE))
    if not running:
        lines.append(Text("none", DIM))
    for since_s, name, command in running[: max(1, height - len(lines))]:
        line = (
            Text().append(f"{span(now_s - since_s):>8}  ", f"bold {ORANGE}").append(f"{name.partition('-')[2]}  ", DIM)
        )
        lines.append(line.append(fit(command, max(8, width - line.cell_len))))
    return lines[:height]


def _at(lane: Lane, now_s: float) -> Doing:
    passed = [each.doing for each in lane.spans() if each.start_s <= now_s]
    return passed[-1] if passed else Doing.WAIT


def _table(step: StepTimeline, now_s: float) -> Lines:
    starts = [start_s for lane in step.lanes.values() for at_s, start_s in lane.sandboxes.items() if at_s <= now_s]
    took: dict[Doing, list[float]] = {Doing.START: starts, Doing.TOOL: [], Doing.SCORE: []}
    for lane in step.lanes.values():
        for each in lane.spans():
            if each.doing is Doing.START:
                continue  # the way to its first turn, which need not have a sandbox in it
            if each.doing in took and each.end_s <= now_s:
                took[each.doing].append(each.end_s - each.start_s)
    words = {Doing.START: "start", Doing.TOOL: "command", Doing.SCORE: "checker"}
    lines = [Text(f"{'this step':<12}{'count':>8}{'median':>10}{'95 %':>10}{'longest':>10}{'together':>12}", DIM)]
    for doing, seconds in took.items():
        median, most = _quantile(seconds, 0.5), _quantile(seconds, 0.95)
        longest = max(seconds, default=0.0)
        text = f"{len(seconds):>8}{_s(median):>10}{_s(most):>10}{_s(longest):>10}{span(sum(seconds)):>12}"
        lines.append(Text().append(f"{words[doing]:<12}", "bold").append(text, "" if seconds else DIM))
    return lines


def _quantile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _s(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s" if seconds < 60 else span(seconds)
