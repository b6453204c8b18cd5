"""The rows of the panel's group table: one group a line, a shape and a reward bar per rollout.

Knows nothing of the rest of the panel.
"""

import math
import statistics
from collections import Counter

from rich.text import Text

from thundersync.monitor.shapes import BLUE, DIM, GLYPHS, GREEN, RED, fit, padded
from thundersync.monitor.state import GroupRow, RolloutState, RunView

_LEVELS = "▁▂▃▄▅▆▇█"


def group_lines(view: RunView, inner: int, rows: int) -> list[Text]:
    if not view.groups:
        text = "loading the model, preparing the sandboxes" if view.phase == "starting" else "no step is open"
        return [Text(text, DIM)]
    groups, rest = list(view.groups.values()), Counter[str]()
    if len(groups) > rows:
        # The ones where something happens are shown, in their own order; the others are counted.
        ranked = sorted(range(len(groups)), key=lambda index: (_quiet(groups[index]), index))
        shown = sorted(ranked[: rows - 1])
        rest = Counter(("moving", "waiting", "closed")[_quiet(groups[index])] for index in ranked[rows - 1 :])
        groups = [groups[index] for index in shown]
    lines = [group_line(group, inner) for group in groups]
    if rest:
        text = ", ".join(f"{count} {word}" for word, count in rest.items())
        lines.append(Text(f"and {rest.total()} more: {text}", DIM))
    return lines


def _quiet(group: GroupRow) -> int:
    if group.closed:
        return 2
    return int(all(row.state is RolloutState.WAITING for row in group.rollouts.values()))


def group_line(group: GroupRow, inner: int) -> Text:
    """One group: its task, a shape per rollout, their rewards."""
    name = max(12, min(26, inner - 50))
    strip = max(8, (inner - name - 26) // 2)
    line = Text().append(fit(group.task_id, name), DIM if group.closed else "")
    line.append("  ").append_text(_states(group, strip)).append("  ").append_text(_rewards(group, strip)).append("  ")
    rewards = group.rewards
    line.append(f"{statistics.fmean(rewards):6.2f}" if rewards else "     –", "bold" if group.closed else DIM)
    return line.append("  ").append_text(_verdict(group))


def _states(group: GroupRow, room: int) -> Text:
    rows = list(group.rollouts.values())
    line = Text()
    if len(rows) <= room:
        for row in rows:
            line.append(GLYPHS[row.state][0], GLYPHS[row.state][1])
    else:
        for state, count in Counter(row.state for row in rows).most_common():
            part = Text(f"{GLYPHS[state][0]}{count} ", GLYPHS[state][1])
            if line.cell_len + part.cell_len <= room + 1:
                line.append_text(part)
    return padded(line, min(room, max(8, len(rows))))


def _rewards(group: GroupRow, room: int) -> Text:
    rows = list(group.rollouts.values())
    if len(rows) > room:
        rewards = group.rewards
        text = f"{min(rewards):.2f} to {max(rewards):.2f}" if rewards else ""
        return padded(Text(text, BLUE), min(room, len(rows)))
    low, high = min([0.0, *group.rewards]), max([1.0, *group.rewards])
    line = Text()
    for row in rows:
        if row.reward is None or not math.isfinite(row.reward):
            line.append(" ")
        else:
            line.append(_LEVELS[round((row.reward - low) / (high - low) * 7)], BLUE)
    return padded(line, min(room, max(8, len(rows))))


def _verdict(group: GroupRow) -> Text:
    if group.dropped:
        return Text("× dropped", RED)
    if group.flat:
        return Text("= flat", DIM)
    if group.closed:
        return Text("✓ closed", GREEN)
    turns = [row.turn for row in group.rollouts.values() if row.state in (RolloutState.GENERATING, RolloutState.TOOL)]
    if not turns:
        return Text()
    first, last = min(turns) + 1, max(turns) + 1
    return Text(f"turn {first}" if first == last else f"turn {first}–{last}", DIM)
