"""Rollouts wait, and no program comes: said after a while, again after longer ones, and in the end an error.

Place in the flow: `desk` looks at it for as long as rollouts wait. The run's rule holds here as everywhere: where
nothing has moved for `stall_timeout_s`, it ends. Knows nothing of rollouts, HTTP or the event loop.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from thundersync.errors import StepStalled, ThundersyncError

FIRST_S = 60.0
"""Before it is said for the first time, if the run does not end sooner; then after twice as long, and so on."""
LOOK_S = 5.0


class Absence:
    """How long nobody has been there. `where` is the endpoint's URL, `warn` tells people; `clock` gives seconds."""

    def __init__(
        self,
        *,
        where: Callable[[], str],
        stall_timeout_s: float,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._where = where
        self._stall_timeout_s = stall_timeout_s
        self._warn = warn
        self._clock = clock
        self._first_s = min(FIRST_S, stall_timeout_s / 2)
        self.look_s = min(LOOK_S, stall_timeout_s / 4)
        """Between two looks."""
        self.end()

    def end(self) -> None:
        """A program is there, or nothing waits: whoever is missed next is missed from now on."""
        self._since_s = self._moved_s = self._clock()
        self._next_s = self._first_s

    def moved(self) -> None:
        """Something happened elsewhere in the run: it has not stalled."""
        self._moved_s = self._clock()

    def look(self, waiting: int) -> None:
        """`waiting` rollouts wait, and nobody is there. Raises: StepStalled once nothing has moved for too long."""
        now_s = self._clock()
        if now_s - self._moved_s > self._stall_timeout_s:
            raise StepStalled(
                f"nothing moved for {now_s - self._moved_s:.0f} s: {self.words(waiting)}",
                remedy="Start the programs that take rollouts (docs/endpoint.md), then continue with --resume.",
            )
        if now_s - self._since_s >= self._next_s:
            self._next_s *= 2
            with contextlib.suppress(ThundersyncError):  # a disk that is full: the next event says so
                self._warn(self.words(waiting))

    def words(self, waiting: int) -> str:
        """What is missing, as a person would say it."""
        wait = "1 rollout waits" if waiting == 1 else f"{waiting} rollouts wait"
        return f"{wait} for a program at {self._where()}; none has been there for {self._clock() - self._since_s:.0f} s"
