"""A client that runs beside a test and can be awaited up to its latest event."""

import asyncio
from collections.abc import Iterable
from typing import Any

from thundersync.monitor import events as e
from thundersync.monitor.client import events
from thundersync.monitor.state import RunView


class Viewer:
    """Starts to watch when it is made."""

    def __init__(self, target: str, **options: Any) -> None:
        self.told: list[e.AnyEvent] = []
        self.said: list[str] = []
        """What it was told of the connection."""
        self._spoken_to = asyncio.Event()
        self._target, self._options, self._news = target, options, asyncio.Condition()
        self.task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        async for event in events(self._target, say=self._say, **self._options):
            async with self._news:
                self.told.append(event)
                self._news.notify_all()

    def _say(self, text: str) -> None:
        self.said.append(text)
        self._spoken_to.set()

    async def told_something(self) -> None:
        await asyncio.wait_for(self._spoken_to.wait(), 60)

    async def heard(self, event: e.AnyEvent) -> None:
        async with self._news:
            await asyncio.wait_for(self._news.wait_for(lambda: self.told[-1:] == [event]), 60)

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})


def view_of(told: Iterable[e.AnyEvent]) -> RunView:
    view = RunView()
    for event in told:
        view.apply(event)
    return view
