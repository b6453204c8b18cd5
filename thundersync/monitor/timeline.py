"""Steps as lanes of time: what every rollout, engine and trainer worker was doing when. Events in, spans out.

Between the client and whatever draws the overlap. Applying an event twice, or late, changes nothing more: a viewer may
hear the end of a step first and read its beginning afterwards. Knows nothing of screens, sockets or files.
"""

import bisect
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import Struct

from thundersync.core.types import GroupId, RolloutId, rollout_id
from thundersync.monitor.events import (
    Event,
    Gauges,
    GroupClosed,
    PassDone,
    PassStarted,
    RolloutFailed,
    RolloutScored,
    RolloutSeated,
    RolloutSkipped,
    RolloutStarted,
    RunFinished,
    RunStarted,
    SandboxStarted,
    ScoringStarted,
    StepCommitted,
    StepOpened,
    ToolFinished,
    ToolStarted,
    TurnAborted,
    TurnGenerated,
    TurnStarted,
    WeightsPublished,
)

STEPS_KEPT = 24
"""Steps a viewer holds in memory; older ones are read again when somebody looks."""


class Doing(StrEnum):
    """What a rollout is at, moment by moment."""

    WAIT = "wait"
    """For a place, or between two turns."""
    START = "start"
    """Its sandbox starts and is prepared."""
    GENERATE = "generate"
    TOOL = "tool"
    SCORE = "score"
    QUEUE = "queue"
    """Its reward is known, and no worker has it yet."""
    BACKWARD = "backward"
    DONE = "done"
    FLAT = "flat"
    FAIL = "fail"


class Span(Struct, frozen=True):
    """A lane's piece of time; `end_s` is infinite while it lasts. Unix seconds."""

    start_s: float
    end_s: float
    doing: Doing


class Pass(Struct, frozen=True):
    """One backward of one worker."""

    start_s: float
    end_s: float
    rollout_ids: list[RolloutId]
    tokens: int


@dataclass
class Lane:
    """One rollout's time."""

    rollout_id: RolloutId
    group_id: GroupId
    marks: list[tuple[float, int, Doing, int]] = field(default_factory=list)
    """(moment, order among equal moments, what begins there, its turn or -1), sorted. `GENERATE` and a `WAIT` with a
    turn are the two ends of a reply, of which several may be sampled at once; a `WAIT` without ends a command."""
    reward: float | None = None
    scored_turns: int | None = None
    """None until it is scored."""
    sampled_tokens: int = 0
    engine: int | None = None
    """Where it is generated; None as long as nobody said."""
    stop: str = ""
    command: str = ""
    """The latest."""
    sandboxes: dict[float, float] = field(default_factory=dict)
    """When its sandboxes had started, and the seconds that took; attempts and stages have their own."""
    failures: dict[float, str] = field(default_factory=dict)
    """When an attempt failed, and how."""
    aborted: set[tuple[float, int]] = field(default_factory=set)
    """When which request came to nothing: they have numbers like turns, and count as none."""

    @property
    def turns(self) -> int:
        """Replies sampled and being sampled, of the latest attempt."""
        if self.scored_turns is not None:
            return self.scored_turns
        since_s = max((at_s for at_s, _, doing, _ in self.marks if doing is Doing.START), default=0.0)
        # The highest number, not how many were heard of: who comes late has missed the others.
        asked = max((turn + 1 for at_s, _, doing, turn in self.marks if at_s >= since_s and turn >= 0), default=0)
        return max(0, asked - sum(at_s >= since_s for at_s, _ in self.aborted))

    def has_sandbox(self, at_s: float) -> bool:
        """One was started, and neither a verdict nor a failure has come since: it is closed then."""
        begun_s = max((each for each in self.sandboxes if each <= at_s), default=None)
        return begun_s is not None and not any(
            begun_s <= marked_s <= at_s and (doing in _WITHOUT or turn == _EVERYTHING)
            for marked_s, _, doing, turn in self.marks
        )

    def mark(self, at_s: float, doing: Doing, turn: int = -1) -> None:
        entry = (at_s, _ORDER[doing], doing, turn)
        place = bisect.bisect_left(self.marks, entry)
        if self.marks[place : place + 1] != [entry]:
            self.marks.insert(place, entry)

    def spans(self) -> list[Span]:
        """What it did, without gaps from its first mark on; the last one lasts."""
        spans: list[Span] = []
        turns: set[int] = set()
        tool = False
        for (at_s, _, doing, turn), end_s in zip(
            self.marks, [at_s for at_s, *_ in self.marks[1:]] + [math.inf], strict=False
        ):
            match doing:
                case Doing.GENERATE:
                    turns.add(turn)
                case Doing.TOOL:
                    tool = True
                case Doing.WAIT if turn >= 0:
                    turns.discard(turn)
                case Doing.WAIT if turn == _EVERYTHING:
                    turns, tool = set(), False
                case Doing.WAIT:
                    tool = False
                case _:
                    turns, tool = set(), False
            if doing in (Doing.WAIT, Doing.TOOL):
                doing = Doing.GENERATE if turns else Doing.TOOL if tool else Doing.WAIT
            spans.append(Span(at_s, end_s, doing))
        return [span for span in spans if span.end_s > span.start_s]


