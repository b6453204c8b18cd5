"""The run's voice: every event goes to `events.jsonl` and to whoever watches, and nobody who watches can slow the run.

The engine emits, one thread writes and publishes. It knows nothing of what events mean. On the wire (ZeroMQ) a viewer
subscribes to `live`, then to a topic of its own, `snapshot-...`; the publisher sees that second subscription and
answers it, on the same socket and so in order, with what is kept of the past. Numbers join them without gap or double.
Frames: topic, kind (`event`, `snapshot`, `alive`, `end`), number (8 bytes, big endian) of the last event, payload.
"""

import asyncio
import contextlib
import ipaddress
import os
import shutil
import socket
import tempfile
import threading
from pathlib import Path
from queue import Empty, SimpleQueue

import msgspec
import zmq

from thundersync.errors import ConfigError, ThundersyncError
from thundersync.monitor.events import SCHEMA, EvalFinished, Event, RunStarted, StepCommitted, from_line, pack, to_line
from thundersync.monitor.history import History
from thundersync.rundir import write_whole

LIVE = b"live"
SNAPSHOT = b"snapshot-"
UNIX_PATH_LIMIT = 107
"""Bytes of a unix socket's path on Linux, macOS has 103: the shorter binds everywhere."""


class FeedFailed(ThundersyncError):
    """Events can no longer be written; what happened would be lost."""


class FeedInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`feed.json`: where a live run can be watched. It exists while the run does."""

    endpoint: str
    pid: int
    schema: int
    offset: int
    """Bytes of `events.jsonl` before the first event of this process."""


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    schema: int
    events: list[tuple[int, bytes]]


class Feed:
    """Takes events from the event loop; `open` starts its thread, `close` ends it."""

    def __init__(self, folder: Path, context: "zmq.Context[zmq.Socket[bytes]]", publisher: "zmq.Socket[bytes]") -> None:
        self.endpoint = publisher.get_string(zmq.LAST_ENDPOINT)
        self._folder, self._offset = folder, 0
        self._context, self._publisher = context, publisher
        self._queue: SimpleQueue[tuple[Event, bytes] | None] = SimpleQueue()
        self._history, self._number = History(), 0
        self._closed, self._told = False, False
        self._error: Exception | None = None
        self._inner, self._outer = socket.socketpair()
        for end in (self._inner, self._outer):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name="feed", daemon=True)

    @classmethod
    def open(cls, folder: Path, *, bind: str = "") -> "Feed":
        """Bind, announce in `feed.json`, and start. `bind` empty: a socket file in the run folder, or, where its path
        is too long for one, in a private temporary folder.

        Raises: ConfigError if `bind` cannot be used or would be open to other machines.
        """
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        publisher = context.socket(zmq.XPUB)
        # A viewer that stopped reading costs this many messages of memory, then it misses some: it never holds us up.
        publisher.setsockopt(zmq.SNDHWM, 10_000)
        publisher.setsockopt(zmq.LINGER, 1000)
        publisher.setsockopt(zmq.MAXMSGSIZE, 1024)
        try:
            _bind(publisher, folder, bind)
            feed = cls(folder, context, publisher)
        except BaseException:
            context.destroy(linger=0)
            raise
        feed._offset = _whole_lines(feed._events)
        info = FeedInfo(endpoint=feed.endpoint, pid=os.getpid(), schema=SCHEMA, offset=feed._offset)
        write_whole(folder / "feed.json", msgspec.json.encode(info))
        feed._thread.start()
        return feed

    def emit(self, event: Event) -> None:
        """Hand over an event: a few microseconds, from any thread. It is in the file within milliseconds.

        Raises: FeedFailed once the file cannot be written or the feed is closed; TypeError if the event holds a value
        that msgpack cannot carry.
        """
        self._check()
        if self._closed:
            raise FeedFailed(f"{type(event).__name__} came after the feed was closed", remedy="Close the feed last.")
        self._queue.put((event, pack(event)))
        self._wake()

    async def close(self) -> None:
        """Write and send what was emitted, tell viewers that this is the end, remove socket and `feed.json`.

        Idempotent; takes at most a second more where a viewer has stopped reading. Raises: FeedFailed if the file
        could not be written and no `emit` has said so.
        """
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._wake()
        await asyncio.to_thread(self._thread.join)
        if not self._told:
            self._check()

    async def __aenter__(self) -> "Feed":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def _events(self) -> Path:
        return self._folder / "events.jsonl"

    def _check(self) -> None:
        if self._error is not None:
            self._told = True
            raise FeedFailed(
                f"{self._events} cannot be written: {self._error}",
                remedy="Free space on that disk, then continue with --resume.",
            ) from self._error

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: a wake-up waits already; closed: the thread ended
            self._outer.send(b"\0")

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._publisher, zmq.POLLIN)
        poller.register(self._inner.fileno(), zmq.POLLIN)
        try:
            self._recall()
            with self._events.open("ab", buffering=0) as file:
                running = True
                while running:
                    ready = dict(poller.poll(1000))
                    if self._inner.fileno() in ready:
                        self._inner.recv(1 << 16)
                    batch, running = self._drain()
                    if batch:
                        file.write(b"".join(to_line(event) for event, _ in batch))
                        self._publish(batch)
                    if self._publisher in ready:
                        self._answer()
                    if not ready:
                        self._send(LIVE, b"alive", b"")
                self._send(LIVE, b"end", b"")
        except Exception as error:
            self._error = error
        finally:
            self._tidy()

    def _recall(self) -> None:
        """A resumed run goes on: its viewers get the older commits and evaluations too, under numbers below 1."""
        if not self._offset:
            return
        with self._events.open("rb") as file:
            events = [
                _readable(line)
                for line in file
                if b'_committed"' in line or b'_finished"' in line or b'_started"' in line
            ]
            older = [event for event in events if isinstance(event, RunStarted | StepCommitted | EvalFinished)]
        for number, event in enumerate(older, start=1 - len(older)):
            self._history.add(number, event, pack(event))

    def _drain(self) -> tuple[list[tuple[Event, bytes]], bool]:
        batch: list[tuple[Event, bytes]] = []
        while len(batch) < 1000:  # so that a flood does not starve the viewers' questions
            try:
                item = self._queue.get_nowait()
            except Empty:
                return batch, True
            if item is None:
                return batch, False
            batch.append(item)
        self._wake()
        return batch, True

    def _publish(self, batch: list[tuple[Event, bytes]]) -> None:
        for event, packed in batch:
            self._number += 1
            self._history.add(self._number, event, packed)
            self._send(LIVE, b"event", packed)

    def _answer(self) -> None:
        while self._publisher.poll(0):
            message = self._publisher.recv()
            topic = message[1:]
            if message[:1] == b"\1" and topic.startswith(SNAPSHOT):
                snapshot = Snapshot(schema=SCHEMA, events=list(self._history))
                self._send(topic, b"snapshot", msgspec.msgpack.encode(snapshot))

    def _send(self, topic: bytes, kind: bytes, payload: bytes) -> None:
        self._publisher.send_multipart((topic, kind, self._number.to_bytes(8, "big"), payload))

    def _tidy(self) -> None:
        self._publisher.close()
        self._context.term()
        self._inner.close()
        self._outer.close()
        (self._folder / "feed.json").unlink(missing_ok=True)
        if self.endpoint.startswith("ipc://"):
            path = Path(self.endpoint.removeprefix("ipc://"))
            path.unlink(missing_ok=True)
            if path.parent.name.startswith("thundersync-feed-"):
                shutil.rmtree(path.parent, ignore_errors=True)


def _bind(publisher: "zmq.Socket[bytes]", folder: Path, address: str) -> None:
    temporary = ""
    if not address:
        address = f"ipc://{folder.absolute()}/feed.sock"
        if not _fits(address):
            temporary = tempfile.mkdtemp(prefix="thundersync-feed-")
            address = f"ipc://{temporary}/feed.sock"
    _refuse_unsafe(address)
    publisher.setsockopt(zmq.IPV6, int("[" in address))
    try:
        publisher.bind(address)
    except zmq.ZMQError as error:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
        raise ConfigError(
            f"monitor.bind: cannot listen at {address}: {error}",
            remedy="Choose another port (`tcp://127.0.0.1:*` takes a free one), or leave monitor.bind empty.",
        ) from error


def _fits(address: str) -> bool:
    return len(os.fsencode(address.removeprefix("ipc://"))) <= min(UNIX_PATH_LIMIT, 103)


def _refuse_unsafe(address: str) -> None:
    scheme, _, place = address.partition("://")
    host = place.rpartition(":")[0]
    if scheme == "tcp" and _is_loopback(host):
        return
    if scheme == "tcp":
        raise ConfigError(
            f"monitor.bind = {address!r} would show the run, unencrypted, to every machine that reaches this one",
            remedy="Bind to tcp://127.0.0.1:5599 and watch through a tunnel: ssh -L 5599:127.0.0.1:5599 THIS_MACHINE",
        )
    if scheme != "ipc" or not _fits(address):
        raise ConfigError(
            f"monitor.bind = {address!r} is neither tcp://127.0.0.1:PORT nor ipc:// with a path of at most 103 bytes",
            remedy="Leave monitor.bind empty for a socket file in the run folder.",
        )


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    return host == "localhost"


def _readable(line: bytes) -> Event | None:
    with contextlib.suppress(msgspec.DecodeError):  # a line that a killed run left torn
        return from_line(line)
    return None


def _whole_lines(events: Path) -> int:
    """End a line that a killed run left torn, so that ours start clean; returns the file's bytes."""
    with events.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")
        return file.seek(0, os.SEEK_END)
