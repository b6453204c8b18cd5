"""Waiting for something to happen in a step, with a watchdog that names what is missing."""

import asyncio
import time
from collections.abc import Callable

from thundersync.errors import StepStalled

LOOK_AGAIN_S = 5.0


class News:
    """One condition for all feeders of a step; `tell` wakes them all."""

    def __init__(self, stall_timeout_s: float, missing: Callable[[], str] = lambda: "") -> None:
        """`missing`: who is waited for outside the run, if anybody is."""
        self._stall_timeout_s = stall_timeout_s
        self._missing = missing
        self._condition = asyncio.Condition()
        self._last_s = time.monotonic()
        self._soon: asyncio.Future[None] | None = None

    def heartbeat(self) -> None:
        """Something moved elsewhere: the step is not stalled."""
        self._last_s = time.monotonic()

    async def tell(self) -> None:
        self.heartbeat()
        async with self._condition:
            self._condition.notify_all()

    def tell_soon(self) -> None:
        """`tell`, from where nothing can be awaited."""
        self._soon = asyncio.ensure_future(self.tell())

    async def wait(self, owes: Callable[[], str]) -> None:
        """Until `tell`, or a short while. Raises StepStalled after `stall_timeout_s` of silence, with what is owed."""
        async with self._condition:
            try:
                async with asyncio.timeout(min(LOOK_AGAIN_S, self._stall_timeout_s)):
                    await self._condition.wait()
            except TimeoutError:
                silent_s = time.monotonic() - self._last_s
                if silent_s > self._stall_timeout_s:
                    told = f"nothing moved for {silent_s:.0f} s; the step still owes: {owes()}"
                    if missing := self._missing():
                        raise StepStalled(
                            f"{told}; {missing}", remedy="Start what is waited for, then continue with --resume."
                        ) from None
                    raise StepStalled(
                        told, remedy="See the logs in the run folder; raise stall_timeout_s if this is just slow work."
                    ) from None
