"""What is known of a run: events in, the picture of it out.

Between the client and the screen. Any event may come at any time, and some never come: a viewer joins late. So nothing
here raises and nothing is assumed. It knows nothing of screens, sockets or clocks: `now_s` is an argument.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from thundersync.core.types import GroupId, RolloutId, rollout_id
from thundersync.monitor.events import (
    CheckpointSaved,
    EvalFinished,
    EvalStarted,
    Event,
    Gauges,
    GroupClosed,
    PassDone,
    PassStarted,
    RolloutFailed,
    RolloutScored,
    RolloutSkipped,
    RolloutStarted,
    RunFinished,
    RunStarted,
    ScoringStarted,
    StepCommitted,
    StepOpened,
    ToolFinished,
    ToolStarted,
    TurnAborted,
    TurnGenerated,
    TurnStarted,
    Warned,
    WeightsPublished,
)


class RolloutState(StrEnum):
    WAITING = "waiting"
    GENERATING = "generating"
    TOOL = "tool"
    SCORING = "scoring"
    QUEUED = "queued"
    BACKWARD = "backward"
    DONE = "done"
    SKIPPED = "skipped"
    FAILED = "failed"
    RETRY = "retry"


@dataclass
class RolloutRow:
    state: RolloutState = RolloutState.WAITING
    turn: int = 0
    reward: float | None = None


@dataclass
class GroupRow:
    group_id: GroupId
    task_id: str
    rollouts: dict[RolloutId, RolloutRow]
    closed: bool = False
    flat: bool = False
    dropped: bool = False

    @property
    def rewards(self) -> list[float]:
        """Finite rewards so far, in the order of the rollouts."""
        return [row.reward for row in self.rollouts.values() if row.reward is not None and math.isfinite(row.reward)]


@dataclass
class Commit:
    step: int
    policy_version: int
    empty: bool
    at_s: float
    metrics: dict[str, float]


@dataclass
class EvalProgress:
    rollouts: int
    finished: int = 0


@dataclass
class RunView:
    """Everything a viewer shows. Reading it costs nothing; `apply` is the only thing that changes it."""

    run: RunStarted | None = None
    finished: RunFinished | None = None
    at_s: float = 0.0
    """Time of the latest event."""
    step: int | None = None
    """Number of the open step; None between steps."""
    step_opened_s: float = 0.0
    policy_version: int = 0
    groups: dict[GroupId, GroupRow] = field(default_factory=dict)
    """Of the open step, else of the last one."""
    passes: dict[int, PassStarted] = field(default_factory=dict)
    """The pass each trainer worker is in."""
    gauges: Gauges | None = None
    commits: list[Commit] = field(default_factory=list)
    evals: list[EvalFinished] = field(default_factory=list)
    evaluating: EvalProgress | None = None
    warnings: deque[Warned] = field(default_factory=lambda: deque(maxlen=50))
    checkpoint: CheckpointSaved | None = None
    publish_s: float | None = None
    resumed_at: int = 0
    """How many of `commits` are older than the latest start."""

    def apply(self, event: Event) -> None:
        """Take one event. Never raises, whatever the order."""
        self.at_s = max(self.at_s, event.at_s)
        match event:
            case RunStarted():
                self._start(event)
            case StepOpened():
                self._open(event)
            case StepCommitted():
                self._commit(event)
            case RolloutStarted(attempt=attempt):
                self._set(event.rollout_id, RolloutState.WAITING if attempt == 1 else RolloutState.RETRY)
            case TurnStarted(turn=turn) | TurnGenerated(turn=turn) | TurnAborted(turn=turn) | ToolFinished(turn=turn):
                self._set(event.rollout_id, RolloutState.GENERATING, turn=turn)
            case ToolStarted(turn=turn):
                self._set(event.rollout_id, RolloutState.TOOL, turn=turn)
            case ScoringStarted():
                self._set(event.rollout_id, RolloutState.SCORING)
            case RolloutScored(reward=reward):
                self._end_of_rollout(event.group_id)
                self._set(event.rollout_id, RolloutState.QUEUED, reward=reward)
            case RolloutFailed(will_retry=True):
                self._set(event.rollout_id, RolloutState.RETRY)
            case RolloutFailed():
                self._end_of_rollout(event.group_id)
                self._set(event.rollout_id, RolloutState.FAILED)
            case PassStarted():
                self.passes[event.worker] = event
                for name in event.rollout_ids:
                    self._set(name, RolloutState.BACKWARD)
            case PassDone():
                if event.worker in self.passes and self.passes[event.worker].pass_id == event.pass_id:
                    del self.passes[event.worker]
                for name in event.rollout_ids:
                    self._set(name, RolloutState.DONE)
            case RolloutSkipped():
                self._set(event.rollout_id, RolloutState.SKIPPED)
            case GroupClosed():
                if (group := self.groups.get(event.group_id)) is not None:
                    group.closed, group.flat, group.dropped = True, event.flat, event.dropped
            case WeightsPublished():
                self.policy_version, self.publish_s = event.policy_version, event.publish_s
            case CheckpointSaved():
                self.checkpoint = event
            case EvalStarted():
                self.evaluating = EvalProgress(rollouts=event.rollouts)
            case EvalFinished():
                self.evaluating = None
                self.evals.append(event)
            case Gauges():
                self.gauges = event
            case Warned():
                self.warnings.append(event)
            case RunFinished():
                self.finished, self.step, self.evaluating = event, None, None
                self.passes.clear()

    @property
    def phase(self) -> str:
        """One word for what the run is at."""
        if self.finished is not None:
            return "finished" if self.finished.ok else "stopped"
        if self.evaluating is not None:
            return "evaluating"
        if self.step is not None:
            closed = self.groups and all(group.closed for group in self.groups.values())
            return "committing" if closed else "training"
        return "between steps" if self.commits else "starting"

    @property
    def made(self) -> int:
        """Commits made, those before a resume included."""
        return (self.run.start_step if self.run else 0) + len(self.commits) - self.resumed_at

    @property
    def max_steps(self) -> int:
        return self.run.max_steps if self.run else 0

    def count(self, state: RolloutState) -> int:
        """Rollouts of the step in this state."""
        return sum(row.state is state for group in self.groups.values() for row in group.rollouts.values())

    def curve(self) -> list[float]:
        """Mean training reward of each commit; NaN where a step had none."""
        return [commit.metrics.get("reward_mean", math.nan) for commit in self.commits]

    def elapsed_s(self, now_s: float) -> float:
        return max(0.0, now_s - self.run.at_s) if self.run else 0.0

    def eta_s(self, now_s: float) -> float | None:
        """Seconds to the last commit at the median pace of the last eight; None before the first, or when over."""
        if self.finished is not None or self.made >= self.max_steps:
            return None
        times = [commit.at_s for commit in self.commits[self.resumed_at :]][-9:]
        paces = [later - earlier for earlier, later in pairwise(times)]
        if not paces:
            paces = [commit.metrics["step_s"] for commit in self.commits[-1:] if "step_s" in commit.metrics]
        if not paces or not math.isfinite(pace := statistics.median(paces)):
            return None
        since = now_s - self.commits[-1].at_s
        return max(0.0, (self.max_steps - self.made) * pace - min(max(0.0, since), pace))

    def share(self, metric: str) -> float | None:
        """A busy share over all commits seen, weighted by their seconds; None if none tells it."""
        rows = [row.metrics for row in self.commits if metric in row.metrics and row.metrics.get("step_s", 0.0) > 0.0]
        seconds = sum(row["step_s"] for row in rows)
        return sum(row[metric] * row["step_s"] for row in rows) / seconds if seconds else None

    def _start(self, event: RunStarted) -> None:
        # A resumed run forgets the commits it will make again. Who joined after the resume may not have the older ones.
        known = self.run.start_step if self.run else event.start_step
        del self.commits[max(0, event.start_step - known + self.resumed_at) :]
        self.evals = [each for each in self.evals if each.policy_version <= event.start_step]
        self.run, self.resumed_at, self.policy_version = event, len(self.commits), event.start_step
        self.finished = self.step = self.evaluating = self.gauges = None
        self.groups = {}
        self.passes.clear()

    def _open(self, event: StepOpened) -> None:
        self.step, self.step_opened_s = event.step, event.at_s
        self.policy_version = event.policy_version
        self.evaluating = None
        self.passes.clear()
        self.groups = {
            group: GroupRow(group, task, {rollout_id(group, i): RolloutRow() for i in range(event.group_size)})
            for group, task in zip(event.group_ids, event.task_ids, strict=False)
        }

    def _commit(self, event: StepCommitted) -> None:
        self.commits.append(Commit(event.step, event.policy_version, event.empty, event.at_s, event.metrics))
        self.step, self.policy_version = None, event.policy_version
        self.passes.clear()

    def _end_of_rollout(self, group: GroupId) -> None:
        if self.evaluating is not None and group not in self.groups:
            self.evaluating.finished += 1

    def _set(
        self, name: RolloutId, state: RolloutState, *, turn: int | None = None, reward: float | None = None
    ) -> None:
        group = self.groups.get(name.rpartition("-")[0])
        if group is None:
            return  # of an evaluation, or of a step that is over
        row = group.rollouts.setdefault(name, RolloutRow())
        row.state = state
        row.turn = row.turn if turn is None else turn
        row.reward = row.reward if reward is None else reward
