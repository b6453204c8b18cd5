"""The seven views by name, each drawn to fit. Pure; the app shows what comes out."""

from collections.abc import Callable

from thundersync.monitor.app.boxes import boxes
from thundersync.monitor.app.conversation import conversation
from thundersync.monitor.app.engines import engines
from thundersync.monitor.app.known import Known, Lines
from thundersync.monitor.app.news import news
from thundersync.monitor.app.open_groups import open_groups
from thundersync.monitor.app.overlap import overlap
from thundersync.monitor.app.overview import overview
from thundersync.monitor.shapes import padded

_DRAW: dict[str, Callable[[Known, int, int, float], Lines]] = {
    "overview": overview,
    "overlap": overlap,
    "groups": open_groups,
    "rollout": conversation,
    "engines": engines,
    "sandboxes": boxes,
    "warnings": news,
}


def drawn(view: str, known: Known, *, width: int, height: int, now_s: float) -> Lines:
    """A view as at most `height` lines of exactly `width` cells. `now_s` is Unix time."""
    return [padded(line, width) for line in _DRAW[view](known, width, height, now_s)[:height]]
