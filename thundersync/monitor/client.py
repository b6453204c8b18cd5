"""A viewer's ear: the events of a run, live or long over, as one stream.

The other end of `monitor.feed`. It repairs gaps by asking for a new snapshot and knows nothing of what events mean.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from thundersync.errors import ThundersyncError
from thundersync.monitor.events import SCHEMA, AnyEvent, RunFinished, RunStarted, from_line, unpack
from thundersync.monitor.feed import LIVE, SNAPSHOT, FeedInfo, Snapshot
from thundersync.rundir import is_running

_ADDRESS_REMEDY = (
    "Give a run's folder (runs/NAME), or its address as in its feed.json (tcp://127.0.0.1:PORT, ipc:///PATH)."
)


class NothingToWatch(ThundersyncError):
    """The target is neither a run folder nor an address."""

    def __init__(self, target: str) -> None:
        super().__init__(
            f"no run at {target!r}",
            remedy=_ADDRESS_REMEDY,
        )


class FeedLost(ThundersyncError):
    """Nobody answers, or no longer."""


class SchemaMismatch(ThundersyncError):
    """The run speaks another version of the vocabulary."""

    def __init__(self, theirs: int) -> None:
        super().__init__(
            f"the run's events have schema {theirs}, this thundersync reads schema {SCHEMA}",
            remedy="Watch it with the version of thundersync that made it.",
        )


async def events(target: str, *, silence_s: float = 30.0) -> AsyncGenerator[AnyEvent, None]:
    """Every event still worth knowing, then each new one, until the run ends. `target` is a run folder or an address.

    A live run sends what is kept of its past first (superseded events are left out); a run that is over is read from
    `events.jsonl`, all of it. Close the iterator (`contextlib.aclosing`) when leaving early.

    Raises: NothingToWatch; FeedLost after `silence_s` seconds without a sign of life; SchemaMismatch.
    """
    folder = None if "://" in target else Path(target)
    info = None if folder is None else await _live(folder)
    if info is not None and info.schema != SCHEMA:
        raise SchemaMismatch(info.schema)
    seen = 0
    if folder is None or info is not None:
        endpoint = target if info is None else info.endpoint
        attached = _attached(endpoint, lambda: folder is None or is_running(folder), silence_s)
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


async def _live(folder: Path) -> FeedInfo | None:
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
    endpoint: str, alive: Callable[[], bool], silence_s: float
) -> AsyncGenerator[tuple[int, AnyEvent], None]:
    """Numbered events until the run says that it ends, or `alive` says that it is dead."""
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 10_000)
        _connect(socket, endpoint)
        socket.subscribe(LIVE)
        topic = _ask(socket)
        seen, current, silent_s = -(1 << 62), False, 0.0
        while True:
            if not await socket.poll(1000):
                silent_s += 1
                if not alive():
                    return
                if silent_s >= silence_s:
                    raise FeedLost(
                        f"{endpoint} has said nothing for {silent_s:.0f} s",
                        remedy="Check that the run is still going there; a finished run is read from its folder.",
                    )
                continue
            silent_s = 0.0
            await asyncio.sleep(0)  # others share this loop, also while events pour
            for kind, number, payload in _arrived(socket):
                if kind == b"snapshot":
                    for past, event in _snapshot(payload):
                        if past > seen and event is not None:
                            yield past, event
                    seen, current = max(seen, number), True
                    socket.unsubscribe(topic)
                elif current and kind == b"event" and number == seen + 1:
                    seen = number
                    event = unpack(payload)
                    if event is not None:
                        yield number, event
                elif current and kind != b"end" and number > seen:
                    # We read too slowly and some were dropped. What matters of them is kept over there.
                    current, topic = False, _ask(socket)
                if kind == b"end":
                    return


def _arrived(socket: Any) -> Iterator[tuple[bytes, int, bytes]]:
    """The messages that are here, at most a thousand; through the plain socket, ten times faster than by awaiting."""
    plain: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
    for _ in range(1000):
        try:
            frames = plain.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        if len(frames) != 4:
            raise FeedLost("what answers there is no feed of thundersync", remedy=_ADDRESS_REMEDY)
        yield frames[1], int.from_bytes(frames[2], "big"), frames[3]


def _connect(socket: Any, endpoint: str) -> None:
    try:
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise NothingToWatch(endpoint) from error


def _ask(socket: Any) -> bytes:
    topic = SNAPSHOT + uuid.uuid4().hex.encode()
    socket.subscribe(topic)
    return topic


def _snapshot(payload: bytes) -> Iterator[tuple[int, AnyEvent | None]]:
    snapshot = msgspec.msgpack.decode(payload, type=Snapshot)
    if snapshot.schema != SCHEMA:
        raise SchemaMismatch(snapshot.schema)
    for number, packed in snapshot.events:
        yield number, unpack(packed)
