"""The run's voice: every event goes to `events.jsonl` and to whoever watches, and nobody who watches can slow the run.

The engine emits, one thread writes and publishes. It knows nothing of what events mean. On the wire (ZeroMQ) a viewer
subscribes to `live`, then to a topic of its own, `snapshot-...`; the publisher sees that second subscription and
answers it, on the same socket and so in order, with what is kept of the past. Numbers join them without gap or double.
Frames: topic, kind (`event`, `snapshot`, `alive`, `answer`, `end`), number (8 bytes, big endian) of the last event,
payload. Topics that begin with `ask-` are questions (`monitor.answers`). Who may attach is `monitor.door`'s.
"""

import asyncio
import contextlib
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue

import msgspec
import zmq

from thundersync.errors import ConfigError, ThundersyncError
from thundersync.monitor.answers import ASK, Answers, Look, Texts
from thundersync.monitor.door import Gate, bind_in, lock, refuse_unsafe
from thundersync.monitor.door import bind as bind_at
from thundersync.monitor.events import SCHEMA, EvalFinished, Event, RunStarted, StepCommitted, from_line, pack, to_line
from thundersync.monitor.history import History
from thundersync.monitor.keys import RunKeys
from thundersync.rundir import write_whole

LIVE = b"live"
SNAPSHOT = b"snapshot-"
BATCH_S = 0.002
"""Events are written and sent together with those that follow within this time: each wake-up costs the run a switch of
threads, an event in a batch nothing."""
QUESTIONS_AT_ONCE = 8
"""Answered before the events that came meanwhile are sent."""


class FeedFailed(ThundersyncError):
    """Events can no longer be written; what happened would be lost."""


class FeedInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`feed.json`: where a live run can be watched. It exists while the run does."""

    endpoint: str
    pid: int
    schema: int
    offset: int
    """Bytes of `events.jsonl` before the first event of this process."""
    remote: str = ""
    """Where viewers with keys attach from other machines."""


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    schema: int
    events: list[tuple[int, bytes]]
    origin: str = ""
    """Names the process that counts: its numbers begin anew when the run is started again."""


class Feed:
    """Takes events from the event loop; `open` starts its thread, `close` ends it."""

    def __init__(
        self,
        folder: Path,
        context: "zmq.Context[zmq.Socket[bytes]]",
        doors: list["zmq.Socket[bytes]"],
        gate: Gate | None,
    ) -> None:
        """`doors` are bound publishers: the one for this machine, and, behind the gate, the one for others."""
        self.endpoint = doors[0].get_string(zmq.LAST_ENDPOINT)
        self.remote = doors[1].get_string(zmq.LAST_ENDPOINT) if len(doors) > 1 else ""
        self._folder, self._offset = folder, 0
        self._context, self._doors, self._gate = context, doors, gate
        self._queue: SimpleQueue[tuple[Event, bytes] | None] = SimpleQueue()
        self._history, self._number = History(), 0
        self._origin = uuid.uuid4().hex
        self._answers = Answers(folder)
        self._closed, self._told = False, False
        self._woken = False
        """The thread is going to look at the queue."""
        self._listener: Callable[[Event], None] | None = None
        self._error: Exception | None = None
        self._inner, self._outer = socket.socketpair()
        for end in (self._inner, self._outer):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name="feed", daemon=True)

    @classmethod
    def open(cls, folder: Path, *, bind: str = "", keys: RunKeys | None = None) -> "Feed":
        """Bind, announce in `feed.json`, and start. `bind` empty: a socket file in the run folder, or, where its path
        is too long for one, in a private temporary folder. With `keys` that socket file is there for this machine, and
        `bind` is for viewers with keys, encrypted.

        Raises: ConfigError if `bind` cannot be used or would be open to other machines.
        """
        if keys is not None and not bind:
            raise ConfigError(
                "monitor.keys is set, but monitor.bind is not: nobody could attach from another machine",
                remedy='Set monitor.bind = "tcp://0.0.0.0:5599", or leave monitor.keys away.',
            )
        if bind:
            refuse_unsafe(bind, keyed=keys is not None)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            doors = [_publisher(context)]
            gate = None
            if keys is not None:
                gate = Gate(context, keys)
                doors.append(_publisher(context))
                lock(doors[1], keys)
            if bind:
                bind_at(doors[-1], bind)
            if keys is not None or not bind:
                bind_in(doors[0], folder)
            feed = cls(folder, context, doors, gate)
        except BaseException:
            context.destroy(linger=0)
            raise
        feed._offset = _whole_lines(feed._events)
        info = FeedInfo(endpoint=feed.endpoint, pid=os.getpid(), schema=SCHEMA, offset=feed._offset, remote=feed.remote)
        write_whole(folder / "feed.json", msgspec.json.encode(info))
        feed._thread.start()
        return feed

    def tell_live(self, look: Look, texts: Texts) -> None:
        """Let viewers read rollouts that live. Both are called from the feed's thread, when somebody looks at one."""
        self._answers.tell_live(look, texts)

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
        if self._listener is not None:
            self._listener(event)

    def listen(self, listener: Callable[[Event], None]) -> None:
        """From now on call `listener` with each event, where it is emitted: it must not wait, and must not raise."""
        self._listener = listener

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
        if self._woken:
            return
        self._woken = True
        with contextlib.suppress(OSError):  # full: a wake-up waits already; closed: the thread ended
            self._outer.send(b"\0")

    def _serve(self) -> None:
        poller = zmq.Poller()
        listening = [*self._doors, *([self._gate.socket] if self._gate is not None else [])]
        for each in listening:
            poller.register(each, zmq.POLLIN)
        poller.register(self._inner.fileno(), zmq.POLLIN)
        try:
            self._recall()
            with self._events.open("ab", buffering=0) as file:
                running = True
                while running:
                    ready = dict(poller.poll(1000))
                    if self._inner.fileno() in ready:
                        self._inner.recv(1 << 16)
                        time.sleep(BATCH_S)
                        self._woken = False  # before the queue is read: what comes later wakes again
                    batch, running = self._drain()
                    if batch:
                        file.write(b"".join(to_line(event) for event, _ in batch))
                        self._publish(batch)
                    if self._gate is not None:
                        self._gate.answer()
                    for door in self._doors:
                        if door in ready:
                            self._answer(door)
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

    def _answer(self, door: "zmq.Socket[bytes]") -> None:
        for _ in range(QUESTIONS_AT_ONCE):
            if not door.poll(0):
                return
            message = door.recv()
            topic = message[1:]
            if message[:1] != b"\1":
                continue
            if topic.startswith(SNAPSHOT):
                snapshot = Snapshot(schema=SCHEMA, events=list(self._history), origin=self._origin)
                self._send(topic, b"snapshot", msgspec.msgpack.encode(snapshot), [door])
            elif topic.startswith(ASK):
                self._send(topic, b"answer", self._answers.answer(topic), [door])

    def _send(self, topic: bytes, kind: bytes, payload: bytes, doors: "list[zmq.Socket[bytes]] | None" = None) -> None:
        for door in doors if doors is not None else self._doors:
            door.send_multipart((topic, kind, self._number.to_bytes(8, "big"), payload))

    def _tidy(self) -> None:
        for door in self._doors:
            door.close()
        if self._gate is not None:
            self._gate.socket.close()
        self._context.term()
        self._inner.close()
        self._outer.close()
        (self._folder / "feed.json").unlink(missing_ok=True)
        for endpoint in (self.endpoint, self.remote):
            if endpoint.startswith("ipc://"):
                path = Path(endpoint.removeprefix("ipc://"))
                path.unlink(missing_ok=True)
                if path.parent.name.startswith("thundersync-feed-"):
                    shutil.rmtree(path.parent, ignore_errors=True)


def _publisher(context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Socket[bytes]":
    publisher = context.socket(zmq.XPUB)
    # A viewer that stopped reading costs this many messages of memory, then it misses some: it never holds us up.
    publisher.setsockopt(zmq.SNDHWM, 10_000)
    publisher.setsockopt(zmq.LINGER, 1000)
    publisher.setsockopt(zmq.MAXMSGSIZE, 1024)
    return publisher


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
