"""What happened in a measured step, read off its events: when it generated, when it learned, when nothing moved.

The same events as a viewer sees; knows nothing of how they came about.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from thundersync.monitor import events as e

Span = tuple[float, float]
"""From, to; seconds since the step opened."""


class Timeline(Struct, frozen=True, kw_only=True):
    """One step. Seconds since it opened."""

    step_s: float
    """To the last engine that has the new weights."""
    first_prompt_s: float
    """The first rollout's prompt was in an engine."""
    generated_s: float
    """The last token was sampled."""
    released_s: float
    """The last reward (or score) landed."""
    learned_s: float
    """The last pass ended."""
    turns: list[Span]
    """Each turn, from prompt to reply."""
    passes: list[list[Span]]
    """Of each worker."""

    @property
    def generating_s(self) -> float:
        """Seconds with a turn in an engine."""
        return covered_s(self.turns)

    @property
    def learning_s(self) -> float:
        """Seconds of passes, all workers' together."""
        return sum(covered_s(spans) for spans in self.passes)


class Watch:
    """Collects the events of one step at a time."""

    def __init__(self) -> None:
        self.events: list[e.AnyEvent] = []

    def see(self, event: e.AnyEvent) -> None:
        if isinstance(event, e.StepOpened):
            self.events.clear()
        self.events.append(event)

    def timeline(self, *, began_s: float, step_s: float, workers: int) -> Timeline:
        """Of the step seen last; it began at `began_s` (Unix time) and took `step_s`."""
        begun: dict[tuple[str, int], float] = {}
        passed: dict[int, float] = {}
        turns: list[Span] = []
        passes: list[list[Span]] = [[] for _ in range(workers)]
        released_s = 0.0
        for event in self.events:
            at_s = event.at_s - began_s
            match event:
                case e.TurnStarted():
                    begun[event.rollout_id, event.turn] = at_s
                case e.TurnGenerated():
                    turns.append((begun[event.rollout_id, event.turn], at_s))
                case e.RolloutScored() | e.TurnScored() | e.RolloutFailed():
                    released_s = max(released_s, at_s)
                case e.PassStarted():
                    passed[event.pass_id] = at_s
                case e.PassDone():
                    passes[event.worker].append((passed[event.pass_id], at_s))
                case _:
                    pass
        return Timeline(
            step_s=step_s,
            first_prompt_s=min((start for start, _ in turns), default=0.0),
            generated_s=max((end for _, end in turns), default=0.0),
            released_s=released_s,
            learned_s=max((end for spans in passes for _, end in spans), default=0.0),
            turns=sorted(turns),
            passes=passes,
        )


def covered_s(spans: Sequence[Span]) -> float:
    """Length of their union."""
    total = end_s = 0.0
    for start, end in sorted(spans):
        if end > end_s:
            total += end - max(start, end_s)
            end_s = end
    return total
