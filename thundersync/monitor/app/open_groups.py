"""Groups and open slots: which groups the step has, how far each is, and the rollouts of the chosen one. Pure."""

import math

from rich.text import Text

from thundersync.core.types import RolloutId
from thundersync.monitor.app.known import Known, Lines
from thundersync.monitor.groups import group_line
from thundersync.monitor.panel import span
from thundersync.monitor.shapes import BLUE, DIM, GLYPHS, GREEN, LINE, PURPLE, fit, padded
from thundersync.monitor.state import GroupRow, RolloutRow
from thundersync.monitor.timeline import Lane


def open_groups(known: Known, width: int, height: int, now_s: float) -> Lines:
    """`height` lines of at most `width` cells: the groups above, the chosen one's rollouts below."""
    groups = list(known.view.groups.values())
    if not groups:
        return [Text("no step has begun yet", DIM)]
    cursor = known.cursor
    cursor.group = max(0, min(cursor.group, len(groups) - 1))
    chosen = groups[cursor.group]
    cursor.member = max(0, min(cursor.member, len(chosen.rollouts) - 1))
    room = max(1, min(len(groups), (height - 6) // 2))
    first = max(0, min(cursor.group - room // 2, len(groups) - room))
    lines = [_slots(known, groups)]
    for index, group in enumerate(groups[first : first + room], start=first):
        here = index == cursor.group
        lines.append(Text().append("› " if here else "  ", f"bold {GREEN}").append_text(group_line(group, width - 2)))
    if room < len(groups):
        lines.append(Text(f"  {first + 1} to {first + room} of {len(groups)}", DIM))
    lines += [_rule(chosen, width), Text(_row("", *_WORDS), DIM)]
    rows = max(1, height - len(lines))
    start = max(0, min(cursor.member - rows // 2, len(chosen.rollouts) - rows))
    for index, (name, row) in list(enumerate(chosen.rollouts.items()))[start : start + rows]:
        lines.append(_member(known, name, row, index == cursor.member, width, now_s))
    return lines


_WORDS = ("rollout", "", "is at", "for", "turns", "tokens", "reward", "ended by")


def _row(mark: str, *cells: str) -> str:
    widths = (10, 2, 11, 9, 7, 9, 9, 14)
    left = (True, True, True, False, False, False, False, True)
    return f"{mark:<2}" + "".join(
        f"{cell:<{room}}" if to_left else f"{cell:>{room - 2}}  "
        for cell, room, to_left in zip(cells, widths, left, strict=True)
    )


def _slots(known: Known, groups: list[GroupRow]) -> Text:
    closed = sum(group.closed for group in groups)
    line = Text.assemble((f"{closed}", "bold"), (f" of {len(groups)} groups closed", DIM))
    gauges = known.view.gauges
    if gauges is not None and known.view.step is not None:
        line.append("   ◆ ", PURPLE).append(f"{gauges.open_slots}", "bold").append(
            " gradient parts of open groups", DIM
        )
        line.append("   ◇ ", PURPLE).append(f"{gauges.queue_pieces}", "bold").append(" pieces waiting", DIM)
    return line


def _rule(group: GroupRow, width: int) -> Text:
    line = Text().append("── ", LINE).append(group.task_id, "bold").append(" ")
    line.truncate(width - 4, overflow="ellipsis")
    return line.append("─" * max(0, width - line.cell_len), LINE)


def _member(known: Known, name: RolloutId, row: RolloutRow, here: bool, width: int, now_s: float) -> Text:
    shape, style, word = GLYPHS[row.state]
    latest = known.latest
    lane = latest.lanes.get(name) if latest is not None else None
    line = Text().append("› " if here else "  ", f"bold {GREEN}").append(fit(name.partition("-")[2], 10))
    line.append(f"{shape} ", style).append(f"{word:<11}", style)
    line.append(f"{_since(known, lane, now_s):>7}  ", DIM).append(f"{lane.turns if lane else row.turn:>5}  ")
    line.append(f"{lane.sampled_tokens if lane and lane.sampled_tokens else '–':>7}  ", DIM)
    known_reward = row.reward is not None and math.isfinite(row.reward)
    line.append(f"{row.reward:7.2f}  " if known_reward else "      –  ", f"bold {BLUE}" if known_reward else DIM)
    return padded(line.append(lane.stop if lane else "", DIM), width)


def _since(known: Known, lane: Lane | None, now_s: float) -> str:
    if lane is None or not lane.marks or known.view.step is None:
        return ""
    return span(max(0.0, known.moment_s(now_s) - lane.marks[-1][0]))
