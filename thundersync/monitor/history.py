"""What a late viewer must be told to know as much as one that was there from the start, and no more.

Between the feed and its snapshots. It keeps packed events and knows nothing of sockets; `RunView` over a history
equals `RunView` over every event (a test holds this).
"""

from collections.abc import Hashable, Iterator

from thundersync.monitor.events import (
    CheckpointSaved,
    Event,
    Gauges,
    GroupClosed,
    HistoryForked,
    PassDone,
    PassStarted,
    RolloutFailed,
    RolloutScored,
    RolloutSeated,
    RolloutSkipped,
    RolloutStarted,
    SandboxStarted,
    ScoringStarted,
    StepCommitted,
    StepOpened,
    ToolFinished,
    ToolStarted,
    TurnAborted,
    TurnGenerated,
    TurnScored,
    TurnStarted,
    Warned,
    WeightsPublished,
)

_IN_STEP = (
    StepOpened | RolloutStarted | TurnStarted | TurnGenerated | ToolStarted | ToolFinished | TurnScored | ScoringStarted
    | RolloutScored | RolloutFailed | RolloutSeated | PassStarted | PassDone | RolloutSkipped | GroupClosed
    | HistoryForked | SandboxStarted | TurnAborted
)  # fmt: skip
"""Kinds that say nothing any more once the next step opens."""


class History:
    """Numbered events, of which the superseded ones are forgotten."""

    def __init__(self, *, commits: int = 10_000, warnings: int = 50) -> None:
        """The most commits and warnings kept; what one open step says is bounded by its rollouts."""
        self._limits: dict[type[Event], int] = {StepCommitted: commits, Warned: warnings}
        self._step: dict[Hashable, tuple[int, bytes]] = {}
        self._run: dict[Hashable, tuple[int, bytes]] = {}

    def add(self, number: int, event: Event, packed: bytes) -> None:
        """Numbers rise."""
        if isinstance(event, StepOpened):
            self._step.clear()
        kept = self._step if isinstance(event, _IN_STEP) else self._run
        key = _key(event, number)
        kept.pop(key, None)  # so that the newer one takes its place at the end, in order
        kept[key] = (number, packed)
        limit = self._limits.get(type(event))
        if limit is not None:
            same = [other for other in kept if isinstance(other, tuple) and other[0] is type(event)]
            for other in same[: max(0, len(same) - limit)]:
                del kept[other]

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """What is kept, by number."""
        return iter(sorted([*self._run.values(), *self._step.values()]))


def _key(event: Event, number: int) -> Hashable:
    """Events with equal keys supersede each other."""
    match event:
        case Gauges() | WeightsPublished() | CheckpointSaved():
            return type(event)
        case TurnStarted() | TurnGenerated() | TurnAborted() | ToolStarted() | ToolFinished() | TurnScored():
            return ("turn", event.rollout_id)
        case PassStarted() | PassDone():
            return ("pass", event.worker, event.pass_id)
        case _:
            return (type(event), number)
