"""A daemon that is away for longer than a moment: whoever needs it waits together, and one of them looks for it.

Knows neither sandboxes nor daemons. A wait has an end: past `limit_s` the error that began it is raised, until the
daemon has answered again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from sandboxes.errors import DaemonGone, RuntimeUnavailable

OUTAGE_LIMIT_S = 300.0
"""A daemon that is upgraded, or a machine's Docker that is restarted by hand, is back by then."""
LOOK_AGAIN_S = 2.0


class Outage:
    """The one outage that may be under way.

    `check` raises RuntimeUnavailable as long as it lasts; `say` gets a line when it begins, ends, or is too long.
    """

    def __init__(
        self,
        check: Callable[[], Awaitable[None]],
        *,
        limit_s: float = OUTAGE_LIMIT_S,
        look_again_s: float = LOOK_AGAIN_S,
        say: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._check = check
        self._limit_s = limit_s
        self._look_again_s = look_again_s
        self._say = say
        self._clock = clock
        self._looking = asyncio.Lock()
        self._since_s: float | None = None
        self._ended = 0
        self._given_up = False

    def over(self) -> None:
        """The daemon did what it was asked. An answer to `check` alone ends no outage: it may start nothing yet."""
        if self._since_s is not None:
            self._say(f"the Docker daemon answers again after {self._clock() - self._since_s:.0f} s; work goes on")
            self._ended += 1
            self._since_s, self._given_up = None, False

    async def wait(self, error: DaemonGone) -> None:
        """Returns when it is worth another try. Raises: DaemonGone, made of `error`, when it has been away too long."""
        ended = self._ended
        async with self._looking:
            while self._ended == ended:  # else it came back while we stood in line
                now_s = self._clock()
                if self._since_s is None:
                    self._since_s = now_s
                    self._say(f"sandboxes wait, for up to {self._limit_s:.0f} s: {error.message}")
                if now_s - self._since_s >= self._limit_s:
                    self._give_up(error)
                try:
                    await self._check()
                except RuntimeUnavailable:
                    await asyncio.sleep(self._look_again_s)
                else:
                    return

    def _give_up(self, error: DaemonGone) -> None:
        text = f"the Docker daemon has been away for more than {self._limit_s:.0f} s: {error.message}"
        if not self._given_up:
            self._given_up = True
            self._say(text)
        raise DaemonGone(text, remedy=error.remedy) from error
