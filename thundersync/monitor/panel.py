"""The picture of a run for a terminal: a `RunView` in, lines of exactly one width out.

Between the state and the screen. It knows nothing of sockets, time or the terminal itself.
"""

import math
from collections import Counter
from collections.abc import Sequence

from rich.text import Text

from thundersync.monitor.chart import columns, place
from thundersync.monitor.groups import group_lines
from thundersync.monitor.shapes import (
    BLUE,
    DIM,
    GLYPHS,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    YELLOW,
    Frame,
    bar,
    boxed,
    one_line,
    rule,
    strip,
)
from thundersync.monitor.state import RolloutState, RunView


def render(view: RunView, *, now_s: float, width: int = 80, height: int = 23) -> Frame:
    """The panel: at most `height` lines (18 or more are needed), each of `width` cells (60 or more).

    `now_s` is Unix time, for what has passed and what is left.
    """
    width = max(60, width)
    inner = width - 4
    machines = [_engines(view, inner), _trainer(view, inner)]
    foot = [line for line in (_last_commit(view), _last_warning(view)) if line is not None]
    free = max(18, height) - 9 - len(machines) - len(foot)
    wanted = max(1, len(view.groups))
    chart_rows = max(3, min(8, free - wanted))
    groups = group_lines(view, inner, max(1, min(wanted, free - chart_rows)))
    lines = [
        rule(_title(view), width, "╭╮", right=_what(view, inner)),
        boxed(progress(view, now_s, inner), width),
        rule(_label("groups"), width, "├┤", right=_group_counts(view)),
        *[boxed(line, width) for line in groups],
        rule(_label("machines"), width, "├┤", right=Text("busy, the whole run" if view.finished else "busy now", DIM)),
        *[boxed(line, width) for line in machines],
        rule(_label("reward"), width, "├┤", right=chart_legend(view)),
        *[boxed(line, width) for line in chart(view, inner, chart_rows)],
        rule(Text(), width, "├┤"),
        *[boxed(line, width) for line in foot],
        boxed(_legend(), width),
        rule(Text(), width, "╰╯"),
    ]
    return Frame(lines)


def span(seconds: float) -> str:
    """A duration as people say it: `42s`, `6m 10s`, `2h 05m`."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def rewards_text(rewards: Sequence[float]) -> str:
    """A few rewards in full, many as a count per value."""
    if len(rewards) <= 8:
        return " ".join(f"{reward:.2f}" for reward in rewards)
    return "  ".join(f"{count}×{value:.2f}" for value, count in sorted(Counter(rewards).items()))


def _title(view: RunView) -> Text:
    name = view.run.name if view.run else "…"
    return Text.assemble(("thundersync", f"bold {YELLOW}"), "  ", (name, "bold"))


def _what(view: RunView, inner: int) -> Text:
    if view.run is None:
        return Text()
    run = view.run
    model = run.model.rstrip("/").rpartition("/")[2]
    room = inner - _title(view).cell_len - 8
    facts = [(model, run.algo, run.mode, run.backend, run.runtime), (model, run.mode, run.backend), (model, run.mode)]
    texts = [" · ".join(each) for each in facts]
    return Text(next((text for text in texts if len(text) <= room), model), SKY)


def progress(view: RunView, now_s: float, inner: int) -> Text:
    """Where the run is, in one line of `inner` cells."""
    end_s = view.at_s if view.finished else now_s
    ongoing = view.step is not None
    left = Text.assemble("step ", (f"{view.made + ongoing}", "bold"), f"/{view.max_steps} ")
    colour = {"finished": GREEN, "stopped": RED, "evaluating": ORANGE}.get(view.phase, SKY)
    phase = view.phase
    if view.evaluating is not None:
        phase = f"evaluating {view.evaluating.finished}/{view.evaluating.rollouts}"
    right = Text.assemble("  ", (phase, f"bold {colour}"), f"  policy v{view.policy_version}")
    right.append(f"  {span(view.elapsed_s(end_s))}")
    eta_s = view.eta_s(end_s)
    if eta_s is not None:
        right.append("  ETA ", DIM).append(span(eta_s), "bold")
    room = max(4, inner - left.cell_len - right.cell_len)
    rollouts = [row for group in view.groups.values() for row in group.rollouts.values()]
    over = (RolloutState.DONE, RolloutState.SKIPPED, RolloutState.FAILED)
    part = sum(row.state in over for row in rollouts) / len(rollouts) if ongoing and rollouts else 0.0
    return left + bar((view.made + part) / max(1, view.max_steps), room, colour, "━", "─") + right


def _group_counts(view: RunView) -> Text:
    if not view.groups:
        return Text()
    closed = sum(group.closed for group in view.groups.values())
    return Text(f"{closed} of {len(view.groups)} closed", DIM)


def _engines(view: RunView, inner: int) -> Text:
    gauges = view.gauges
    if gauges is None or view.finished is not None:
        return _machine("engines", view.share("engine_busy"), inner, SKY, "")
    tokens = f"{gauges.tokens_per_s:,.0f} tok/s".replace(",", " ")
    facts = f"▸ {gauges.generate_running} generating  $ {gauges.tools_running} tools  {tokens}"
    return _machine("engines", gauges.engine_busy, inner, SKY, facts)


def _trainer(view: RunView, inner: int) -> Text:
    gauges = view.gauges
    if gauges is None or view.finished is not None:
        return _machine("trainer", view.share("trainer_busy"), inner, PURPLE, "")
    tokens = sum(each.tokens for each in view.passes.values())
    now = f"◆ {tokens:,} tokens".replace(",", " ") if view.passes else "◆ idle"
    queue = view.count(RolloutState.QUEUED)
    facts = f"{now}  ◇ {queue} queued  {gauges.open_slots} open slots"
    return _machine("trainer", gauges.trainer_busy, inner, PURPLE, facts)


def _machine(name: str, busy: float | None, inner: int, colour: str, facts: str) -> Text:
    line = Text.assemble((f"{name}  ", "bold"), bar(busy or 0.0, max(8, min(40, inner - 62)), colour, "█", "░"))
    line.append(f" {busy:4.0%}" if busy is not None and math.isfinite(busy) else "    –", f"bold {colour}")
    return line.append(f"  {facts}")


def chart_legend(view: RunView) -> Text:
    """What the chart's shapes mean, and the evaluations so far."""
    line = Text.assemble(("█", BLUE), (" train", DIM))
    if view.evals:
        first, last = view.evals[0], view.evals[-1]
        line.append("  ◉", f"bold {ORANGE}").append(" eval ", DIM).append(f"{first.reward_mean:.2f}", ORANGE)
        if last is not first:
            line.append(" → ", DIM).append(f"{last.reward_mean:.2f}", f"bold {ORANGE}")
    return line