_WITHOUT = (Doing.QUEUE, Doing.DONE, Doing.FLAT, Doing.FAIL)
_EVERYTHING = -2
"""In the place of a turn: a failed attempt leaves nothing open."""
_ORDER = {doing: number for number, doing in enumerate(Doing)}


@dataclass
class StepTimeline:
    """One step."""

    step: int
    opened_s: float
    tasks: dict[GroupId, str]
    lanes: dict[RolloutId, Lane]
    passes: dict[int, dict[int, Pass]] = field(default_factory=dict)
    """By worker and by the pass's number."""
    gauges: dict[float, Gauges] = field(default_factory=dict)
    closed: dict[GroupId, float] = field(default_factory=dict)
    """When each group closed."""
    published_s: float | None = None
    committed_s: float | None = None
    ended_s: float | None = None
    """When the step, or the run in the middle of it, was over."""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def worked_s(self) -> float | None:
        """When the last group closed and the commit began; None before."""
        return max(self.closed.values()) if self.tasks and len(self.closed) == len(self.tasks) else None

    def backwards(self) -> dict[RolloutId, list[Pass]]:
        """The passes that each rollout had a piece in."""
        found: dict[RolloutId, list[Pass]] = {}
        for worker in self.passes.values():
            for each in worker.values():
                for name in each.rollout_ids:
                    found.setdefault(name, []).append(each)
        return found

    def busy_s(self, worker: int, now_s: float) -> float:
        """Seconds a worker has spent in passes of this step."""
        return sum(min(each.end_s, now_s) - each.start_s for each in self.passes.get(worker, {}).values())

    def sooner_s(self) -> float:
        """Seconds of backward that were over, all workers together, before the step's last reward was known.

        A trainer that waits for the whole batch would have begun them only then.
        """
        landed = [at_s for lane in self.lanes.values() for at_s, _, doing, _ in lane.marks if doing is Doing.QUEUE]
        last_s = max(landed, default=0.0)
        passes = [each for worker in self.passes.values() for each in worker.values()]
        return sum(max(0.0, min(each.end_s, last_s) - each.start_s) for each in passes)


class Timelines:
    """The latest steps; `apply` takes every event of a run."""

    def __init__(self, *, keep: int = STEPS_KEPT) -> None:
        self._keep = keep
        self.steps: OrderedDict[int, StepTimeline] = OrderedDict()
        self.open: StepTimeline | None = None
        """The step that is worked now."""

    def apply(self, event: Event) -> None:
        """Never raises, whatever the order."""
        match event:
            case StepOpened():
                self._opened(event)
            case RunStarted():
                # A resumed run works these steps again.
                for again in [number for number in self.steps if number >= event.start_step]:
                    del self.steps[again]
                self._end(event.at_s)
            case RunFinished():
                self._end(event.at_s)
            case StepCommitted():
                if (step := self.steps.get(event.step)) is not None:
                    step.committed_s = step.ended_s = event.at_s
                    step.metrics = event.metrics
                self.open = None
            case _:
                if self.open is not None:
                    _tell(self.open, event)

    def read(self, events: Sequence[Event]) -> None:
        """Take the events of one step, its StepOpened first, that were read as a whole."""
        if not events or not isinstance(events[0], StepOpened):
            return
        if self.open is not None and self.open.step == events[0].step:
            for event in events:
                self.apply(event)  # what a late viewer has missed of the open step
            return
        alone = Timelines(keep=1)
        for event in events:
            alone.apply(event)
        self._keep_step(alone.steps[events[0].step])

    def _end(self, at_s: float) -> None:
        if self.open is not None:
            self.open.ended_s = at_s
        self.open = None

    def _opened(self, event: StepOpened) -> None:
        known = self.steps.get(event.step)
        if known is not None and known.opened_s == event.at_s:
            self.open = known
            return
        step = StepTimeline(event.step, event.at_s, dict(zip(event.group_ids, event.task_ids, strict=False)), {})
        for group in event.group_ids:
            for index in range(event.group_size):
                name = rollout_id(group, index)
                step.lanes[name] = Lane(name, group, [(event.at_s, _ORDER[Doing.WAIT], Doing.WAIT, -1)])
        self.open = step
        self._keep_step(step)

    def _keep_step(self, step: StepTimeline) -> None:
        self.steps[step.step] = step
        if self.open is not None and self.open.step in self.steps:
            self.steps.move_to_end(self.open.step)  # so that it is never the one to go
        while len(self.steps) > self._keep:
            self.steps.popitem(last=False)


