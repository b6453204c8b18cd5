"""How late the event loop runs: a timer that is due again every few milliseconds, and by how much it was late.

A block of the loop is met wherever it falls: nothing waits longer than one period to be seen. Measures; tells nobody.
"""

from __future__ import annotations

import asyncio
import time

from msgspec import Struct

PERIOD_S = 0.02
"""Fifty timers a second take half a percent of a core where docs/monitor.md measured it; a hundred took twice that."""


class Lag(Struct, frozen=True, kw_only=True):
    """Seconds that timers were late, over some while."""

    p50_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0


class LoopProbe:
    """Looks at the loop that it was started in, until it is stopped."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = self._taken_s = 0.0
        self._late_s: list[float] = []
        self._max_s = 0.0

    def start(self) -> None:
        """In a running loop."""
        self._loop = asyncio.get_running_loop()
        self._again()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def lag(self) -> Lag:
        """Since the last call of this."""
        late_s, self._late_s = sorted(self._late_s), []
        if not late_s:
            return Lag()
        return Lag(p50_s=late_s[len(late_s) // 2], p99_s=late_s[int(len(late_s) * 0.99)], max_s=late_s[-1])

    def take_max_s(self) -> float:
        """The worst since the last call of this; what a timer is late by now counts here, and not again in the next."""
        now_s = time.monotonic()
        worst_s, self._max_s = max(self._max_s, self._late_since_taken_s(now_s)), 0.0
        self._taken_s = now_s
        return worst_s

    def _late_since_taken_s(self, now_s: float) -> float:
        return max(0.0, now_s - max(self._due_s, self._taken_s)) if self._timer is not None else 0.0

    def _fire(self) -> None:
        now_s = time.monotonic()
        self._late_s.append(max(0.0, now_s - self._due_s))
        self._max_s = max(self._max_s, self._late_since_taken_s(now_s))
        self._again()

    def _again(self) -> None:
        # Not `loop.call_at`: uvloop's clock stands still while a callback runs, which is what is to be seen.
        self._due_s = time.monotonic() + PERIOD_S
        self._timer = self._loop.call_later(PERIOD_S, self._fire)