def chart(view: RunView, inner: int, rows: int) -> list[Text]:
    """The reward of every commit, and of the evaluations: `rows` lines of `inner` cells."""
    values = view.curve()
    total = max(view.max_steps, view.made, 1)
    offset = max(0, view.made - len(values))
    known = [value for value in [*values, *(each.reward_mean for each in view.evals)] if abs(value) < 1e12]
    low, high = min([0.0, *known]), max(known, default=1.0)
    # A scale that jumps rarely: the picture of a step should still be true in the next one.
    high = next((top for top in (0.25, 0.5, 1.0) if high <= top), high)
    room = inner - 7
    bars = columns(values, total=total, offset=offset, width=room, rows=rows, low=low, high=high)
    marks: set[tuple[int, int]] = set()
    for each in view.evals:
        if low <= each.reward_mean <= high:
            row = min(rows - 1, int((each.reward_mean - low) / (high - low) * rows))
            marks.add((rows - 1 - row, min(room - 1, place(each.policy_version, total=total, width=room)[0])))
    lines = []
    for index, cells in enumerate(bars):
        label = f"{high:5.2f} ┤" if index == 0 else f"{low:5.2f} ┤" if index == rows - 1 else "      │"
        marked = (
            ("◉", f"bold {ORANGE}") if (index, column) in marks else (cell, DIM if cell == "·" else BLUE)
            for column, cell in enumerate(cells)
        )
        line = Text().append(label, DIM).append_text(strip(marked))
        lines.append(line)
    return lines


def _last_commit(view: RunView) -> Text:
    if not view.commits:
        return Text("no commit yet", DIM)
    commit = view.commits[-1]
    return Text.assemble(("commit ", DIM), (f"{view.made}", "bold"), f"  {commit_facts(commit.metrics, commit.empty)}")


def commit_facts(metrics: dict[str, float], empty: bool) -> str:
    """A commit's metrics in one line; what is missing is left out."""
    forms = (
        ("reward_mean", "reward {:.2f}"),
        ("reward_std", "±{:.2f}"),
        ("step_s", " {:.1f}s"),
        ("tokens", " {:.0f} tokens"),
        ("grad_norm", " grad {:.2g}"),
        ("mismatch_mean", " mismatch {:.2g}"),
    )
    facts = " ".join(form.format(metrics[key]) for key, form in forms if math.isfinite(metrics.get(key, math.nan)))
    return f"{facts}  empty: no update" if empty else facts


def _last_warning(view: RunView) -> Text | None:
    if view.finished is not None and not view.finished.ok:
        return Text(f"× {one_line(view.finished.reason)}", f"bold {RED}")
    return Text(f"! {one_line(view.warnings[-1].text)}", YELLOW) if view.warnings else None


def _legend() -> Text:
    parts = [Text.assemble((glyph, style), (word, DIM)) for glyph, style, word in GLYPHS.values()]
    return Text(" ").join(parts)


def _label(word: str) -> Text:
    return Text(word, "bold")
