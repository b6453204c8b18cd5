"""The monitor: a run, live or over, in seven views. Read only; the run does not know who looks.

The last stop of the events. It draws what the views make of them, and turns keys into a cursor; what a step or a
rollout was in full is asked of the `Source` when somebody looks at it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

from rich.console import Console
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Static

from thundersync.errors import ThundersyncError
from thundersync.monitor.app.frame import foot, tabs, title
from thundersync.monitor.app.known import VIEWS, Known
from thundersync.monitor.app.source import Source
from thundersync.monitor.app.views import drawn
from thundersync.monitor.keys import ViewerKeys
from thundersync.monitor.view import summary

FRAMES_PER_S = 4


class Monitor(App[ThundersyncError]):
    """Shows one run until the reader leaves; returns the error that ended it, if one did."""

    CSS = """
    Screen { background: $background; }
    #head { height: 2; }
    #body { height: 1fr; padding: 0 1; }
    #foot { height: 1; }
    #head, #foot { padding: 0 1; }
    """
    TITLE = "thundersync monitor"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(index + 1), f"view({index})", word, show=False) for index, word in enumerate(VIEWS)),
        Binding("tab", "turn(1)", show=False, priority=True),
        Binding("shift+tab", "turn(-1)", show=False, priority=True),
        *(Binding(key, f"move('{key}')", show=False) for key in ("up", "down", "left", "right")),
        *(Binding(key, f"move('{key}')", show=False) for key in ("pageup", "pagedown", "home", "end")),
        Binding("enter", "read", show=False),
        Binding("t", "tokens", show=False),
        Binding("r", "again", show=False),
        Binding("q,ctrl+c,ctrl+q", "quit", show=False, priority=True),
    ]

    def __init__(self, source: Source, *, clock: Callable[[], float] = time.time) -> None:
        super().__init__()
        self.known = Known()
        self._source = source
        self._clock = clock
        self._drawn = [Text(), Text(), Text()]
        self._mark: object = None
        """What the drawn picture depends on."""
        self._asking_steps: set[int] = set()
        self._caught_up: int | None = None
        """The open step whose past was asked for; what came since was heard."""
        self._asking: set[str] = set()

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="body")
        yield Static(id="foot")

    def on_mount(self) -> None:
        self._begin(self._follow(), "feed")
        self.set_interval(1 / FRAMES_PER_S, self.draw)

    def on_resize(self) -> None:
        self.draw()

    def draw(self) -> None:
        """Bring the screen up to date, and ask for what it lacks."""
        self._fetch()
        known, now_s = self.known, self._clock()
        width, height = self.size.width - 2, self.size.height - 3
        moment = 0 if known.view.finished is not None else round(now_s * FRAMES_PER_S)
        mark = (known.heard, known.notice, repr(known.cursor), len(known.transcripts), len(known.timelines.steps))
        if width < 20 or height < 4 or (mark, moment, width, height) == self._mark:
            return
        self._mark = (mark, moment, width, height)
        body = drawn(VIEWS[known.cursor.view], known, width=width, height=height, now_s=now_s)
        pictures = [
            Text("\n").join([title(known, width, now_s), tabs(known, width)]),
            Text("\n").join(body),
            foot(known, width),
        ]
        for name, picture, before in zip(("head", "body", "foot"), pictures, self._drawn, strict=True):
            if picture != before:
                picture.no_wrap = True
                self.query_one(f"#{name}", Static).update(picture)
        self._drawn = pictures

    def action_view(self, index: int) -> None:
        self.known.cursor.view = index
        self.draw()

    def action_turn(self, by: int) -> None:
        self.action_view((self.known.cursor.view + by) % len(VIEWS))

    def action_move(self, key: str) -> None:
        """Arrows and pages mean what the open view makes of them."""
        cursor, page = self.known.cursor, max(1, self.size.height - 8)
        by = {"up": -1, "down": 1, "pageup": -page, "pagedown": page, "home": -(10**9), "end": 10**9}.get(key, 0)
        side = {"left": -1, "right": 1}.get(key, 0)
        match VIEWS[cursor.view]:
            case "overlap" if key == "end":
                cursor.step = None
            case "overlap":
                cursor.lane += by
                if side:
                    self._scrub(side)
            case "groups":
                cursor.group = max(0, cursor.group + by)
                cursor.member = max(0, cursor.member + side)
            case "rollout":
                cursor.line = max(0, cursor.line + by)
                if side:
                    self._neighbour(side)
            case "warnings":
                cursor.warning = max(0, cursor.warning - by)
            case _:
                if side:
                    self.action_turn(side)
                    return
        self.draw()

    def action_read(self) -> None:
        """Open the chosen rollout's conversation."""
        if VIEWS[self.known.cursor.view] != "groups":
            return
        chosen = self.known.group_at(self.known.cursor.group)
        if chosen is not None:
            names = list(chosen[1].rollouts)
            self._open(names[min(self.known.cursor.member, len(names) - 1)])
            self.action_view(VIEWS.index("rollout"))

    def action_tokens(self) -> None:
        self.known.cursor.tokens = not self.known.cursor.tokens
        self.draw()

    def action_again(self) -> None:
        """Read the open rollout anew: it may have gone on."""
        self.known.transcripts.pop(self.known.cursor.rollout or "", None)
        self.draw()

    def _scrub(self, by: int) -> None:
        known = self.known
        shown, last = known.shown_step, known.last_step
        if shown is None or last is None:
            return
        step = max(0, shown + by)
        known.cursor.step = None if step >= last else step

    def _neighbour(self, by: int) -> None:
        """The next rollout of the open one's group, and then of the next group."""
        names = [name for group in self.known.view.groups.values() for name in group.rollouts]
        if self.known.cursor.rollout in names:
            index = names.index(self.known.cursor.rollout) + by
            self._open(names[max(0, min(index, len(names) - 1))])
        elif names:
            self._open(names[0])

    def _open(self, name: str) -> None:
        if name != self.known.cursor.rollout:
            self.known.cursor.rollout, self.known.cursor.line = name, 0
            self.known.transcripts.pop(name, None)  # it may have gone on since

    async def _follow(self) -> None:
        try:
            await self._source.follow(self.known.apply, self._restarted, self._say)
        except ThundersyncError as error:
            self.exit(error)

    def _restarted(self) -> None:
        self.known.restart()
        self._caught_up = None

    def _say(self, text: str) -> None:
        self.known.notice = text

    def _fetch(self) -> None:
        """Ask for the past of the open step, for the step that is scrubbed to, for the rollout that is read."""
        known = self.known
        wanted = {known.shown_step} if VIEWS[known.cursor.view] == "overlap" and known.shown is None else set()
        if known.timelines.open is not None and known.timelines.open.step != self._caught_up:
            self._caught_up = known.timelines.open.step
            wanted.add(self._caught_up)  # who came late has not heard all of it
        for step in wanted - self._asking_steps:
            if step is not None:
                self._asking_steps.add(step)
                self._begin(self._read_step(step), f"step {step}")
        name = known.cursor.rollout
        if VIEWS[known.cursor.view] == "rollout" and name is None:
            self._neighbour(0)
        elif VIEWS[known.cursor.view] == "rollout" and name not in known.transcripts and name not in self._asking:
            assert name is not None
            self._asking.add(name)
            self._begin(self._read_rollout(name), f"rollout {name}")

    async def _read_step(self, step: int) -> None:
        try:
            told = await self._source.step(step)
            self.known.timelines.read(told)
            if not told and self.known.cursor.step == step:
                self.known.cursor.step = None  # nobody has it any more
        finally:
            self._asking_steps.discard(step)

    async def _read_rollout(self, name: str) -> None:
        try:
            found = await self._source.rollout(name)
            while len(self.known.transcripts) >= 16:
                self.known.transcripts.pop(next(iter(self.known.transcripts)))
            self.known.transcripts[name] = found
        finally:
            self._asking.discard(name)

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self.run_worker(work, name=name, exit_on_error=True)


async def watch(target: str, *, keys: ViewerKeys | None, console: Console) -> None:
    """Show a run in this terminal until its reader leaves; then print what it came to.

    Raises: NothingToWatch, KeysRefused, SchemaMismatch.
    """
    source = Source(target, keys)
    source.refuse_nothing()
    app = Monitor(source)
    error = await app.run_async()
    if error is not None:
        raise error
    view = app.known.view
    if view.run is not None:
        goes_on = f"{view.run.name} goes on: step {view.made + (view.step is not None)} of {view.max_steps}"
        with contextlib.suppress(SystemExit):
            console.print(summary(view) if view.finished is not None else goes_on, highlight=False)
