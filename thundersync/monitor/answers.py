"""What the feed answers when a viewer asks for more than events: a step's past, a rollout word for word.

A question is a topic that a viewer subscribes to, `ask-`, what, a dash, which, a dash, and a random end; the feed's
thread answers on that topic, on the side of the run that nobody waits for. Files answer for what is written, the live
run for what is not. Knows nothing of sockets.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import zstandard

from thundersync.core.types import RolloutId
from thundersync.monitor.archive import Archive, Transcript

ASK = b"ask-"
STEP, ROLLOUT = "step", "rollout"

Look = Callable[[RolloutId], Transcript | None]
"""Of a rollout that lives now; called from the feed's thread."""
Texts = Callable[[Transcript], Mapping[int, str]]
"""Of its sampled tokens."""


def question(what: str, which: str) -> bytes:
    """The topic to subscribe to: of its own kind each time, so that every viewer gets its own answer."""
    return ASK + f"{what}-{which}-{uuid.uuid4().hex}".encode()


def step_lines(answer: bytes) -> bytes:
    """Of an answered `STEP`: lines of events, empty where there are none."""
    return zstandard.decompress(answer)


def transcript(answer: bytes) -> Transcript | None:
    """Of an answered `ROLLOUT`; None where nobody knows it."""
    raw = zstandard.decompress(answer)
    return msgspec.msgpack.decode(raw, type=Transcript) if raw else None


class Answers:
    """Answers questions about one run."""

    def __init__(self, folder: Path) -> None:
        self._archive = Archive(folder)
        self._lock = threading.Lock()
        self._look: Look | None = None
        self._texts: Texts | None = None

    def tell_live(self, look: Look, texts: Texts) -> None:
        """From now on also answer of rollouts that live."""
        with self._lock:
            self._look, self._texts = look, texts

    def answer(self, topic: bytes) -> bytes:
        """What belongs on this topic: compressed, empty inside where there is nothing to tell."""
        told = b""
        with contextlib.suppress(Exception):  # a file that is damaged or gone: no question may end the feed
            told = self._tell(topic)
        return zstandard.compress(told, 1)

    def _tell(self, topic: bytes) -> bytes:
        what, _, rest = topic.removeprefix(ASK).decode(errors="replace").partition("-")
        which = rest.rpartition("-")[0]
        if what == STEP and which.isdigit():
            return self._archive.step_lines(int(which))
        if what == ROLLOUT and (found := self._rollout(which)) is not None:
            return msgspec.msgpack.encode(found)
        return b""

    def _rollout(self, name: RolloutId) -> Transcript | None:
        with self._lock:
            look, texts = self._look, self._texts
        found = look(name) if look is not None else None
        if found is None:
            found = self._archive.rollout(name)
        if found is None or texts is None:
            return found
        return msgspec.structs.replace(found, texts=dict(texts(found)))
