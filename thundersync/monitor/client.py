"""A viewer's ear: the events of a run, live or long over, as one stream.

The other end of `monitor.feed`. It repairs gaps by asking for a new snapshot and knows nothing of what events mean.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import msgspec

from thundersync.errors import ThundersyncError
from thundersync.monitor.ear import ADDRESS_REMEDY, Ear, FeedLost, NothingToWatch
from thundersync.monitor.events import SCHEMA, AnyEvent, RunFinished, RunStarted, from_line, unpack
from thundersync.monitor.feed import LIVE, SNAPSHOT, FeedInfo, Snapshot
from thundersync.monitor.keys import ViewerKeys
from thundersync.rundir import is_running

__all__ = ["FeedLost", "NothingToWatch", "SchemaMismatch", "events", "live_feed"]

PATIENCE_S = 0.5
"""After so much silence a viewer hears what is waited for."""


class SchemaMismatch(ThundersyncError):
    """The run speaks another version of the vocabulary."""

    def __init__(self, theirs: int) -> None:
        super().__init__(
            f"the run's events have schema {theirs}, this thundersync reads schema {SCHEMA}",
            remedy="Watch it with the version of thundersync that made it.",
        )


async def events(
    target: str,
    *,
    silence_s: float = 30.0,
    keys: ViewerKeys | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> AsyncGenerator[AnyEvent, None]:
    """Every event still worth knowing, then each new one, until the run ends. `target` is a run folder or an address.

    A live run sends what is kept of its past first (superseded events are left out); a run that is over is read from
    `events.jsonl`, all of it. Close the iterator (`contextlib.aclosing`) when leaving early. `keys` are for addresses;
    `say` is told what is waited for, and gets an empty text when there is news again.

    Raises: NothingToWatch; FeedLost after `silence_s` seconds without a sign of life; KeysRefused; SchemaMismatch.
    """
    folder = None if "://" in target else Path(target)
    info = None if folder is None else await live_feed(folder)
    if info is not None and info.schema != SCHEMA:
        raise SchemaMismatch(info.schema)
    seen = 0
    if folder is None or info is not None:
        endpoint = target if info is None else info.endpoint
        attached = _attached(
            endpoint, None if folder else keys, lambda: folder is None or is_running(folder), silence_s, say
        )
        async with contextlib.aclosing(attached) as stream:
            async for number, event in stream:
                seen = max(0, number)
                yield event
                if isinstance(event, RunFinished):
                    return
    if folder is None:
        return
    # It is over, it died, or it ended while we fell behind: the file has what no socket brings any more.
    file = folder / "events.jsonl"
    if not file.is_file():
        raise NothingToWatch(target)
    async with contextlib.aclosing(_read(file, offset=info.offset if info else 0, skip=seen)) as lines:
        async for event in lines:
            yield event


async def live_feed(folder: Path) -> FeedInfo | None:
    """Where the run is heard; None if it is over. One that has just begun gets a moment to say so."""
    for _ in range(50):
        if not is_running(folder):
            return None
        with contextlib.suppress(FileNotFoundError):
            return msgspec.json.decode((folder / "feed.json").read_bytes(), type=FeedInfo)
        await asyncio.sleep(0.1)
    return None


async def _read(file: Path, *, offset: int, skip: int) -> AsyncGenerator[AnyEvent, None]:
    with file.open("rb") as lines:
        lines.seek(offset)
        for index, line in enumerate(lines):
            if index % 500 == 0:
                await asyncio.sleep(0)  # others share this loop, and a long run has many lines
            if index < skip or not line.endswith(b"\n"):  # a killed run may leave its last line torn
                continue
            event = None
            with contextlib.suppress(msgspec.DecodeError):  # torn too: a resumed run only ended the line
                event = from_line(line)
            if isinstance(event, RunStarted) and event.schema != SCHEMA:
                raise SchemaMismatch(event.schema)
            if event is not None:
                yield event


async def _attached(
    endpoint: str,
    keys: ViewerKeys | None,
    alive: Callable[[], bool],
    silence_s: float,
    say: Callable[[str], None],
) -> AsyncGenerator[tuple[int, AnyEvent], None]:
    """Numbered events until the run says that it ends, or `alive` says that it is dead."""
    async with Ear(endpoint, keys) as ear:
        ear.subscribe(LIVE)
        topic = _ask(ear)
        origin, seen, current, silent_s = "", _NOTHING, False, 0.0
        while True:
            if not await ear.heard(PATIENCE_S):
                silent_s += PATIENCE_S
                if not ear.attached:
                    say(f"waiting: nobody answers yet at {endpoint}")
                if not alive():
                    return
                if silent_s >= silence_s:
                    raise FeedLost(
                        f"{endpoint} has said nothing for {silent_s:.0f} s",
                        remedy="Check that the run is still going there; a finished run is read from its folder.",
                    )
                continue
            silent_s = 0.0
            say("")
            for frames in ear.messages():
                if len(frames) != 4:
                    raise FeedLost("what answers there is no feed of thundersync", remedy=ADDRESS_REMEDY)
                kind, number, payload = frames[1], int.from_bytes(frames[2], "big"), frames[3]
                if kind == b"snapshot":
                    snapshot = _snapshot(payload)
                    if snapshot.origin != origin:  # another process: the run was started again at this address
                        origin, seen = snapshot.origin, _NOTHING
                    for past, packed in snapshot.events:
                        event = unpack(packed)
                        if past > seen and event is not None:
                            yield past, event
                    seen, current = max(seen, number), True
                    ear.unsubscribe(topic)
                elif current and kind == b"event" and number == seen + 1:
                    seen = number
                    event = unpack(payload)
                    if event is not None:
                        yield number, event
                elif current and kind != b"end" and (number > seen or (kind == b"alive" and number < seen)):
                    # We read too slowly and some were dropped, or a new run counts anew. It is kept over there.
                    current, topic = False, _ask(ear)
                if kind == b"end":
                    return


_NOTHING = -(1 << 62)


def _ask(ear: Ear) -> bytes:
    topic = SNAPSHOT + uuid.uuid4().hex.encode()
    ear.subscribe(topic)
    return topic


def _snapshot(payload: bytes) -> Snapshot:
    snapshot = msgspec.msgpack.decode(payload, type=Snapshot)
    if snapshot.schema != SCHEMA:
        raise SchemaMismatch(snapshot.schema)
    return snapshot
