"""A bar chart in block characters. Numbers in, rows of single-cell characters out; no colours, no library."""

import statistics
from collections.abc import Sequence

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def columns(
    values: Sequence[float], *, total: int, offset: int, width: int, rows: int, low: float, high: float
) -> list[str]:
    """`rows` strings of `width` cells, the top one first: a bar per value, from `low` to `high`.

    The width stands for `total` values, of which `values` are those from `offset` on, so the chart fills as a run goes.
    With more values than cells a bar is the mean of its values. Places still to come show a dot at the bottom.
    """
    bins: list[list[float]] = [[] for _ in range(width)]
    reached = 0
    for index, value in enumerate(values, start=offset):
        first, reached = place(index, total=total, width=width)
        # A gap sets wide bars apart; narrow ones would lose too much.
        for cell in range(first, min(width, reached - (reached - first >= 3))):
            if abs(value) < 1e12:  # NaN and infinity are no bars
                bins[cell].append(value)
    end = place(total - 1, total=total, width=width)[1]
    grid = [[" "] * width for _ in range(rows)]
    for cell, inside in enumerate(bins):
        if not inside:
            grid[-1][cell] = "·" if reached <= cell < end else " "
            continue
        share = min(1.0, max(0.0, (statistics.fmean(inside) - low) / (high - low)))
        eighths = max(1, round(share * rows * 8))
        for row in range(rows):
            grid[rows - 1 - row][cell] = _EIGHTHS[min(8, max(0, eighths - row * 8))]
    return ["".join(line) for line in grid]


def place(index: int, *, total: int, width: int) -> tuple[int, int]:
    """First cell of a value, and the one after its last: all equally wide, or, where cells are few, shared."""
    each = width // total
    return (index * each, index * each + each) if each else (index * width // total, index * width // total + 1)
