"""What a run's folder can tell of the past: a step's events, a rollout word for word.

Asked by viewers, directly or through the feed (`monitor.answers`). Reads only; the run writes without knowing of it.
Knows nothing of sockets and screens.
"""

import contextlib
import io
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import zstandard
from msgspec import Struct

from thundersync.core.types import GroupId, Message, Outcome, RolloutId, TaskId, TokenSequence, Turn
from thundersync.monitor.events import AnyEvent, StepOpened, from_line

CHUNK = 1 << 20
SLICE_LIMIT = 64 << 20
"""Bytes of a step's events that are told at most."""


class Transcript(Struct, frozen=True, kw_only=True):
    """A rollout as far as it has come: the fields of `core.types.Rollout`, whose outcome may still be open."""

    rollout_id: RolloutId
    group_id: GroupId
    task_id: TaskId
    policy_version: int
    messages: list[Message]
    sequences: list[TokenSequence]
    turns: list[Turn]
    outcome: Outcome | None = None
    started_s: float = 0.0
    score_s: float = 0.0
    attempt: int = 1
    texts: dict[int, str] = {}
    """Of the sampled token ids, by id; empty where no tokenizer was at hand."""


class Archive:
    """One run's folder. Every byte of the events is looked at once, and not before somebody asks, from any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._scanning = threading.Lock()  # two scans at once would each count what the other has read
        self._scanned = 0
        self._steps: dict[int, tuple[int, int]] = {}
        """First byte of each step and the byte after its last; 0 while it has not ended."""
        self._latest: int | None = None

    def step_lines(self, step: int) -> bytes:
        """The events from a step's opening on, as lines, up to the next step's or to what is written so far.

        Empty for a step that never began. Of one that a resumed run worked twice: the later.
        """
        with self._scanning:
            self._scan()
            if step not in self._steps:
                return b""
            start, end = self._steps[step]
            end = end or self._scanned
        with (self._folder / "events.jsonl").open("rb") as file:
            file.seek(start)
            content = file.read(min(end - start, SLICE_LIMIT))
        return content[: content.rfind(b"\n") + 1]

    def rollout(self, name: RolloutId) -> Transcript | None:
        """A rollout whose step (or evaluation) has been written; None for any other."""
        kind, _, rest = name.rpartition("eval-")
        number = rest.partition("-")[0]
        path = self._folder / "rollouts" / f"{'eval' if name.startswith('eval-') else 'step'}-{number}.jsonl.zst"
        if kind or not number.isdigit() or not path.is_file():
            return None
        wanted = b'{"rollout_id":' + msgspec.json.encode(name) + b","
        with path.open("rb") as file:
            reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            for line in io.BufferedReader(reader, CHUNK):
                if line.startswith(wanted):
                    return msgspec.json.decode(line, type=Transcript)
        return None

    def token_texts(self, transcript: Transcript) -> dict[int, str]:
        """Texts of its sampled tokens, by the tokenizer of the run's newest checkpoint; empty without one."""
        files = sorted(self._folder.glob("checkpoints/*/tokenizer.json"))
        return texts_of(transcript, files[-1]) if files else {}

    def _scan(self) -> None:
        """Find the steps in what was written since the last time."""
        with contextlib.suppress(FileNotFoundError), (self._folder / "events.jsonl").open("rb") as file:
            file.seek(self._scanned)
            # By pieces, not by lines: another thread of this process runs a training.
            while whole := _whole_lines(file):
                for found in _BEGINNINGS.finditer(whole):
                    self._end_latest(self._scanned + found.start())
                    line = whole[found.start() : whole.index(b"\n", found.start())]
                    with contextlib.suppress(msgspec.DecodeError):
                        event = from_line(line)
                        if isinstance(event, StepOpened):
                            self._steps[event.step] = (self._scanned + found.start(), 0)
                            self._latest = event.step
                self._scanned += len(whole)

    def _end_latest(self, at: int) -> None:
        if self._latest is not None:
            self._steps[self._latest] = (self._steps[self._latest][0], at)
            self._latest = None


_BEGINNINGS = re.compile(rb'\{"kind":"(?:step_opened|run_started)"')
"""Quotes in texts are escaped in JSON, so that this begins a line."""


def _whole_lines(file: BinaryIO) -> bytes:
    """The next megabyte or so, to the end of a line; empty where no line ends any more. Leaves the file there."""
    begin, content = file.tell(), b""
    while more := file.read(CHUNK):
        content += more
        if (end := content.rfind(b"\n") + 1) > 0:
            file.seek(begin + end)
            return content[:end]
    file.seek(begin)
    return b""


def events_of(lines: bytes) -> Iterator[AnyEvent]:
    """The events of `Archive.step_lines`; torn lines and unknown kinds are left out."""
    for line in lines.splitlines():
        with contextlib.suppress(msgspec.DecodeError):
            event = from_line(line)
            if event is not None:
                yield event


def sampled_ids(transcript: Transcript) -> set[int]:
    return {
        token
        for sequence in transcript.sequences
        for token, sampled in zip(sequence.token_ids, sequence.sampled, strict=False)
        if sampled
    }


def texts_of(transcript: Transcript, tokenizer_file: Path) -> dict[int, str]:
    """Texts of the sampled tokens, by id; empty where the file cannot be read as a tokenizer."""
    from tokenizers import Tokenizer  # only who looks at tokens pays for it

    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception:  # the library raises plain Exceptions; without texts the ids are shown
        return {}
    decode: Callable[[list[int]], str] = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)  # noqa: E731
    return {token: decode([token]) for token in sampled_ids(transcript)}