def _tell(step: StepTimeline, event: Event) -> None:
    match event:
        case PassStarted() | PassDone():
            _pass(step, event)
        case GroupClosed() if event.group_id in step.tasks:
            step.closed[event.group_id] = event.at_s
            for lane in step.lanes.values():
                if lane.group_id == event.group_id:  # whatever it was at: nothing of it is owed any more
                    lane.mark(event.at_s, Doing.FLAT if event.flat else Doing.DONE)
        case WeightsPublished():
            step.published_s = event.at_s
        case Gauges():
            step.gauges[event.at_s] = event
        case _:
            its = step.lanes.get(getattr(event, "rollout_id", ""))
            if its is not None:
                _live(its, event)


def _live(lane: Lane, event: Event) -> None:
    match event:
        case RolloutStarted():
            lane.mark(event.at_s, Doing.START)
        case RolloutSeated():
            lane.engine = event.engine
        case SandboxStarted():
            lane.sandboxes[event.at_s] = event.start_s
        case TurnStarted(turn=turn):
            lane.mark(event.at_s, Doing.GENERATE, turn)
        case TurnGenerated(turn=turn):
            lane.mark(event.at_s, Doing.WAIT, turn)
        case TurnAborted(turn=turn):
            lane.aborted.add((event.at_s, turn))
            lane.mark(event.at_s, Doing.WAIT, turn)
        case ToolStarted():
            lane.command = event.command
            lane.mark(event.at_s, Doing.TOOL)
        case ToolFinished():
            lane.mark(event.at_s, Doing.WAIT)
        case ScoringStarted():
            lane.mark(event.at_s, Doing.SCORE)
        case RolloutScored():
            lane.reward, lane.scored_turns, lane.sampled_tokens = event.reward, event.turns, event.sampled_tokens
            lane.stop = event.stop
            lane.mark(event.at_s, Doing.QUEUE)
        case RolloutFailed():
            lane.failures[event.at_s] = f"{event.failure}: {event.detail}"
            lane.mark(event.at_s, Doing.WAIT if event.will_retry else Doing.FAIL, _EVERYTHING)
        case RolloutSkipped():
            lane.mark(event.at_s, Doing.FLAT)


def _pass(step: StepTimeline, event: PassStarted | PassDone) -> None:
    passes = step.passes.setdefault(event.worker, {})
    known = passes.get(event.pass_id)
    if isinstance(event, PassStarted):
        end_s = known.end_s if known is not None else math.inf
        passes[event.pass_id] = Pass(event.at_s, end_s, event.rollout_ids, event.tokens)
        return
    start_s = known.start_s if known is not None else event.at_s - event.busy_s
    passes[event.pass_id] = Pass(start_s, event.at_s, event.rollout_ids, known.tokens if known is not None else 0)
    for name in event.rollout_ids:
        lane = step.lanes.get(name)
        # A turn's pass, or one while the checker runs, is over before the rollout is.
        if lane is not None and any(doing is Doing.QUEUE and at_s <= event.at_s for at_s, _, doing, _ in lane.marks):
            lane.mark(event.at_s, Doing.DONE)
