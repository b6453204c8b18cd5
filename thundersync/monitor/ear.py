"""One connection to a feed, and what becomes of it: nobody there, refused, or heard.

Under `monitor.client`. It tells a viewer within seconds why there is silence, and knows nothing of events.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from types import TracebackType

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from thundersync.errors import ThundersyncError
from thundersync.monitor.keys import ViewerKeys

ADDRESS_REMEDY = (
    "Give a run's folder (runs/NAME), or its address as in its feed.json (tcp://127.0.0.1:PORT, ipc:///PATH)."
)
TRIES = 3
"""Handshakes that fail one after another before it is called a refusal: a run that just ends may break one."""


class NothingToWatch(ThundersyncError):
    """The target is neither a run folder nor an address."""

    def __init__(self, target: str) -> None:
        super().__init__(
            f"no run at {target!r}",
            remedy=ADDRESS_REMEDY,
        )


class FeedLost(ThundersyncError):
    """Nobody answers, or no longer."""


class KeysRefused(ThundersyncError):
    """The two sides do not have each other's keys."""


class Ear:
    """A subscriber's socket. Use it in `async with`; it connects when it is entered.

    Raises on entering: NothingToWatch for an address that is none.
    """

    def __init__(self, endpoint: str, keys: ViewerKeys | None = None) -> None:
        self.endpoint = endpoint
        self._keys = keys
        self._failures = 0
        self.attached = False
        """Both sides know each other now."""
        self._context: zmq.Context[zmq.Socket[bytes]]
        self._socket: zmq.Socket[bytes]
        self._monitor: zmq.Socket[bytes]
        self._waiting: zmq.asyncio.Socket
        """Only waits: messages are taken from the plain socket, ten times faster than by awaiting each."""

    async def __aenter__(self) -> Ear:
        self._context = zmq.Context()
        try:
            self._open()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        return self

    def _open(self) -> None:
        self._socket = socket = self._context.socket(zmq.SUB)
        self._monitor = socket.get_monitor_socket()
        self._waiting = zmq.asyncio.Socket.shadow(socket)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 10_000)
        if self._keys is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._keys.run)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.own.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.own.secret)
        try:
            socket.setsockopt(zmq.IPV6, int("[" in self.endpoint))
            socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            raise NothingToWatch(self.endpoint) from error

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._waiting.close(linger=0)
        self._context.destroy(linger=0)

    def subscribe(self, topic: bytes) -> None:
        self._socket.subscribe(topic)

    def unsubscribe(self, topic: bytes) -> None:
        self._socket.unsubscribe(topic)

    async def heard(self, limit_s: float) -> bool:
        """Wait until there is a message, for at most `limit_s`. Raises: KeysRefused."""
        there = bool(await self._waiting.poll(round(limit_s * 1000)))
        self._look()
        if there:
            await asyncio.sleep(0)  # others share this loop, also while messages pour
        return there

    def messages(self) -> Iterator[list[bytes]]:
        """Those that are here, at most a thousand."""
        for _ in range(1000):
            try:
                yield self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def _look(self) -> None:
        """What has become of the connection since the last look."""
        while self._monitor.poll(0):
            told = parse_monitor_message(self._monitor.recv_multipart())
            match told["event"]:
                case zmq.Event.HANDSHAKE_SUCCEEDED:
                    self.attached, self._failures = True, 0
                case zmq.Event.DISCONNECTED:
                    self.attached = False
                case zmq.Event.HANDSHAKE_FAILED_AUTH:
                    raise KeysRefused(
                        f"{self.endpoint} does not let this viewer in: its key is not one of those the run knows",
                        remedy="Copy the viewer's public key into KEYS/run/viewers and start the run again, or use the "
                        "folder that `python -m thundersync keys KEYS` made for a viewer of that run.",
                    )
                case zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
                    raise self._refused(mismatch=True)  # one is enough, and ZeroMQ does not try again
                case zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
                    self._failures += 1
        if self._failures >= TRIES:
            raise self._refused(mismatch=False)

    def _refused(self, *, mismatch: bool) -> KeysRefused:
        if self._keys is None:
            return KeysRefused(
                f"{self.endpoint} talks only to viewers with keys, or is no feed of thundersync",
                remedy="Give the viewer's folder of keys that was made for this run: --keys DIR/viewer.",
            )
        if mismatch:
            return KeysRefused(
                f"the run at {self.endpoint} has no keys, and this viewer insists on them",
                remedy="Leave --keys away, if you trust the way there (loopback, a tunnel).",
            )
        return KeysRefused(
            f"the keys are not those of the run at {self.endpoint}, or it has no keys at all",
            remedy="Its public key (run.key) must lie in the folder that --keys names: copy DIR/viewer again.",
        )


async def ask(endpoint: str, topic: bytes, *, keys: ViewerKeys | None = None, limit_s: float = 20.0) -> bytes:
    """The feed's answer to one question (`monitor.answers.question`).

    Raises: FeedLost after `limit_s` without one; KeysRefused; NothingToWatch.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s), Ear(endpoint, keys) as ear:
            ear.subscribe(topic)
            while True:
                if await ear.heard(1.0):
                    for frames in ear.messages():
                        if frames[0] == topic and len(frames) == 4:
                            return frames[3]
    raise FeedLost(f"{endpoint} did not answer within {limit_s:g} s", remedy="Check that the run is still going there.")
