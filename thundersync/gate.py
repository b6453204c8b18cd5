"""Between those who ask the engines something beside a step and the publish, for which nothing may be in flight.

Knows neither. Nothing in it waits on the way out, so that a cancelled caller leaves it as it should be.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Any number pass at once while it is open; whoever closes it waits for them, and newcomers wait for it to open."""

    def __init__(self) -> None:
        self._inside = 0
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._empty.set()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Inside the block nothing is published."""
        while not self._open.is_set():  # it may have closed again before this task ran
            await self._open.wait()
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Inside the block nobody passes. One at a time."""
        self._open.clear()
        try:
            await self._empty.wait()
            yield
        finally:
            self._open.set()
