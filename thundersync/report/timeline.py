"""The events of one step as lanes: who did what, from when to when.

Between a run's record and whatever draws it, a page or a trace. Pure: events in, spans out; any event may be missing,
as when a run was killed, and what was open then ends with the last thing heard. All times are seconds since the step
opened. Knows nothing of pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from thundersync.core.types import rollout_id
from thundersync.monitor.events import (
    AnyEvent,
    GroupClosed,
    PassDone,
    PassStarted,
    RolloutFailed,
    RolloutScored,
    RolloutSeated,
    RolloutSkipped,
    RolloutStarted,
    ScoringStarted,
    StepCommitted,
    StepOpened,
    ToolFinished,
    ToolStarted,
    TurnAborted,
    TurnGenerated,
    TurnScored,
    TurnStarted,
    WeightsPublished,
)

Kind: TypeAlias = Literal["prepare", "generate", "tool", "score", "queue", "backward", "retry", "teacher"]
KINDS: tuple[Kind, ...] = ("prepare", "generate", "tool", "score", "queue", "backward", "retry", "teacher")
"""prepare = a sandbox is made ready; score = the checker runs; queue = the reward is known, the trainer elsewhere;
retry = the pause after a failed attempt; teacher = a teacher scores a turn."""


class Span(NamedTuple):
    kind: Kind
    start_s: float
    end_s: float
    note: str = ""
    """A command's first line, a turn's tokens: what a reader wants to know of it."""


@dataclass
class Lane:
    """One rollout."""

    rollout_id: str
    group_id: str
    task_id: str
    spans: list[Span] = field(default_factory=list)
    """In order and one after another: what the rollout itself was at."""
    backward: list[Span] = field(default_factory=list)
    """May overlap `spans`: gradients that are held begin while the checker runs, a turn's while the next is sampled."""
    teacher: list[Span] = field(default_factory=list)
    replies: list[Span] = field(default_factory=list)
    """Each turn's generation by itself: those that are sampled side by side overlap."""
    engine: int = 0
    attempts: int = 0
    reward: float | None = None
    state: Literal["open", "scored", "skipped", "failed"] = "open"
    turns: int = 0


class Work(NamedTuple):
    """One pass of a trainer worker."""

    start_s: float
    end_s: float
    tokens: int
    rollout_ids: list[str]


@dataclass
class Group:
    group_id: str
    task_id: str
    closed_s: float | None = None
    flat: bool = False
    dropped: bool = False


@dataclass
class StepTimeline:
    step: int
    policy_version: int
    opened_s: float
    """Unix time."""
    lanes: list[Lane]
    groups: list[Group]
    workers: dict[int, list[Work]] = field(default_factory=dict)
    commit: tuple[float, float] | None = None
    publish: tuple[float, float] | None = None
    seconds: float = 0.0
    """To the end of its publish, or to the last event of a step that was never committed."""
    committed: bool = False

    @property
    def engines(self) -> dict[int, list[Span]]:
        """By engine: the turns it generated."""
        found: dict[int, list[Span]] = {}
        for lane in self.lanes:
            found.setdefault(lane.engine, []).extend(lane.replies)
        return dict(sorted(found.items()))


class TimeShares(NamedTuple):
    """Seconds of a step by what was going on; they add up to the step."""

    both: float
    """Rollouts ran while the trainer learned: the overlap that streaming is for."""
    rollouts: float
    """They alone: generation, tools, checkers."""
    learning: float
    commit: float
    """Commit and publish, after the last of both."""
    neither: float
    """Groups being closed, and messages on their way."""


def step_timeline(events: Iterable[AnyEvent]) -> StepTimeline | None:
    """The lanes of the step that `events` open; None where they open none."""
    reader: _Reader | None = None
    for event in events:
        if isinstance(event, StepOpened):
            reader = _Reader(event)
        elif reader is not None:
            reader.take(event)
    return reader.finish() if reader is not None else None


