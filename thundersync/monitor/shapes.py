"""What the panel is drawn with: colours, a shape per state, lines, bars and frames of exactly one width.

Every state has a shape and a colour of its own (Okabe and Ito's, told apart by colour-blind eyes), so either alone is
enough. Knows nothing of runs.
"""

import math
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.text import Text

from thundersync.monitor.state import RolloutState

SKY, ORANGE, GREEN, YELLOW, BLUE, RED, PURPLE = (
    "#56b4e9", "#e69f00", "#2bb583", "#f0e442", "#4f9be8", "#ff7a3d", "#d68fb8",
)  # fmt: skip  # fmt: skip
DIM, LINE = "#8a8f98", "#5c6370"

GLYPHS: dict[RolloutState, tuple[str, str, str]] = {
    RolloutState.WAITING: ("·", DIM, "wait"),
    RolloutState.GENERATING: ("▸", SKY, "generate"),
    RolloutState.TOOL: ("$", ORANGE, "tool"),
    RolloutState.SCORING: ("?", YELLOW, "score"),
    RolloutState.QUEUED: ("◇", PURPLE, "queue"),
    RolloutState.BACKWARD: ("◆", f"bold {PURPLE}", "backward"),
    RolloutState.DONE: ("●", GREEN, "done"),
    RolloutState.SKIPPED: ("=", DIM, "flat"),
    RolloutState.FAILED: ("×", f"bold {RED}", "fail"),
    RolloutState.RETRY: ("↻", RED, "retry"),
}


class Frame:
    """Finished lines. They fit already, so they go out as they are: rich's wrapping would double the cost."""

    def __init__(self, lines: list[Text]) -> None:
        self.lines = lines

    @property
    def plain(self) -> str:
        return "\n".join(line.plain for line in self.lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines:
            yield from line.render(console)
            yield Segment.line()


def bar(share: float, width: int, colour: str, full: str, empty: str) -> Text:
    filled = round(min(1.0, max(0.0, share if math.isfinite(share) else 0.0)) * width)
    return Text.assemble((full * filled, colour), (empty * (width - filled), LINE))


def strip(cells: Iterable[tuple[str, str]]) -> Text:
    """Cells (character, style) as one line; neighbours of one style go together, which draws ten times faster."""
    line = Text()
    for style, same in groupby(cells, key=itemgetter(1)):
        line.append("".join(character for character, _ in same), style)
    return line


def rule(left: Text, width: int, ends: str, *, right: Text | None = None) -> Text:
    """A horizontal line with words in it; the right ones are cut first."""
    line = Text().append(f"{ends[0]}─", LINE)
    if left.plain:
        left.truncate(width - 8, overflow="ellipsis")
        line.append(" ").append_text(left).append(" ")
    tail = Text().append(f"─{ends[1]}", LINE)
    room = width - line.cell_len - tail.cell_len
    if right is not None and right.plain and room >= 8:
        right.truncate(room - 4, overflow="ellipsis")
        tail = Text.assemble(" ", right, " ", tail)
    return line.append("─" * (width - line.cell_len - tail.cell_len), LINE).append_text(tail)


def boxed(line: Text, width: int) -> Text:
    return Text.assemble(("│ ", LINE), padded(line, width - 4), (" │", LINE))


def padded(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis", pad=True)
    return line


def fit(word: str, width: int) -> str:
    text = Text(one_line(word))
    text.truncate(width, overflow="ellipsis", pad=True)
    return text.plain


def one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
