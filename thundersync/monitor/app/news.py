"""Warnings and failures, newest at the bottom. A view of the app, pure."""

import textwrap
import time

from rich.text import Text

from thundersync.monitor.app.known import Known, Lines
from thundersync.monitor.shapes import DIM, GREEN, RED, YELLOW, one_line


def news(known: Known, width: int, height: int, now_s: float) -> Lines:
    """`height` lines of at most `width` cells."""
    told = [(each.at_s, "!", YELLOW, each.text) for each in known.view.warnings]
    for failure in known.failures:
        fate = "retried" if failure.will_retry else "given up"
        text = f"rollout {failure.rollout_id} failed, {fate}: {failure.failure}: {failure.detail}"
        told.append((failure.at_s, "↻" if failure.will_retry else "×", RED, text))
    end = known.view.finished
    if end is not None and not end.ok:
        told.append((end.at_s, "×", f"bold {RED}", f"the run stopped: {end.reason}"))
    if not told:
        return [Text("● nothing to warn of", GREEN)]
    lines = []
    for at_s, shape, style, text in sorted(told):
        clock = time.strftime("%H:%M:%S", time.localtime(at_s))
        for index, piece in enumerate(textwrap.wrap(one_line(text), max(20, width - 12)) or [""]):
            head = Text.assemble((clock, DIM), (f" {shape} ", style)) if index == 0 else Text(" " * 11)
            lines.append(head.append(piece))
    known.cursor.warning = max(0, min(known.cursor.warning, len(lines) - height))
    end_at = len(lines) - known.cursor.warning
    return lines[max(0, end_at - height) : end_at]
