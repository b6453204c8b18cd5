"""What the app knows and where its reader stands: the events understood, and the cursor in each view.

Between the source of events and the views, which only read it. Knows nothing of textual.
"""

from collections import deque
from dataclasses import dataclass, field

from rich.text import Text

from thundersync.core.types import GroupId, RolloutId
from thundersync.monitor.archive import Transcript
from thundersync.monitor.events import Event, Gauges, RolloutFailed, RunStarted
from thundersync.monitor.state import GroupRow, RunView
from thundersync.monitor.timeline import StepTimeline, Timelines

GAUGES_KEPT = 240
"""Two minutes of them."""
VIEWS = ("overview", "overlap", "groups", "rollout", "engines", "sandboxes", "warnings")


@dataclass
class Cursor:
    """Where the reader stands."""

    view: int = 0
    step: int | None = None
    """The step that the overlap shows; None follows the run."""
    lane: int = 0
    """First lane shown in the overlap."""
    group: int = 0
    member: int = 0
    rollout: RolloutId | None = None
    """Whose conversation is open."""
    line: int = 0
    """First line shown of the conversation."""
    tokens: bool = False
    """Show sampled tokens by their probability."""
    warning: int = 0
    """Lines scrolled back from the newest."""


@dataclass
class Known:
    """Everything the views read."""

    view: RunView = field(default_factory=RunView)
    timelines: Timelines = field(default_factory=Timelines)
    gauges: deque[Gauges] = field(default_factory=lambda: deque(maxlen=GAUGES_KEPT))
    failures: deque[RolloutFailed] = field(default_factory=lambda: deque(maxlen=50))
    transcripts: dict[RolloutId, Transcript | None] = field(default_factory=dict)
    """Read so far; None: nobody knows it."""
    cursor: Cursor = field(default_factory=Cursor)
    notice: str = ""
    """What the reader should know of the connection."""
    heard: int = 0
    """Events so far; a change means that there is something to draw."""

    def apply(self, event: Event) -> None:
        """Never raises, whatever the order."""
        self.heard += 1
        if isinstance(event, RunStarted) and self.view.run is not None and event.name != self.view.run.name:
            self.restart()
        self.view.apply(event)
        self.timelines.apply(event)
        if isinstance(event, Gauges):
            self.gauges.append(event)
        elif isinstance(event, RolloutFailed):
            self.failures.append(event)

    def restart(self) -> None:
        """Forget the run; the reader stays where they are."""
        self.view, self.timelines = RunView(), Timelines()
        self.gauges.clear()
        self.failures.clear()
        self.transcripts.clear()

    @property
    def shown_step(self) -> int | None:
        """The step that the overlap shows: the chosen one, the open one, or the last."""
        if self.cursor.step is not None:
            return self.cursor.step
        return self.latest.step if self.latest is not None else None

    @property
    def shown(self) -> StepTimeline | None:
        step = self.shown_step
        return self.timelines.steps.get(step) if step is not None else None

    @property
    def latest(self) -> StepTimeline | None:
        """The open step, else the last one known."""
        if self.timelines.open is not None:
            return self.timelines.open
        return max(self.timelines.steps.values(), key=lambda step: step.opened_s, default=None)

    @property
    def last_step(self) -> int | None:
        known = [*self.timelines.steps, *([self.view.commits[-1].step] if self.view.commits else [])]
        return max(known, default=None)

    def group_at(self, index: int) -> tuple[GroupId, GroupRow] | None:
        groups = list(self.view.groups.items())
        return groups[min(index, len(groups) - 1)] if groups else None

    def moment_s(self, now_s: float) -> float:
        """Now, or the end of a run that is over."""
        return self.view.at_s if self.view.finished is not None else max(now_s, self.view.at_s)


Lines = list[Text]