def shares(timeline: StepTimeline) -> TimeShares:
    """What a step's time went to."""
    rollouts = union((s.start_s, s.end_s) for lane in timeline.lanes for s in lane.spans if s.kind != "queue")
    learning = union((work.start_s, work.end_s) for passes in timeline.workers.values() for work in passes)
    both = both_of(rollouts, learning)
    rollouts_s, learn_s = length(rollouts), length(learning)
    after = [span for span in (timeline.commit, timeline.publish) if span is not None]
    commit = sum(end - start for start, end in after)
    busy = rollouts_s + learn_s - both + commit
    return TimeShares(both, rollouts_s - both, learn_s - both, commit, max(0.0, timeline.seconds - busy))


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times as intervals that are in order and apart."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def running(spans: Iterable[Span]) -> list[tuple[float, int]]:
    """(time, how many of `spans` are going on from then), at every time at which that changes."""
    changes: dict[float, int] = {}
    for span in spans:
        if span.end_s > span.start_s:
            changes[span.start_s] = changes.get(span.start_s, 0) + 1
            changes[span.end_s] = changes.get(span.end_s, 0) - 1
    count, steps = 0, []
    for at in sorted(changes):
        if changes[at]:
            count += changes[at]
            steps.append((at, count))
    return steps


def both_of(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> float:
    """Seconds that lie in both; each is in order and apart, as `union` gives it."""
    seconds, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        seconds += max(0.0, end - start)
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return seconds


def length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


class _Reader:
    """One step's events, one after another."""

    def __init__(self, opened: StepOpened) -> None:
        self._from_s = opened.at_s
        self._last_s = 0.0
        tasks = list(zip(opened.group_ids, opened.task_ids, strict=False))
        self._lanes = {
            (name := rollout_id(group, index)): Lane(name, group, task)
            for group, task in tasks
            for index in range(opened.group_size)
        }
        self._groups = {group: Group(group, task) for group, task in tasks}
        self._timeline = StepTimeline(
            opened.step, opened.policy_version, opened.at_s, list(self._lanes.values()), list(self._groups.values())
        )
        self._open: dict[str, tuple[Kind, float, str]] = {}
        """What each rollout is at: kind, since when, note."""
        self._turns: dict[str, dict[int, float]] = {}
        """The turns that each rollout has open, and since when: a program may ask for several replies at once."""
        self._passes: dict[tuple[int, int], tuple[float, PassStarted]] = {}

    def take(self, event: AnyEvent) -> None:
        at = event.at_s - self._from_s
        if isinstance(event, StepCommitted):
            self._commit(event, at)
            return
        if isinstance(event, PassStarted):
            self._pass(event, at)
        elif isinstance(event, PassDone):
            self._pass_done(event, at)
        elif isinstance(event, GroupClosed) and event.group_id in self._groups:
            group = self._groups[event.group_id]
            group.closed_s, group.flat, group.dropped = at, event.flat, event.dropped
        elif isinstance(event, WeightsPublished):
            self._timeline.publish = (max(0.0, at - event.publish_s), at)
        elif (lane := self._lanes.get(getattr(event, "rollout_id", ""))) is not None:
            self._rollout(lane, event, at)
        else:
            return  # of an evaluation, or of no step: a gauge, a warning, a checkpoint
        self._last_s = max(self._last_s, at)

    def finish(self) -> StepTimeline:
        timeline = self._timeline
        for lane in timeline.lanes:
            self._end_turns(lane, self._last_s)
            self._turn_to(lane, None, self._last_s)
        for began, started in self._passes.values():
            self._worked(started, began, self._last_s)
        if not timeline.committed:
            timeline.seconds = self._last_s
            timeline.publish = None
        return timeline

    def _rollout(self, lane: Lane, event: AnyEvent, at: float) -> None:
        turns = self._turns.setdefault(lane.rollout_id, {})
        if isinstance(event, RolloutStarted | ScoringStarted | RolloutScored | RolloutFailed | RolloutSkipped):
            self._end_turns(lane, at)  # what a limit or an error cut off
        match event:
            case RolloutSeated(engine=engine):
                lane.engine = engine
            case RolloutStarted():
                lane.attempts += 1
                lane.turns = 0
                self._turn_to(lane, "prepare", at)
            case TurnStarted(turn=turn):
                if not turns:
                    self._turn_to(lane, "generate", at, f"turn {turn + 1}")
                turns[turn] = at
            case TurnGenerated(turn=turn):
                lane.turns += 1
                note = f"turn {turn + 1}: {event.sampled_tokens} tokens sampled after {event.prompt_tokens}"
                self._end_turn(lane, turns, turn, at, note)
            case TurnAborted(turn=turn):
                self._end_turn(lane, turns, turn, at, f"turn {turn + 1}: aborted")
            case ToolStarted(command=command):
                self._turn_to(lane, "tool", at, command.strip().partition("\n")[0][:80])
            case ToolFinished():
                left = min(turns, default=None)
                self._turn_to(lane, None if left is None else "generate", at, _turn_note(left))
            case TurnScored(held=False):
                note = f"turn {event.turn + 1}: {event.tokens} tokens"
                lane.teacher.append(Span("teacher", max(0.0, at - event.score_s), at, note))
            case ScoringStarted():
                self._turn_to(lane, "score", at)
            case RolloutScored(reward=reward):
                lane.reward, lane.state = reward, "scored"
                self._turn_to(lane, None if lane.backward else "queue", at)
            case RolloutFailed(will_retry=True):
                self._turn_to(lane, "retry", at, event.failure)
            case RolloutFailed():
                lane.state = "failed"
                self._turn_to(lane, None, at)
            case RolloutSkipped():
                lane.state = "skipped"
                self._turn_to(lane, None, at)
            case _:
                pass

    def _turn_to(self, lane: Lane, kind: Kind | None, at: float, then: str = "", *, note: str = "") -> None:
        """End what the rollout is at, and begin `kind`."""
        before = self._open.pop(lane.rollout_id, None)
        if before is not None and at > before[1]:
            lane.spans.append(Span(before[0], before[1], at, note or before[2]))
        if kind is not None:
            self._open[lane.rollout_id] = (kind, at, then)

    def _end_turn(self, lane: Lane, turns: dict[int, float], turn: int, at: float, note: str) -> None:
        """`turns`: those that the lane has open."""
        if turn in turns:
            lane.replies.append(Span("generate", turns.pop(turn), at, note))
        if self._open.get(lane.rollout_id, ("generate",))[0] == "generate":  # not while a command runs beside it
            left = min(turns, default=None)
            self._turn_to(lane, None if left is None else "generate", at, _turn_note(left), note=note)

    def _end_turns(self, lane: Lane, at: float) -> None:
        for turn, since in self._turns.pop(lane.rollout_id, {}).items():
            lane.replies.append(Span("generate", since, at, _turn_note(turn)))

    def _pass(self, event: PassStarted, at: float) -> None:
        self._passes[event.worker, event.pass_id] = (at, event)
        for name in event.rollout_ids:
            if self._open.get(name, ("",))[0] == "queue":
                self._turn_to(self._lanes[name], None, at)

    def _pass_done(self, event: PassDone, at: float) -> None:
        began = self._passes.pop((event.worker, event.pass_id), None)
        if began is not None:
            self._worked(began[1], began[0], at)

    def _worked(self, started: PassStarted, began: float, at: float) -> None:
        self._timeline.workers.setdefault(started.worker, []).append(
            Work(began, at, started.tokens, started.rollout_ids)
        )
        for name in started.rollout_ids:
            if (lane := self._lanes.get(name)) is not None:
                lane.backward.append(Span("backward", began, at, f"worker {started.worker}"))

    def _commit(self, event: StepCommitted, at: float) -> None:
        timeline = self._timeline
        timeline.committed, timeline.seconds = True, at
        until = timeline.publish[0] if timeline.publish is not None else at
        commit_s = event.metrics.get("commit_s", 0.0)
        last = max((work.end_s for passes in timeline.workers.values() for work in passes), default=0.0)
        if commit_s > 0.0:
            timeline.commit = (max(last, until - commit_s), until)


def _turn_note(turn: int | None) -> str:
    return "" if turn is None else f"turn {turn + 1}"
