"""Where the app's knowledge comes from: the events of a run through all its restarts, and answers to questions.

Between `monitor.client` and the app. A folder is read where it lies; an address is asked. Knows nothing of screens.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from msgspec import structs

from thundersync.core.types import RolloutId
from thundersync.monitor import answers
from thundersync.monitor.archive import Archive, Transcript, events_of
from thundersync.monitor.client import events, live_feed
from thundersync.monitor.ear import FeedLost, NothingToWatch, ask
from thundersync.monitor.events import AnyEvent
from thundersync.monitor.keys import ViewerKeys
from thundersync.rundir import is_running

RETRY_S = 1.0


class Source:
    """One run, for as long as somebody looks."""

    def __init__(self, target: str, keys: ViewerKeys | None = None) -> None:
        self.target = target
        self._keys = keys
        self._folder = None if "://" in target else Path(target)
        self._archive = Archive(self._folder) if self._folder is not None else None

    def refuse_nothing(self) -> None:
        """Raises: NothingToWatch for a folder in which no run is or was."""
        folder = self._folder
        if folder is not None and not (folder / "events.jsonl").is_file() and not is_running(folder):
            raise NothingToWatch(self.target)

    async def follow(
        self, apply: Callable[[AnyEvent], None], restarted: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        """Hand on events until cancelled: through the end of the run, its death, and whatever is started there next.

        `restarted` is called before a run is told from its beginning again; `say` gets what is waited for, or nothing.
        Raises: KeysRefused, SchemaMismatch, NothingToWatch.
        """
        while True:
            with contextlib.suppress(FeedLost):  # it may come back
                stream = events(self.target, silence_s=10.0, keys=self._keys, say=say)
                async with contextlib.aclosing(stream):
                    first = True
                    async for event in stream:
                        if first:
                            restarted()
                            first = False
                        apply(event)
            if self._folder is None:
                say(f"the run has ended; waiting for the next at {self.target}")
                await asyncio.sleep(RETRY_S)
                continue
            say("")
            await _begun_again(self._folder)

    async def step(self, step: int) -> list[AnyEvent]:
        """Everything that was told of a step; empty where it cannot be had."""
        if self._archive is not None:
            lines = await asyncio.to_thread(self._archive.step_lines, step)
        else:
            try:
                lines = answers.step_lines(await self._ask(answers.STEP, str(step)))
            except FeedLost:
                return []
        return await asyncio.to_thread(lambda: list(events_of(lines)))

    async def rollout(self, name: RolloutId) -> Transcript | None:
        """A rollout word for word, as far as it has come; None where nobody knows it."""
        if self._archive is None:
            try:
                return answers.transcript(await self._ask(answers.ROLLOUT, name))
            except FeedLost:
                return None
        archive = self._archive
        found = await asyncio.to_thread(archive.rollout, name)
        if found is not None:
            return structs.replace(found, texts=await asyncio.to_thread(archive.token_texts, found))
        assert self._folder is not None
        live = await live_feed(self._folder)
        if live is None:
            return None
        try:
            return answers.transcript(await ask(live.endpoint, answers.question(answers.ROLLOUT, name)))
        except FeedLost:
            return None

    async def _ask(self, what: str, which: str) -> bytes:
        return await ask(self.target, answers.question(what, which), keys=self._keys)


async def _begun_again(folder: Path) -> None:
    """Until a run goes on in this folder: a file system tells nobody, so it is looked at."""
    ended = _size(folder)
    while not is_running(folder) and _size(folder) == ended:  # noqa: ASYNC110
        await asyncio.sleep(RETRY_S)


def _size(folder: Path) -> float:
    try:
        return float((folder / "events.jsonl").stat().st_size)
    except OSError:
        return 0.0
