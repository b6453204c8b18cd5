"""What the coordinator and the transformers engine's process say to each other, and how: frames over its pipes.

A frame is 4 bytes of length (little endian) and a msgpack map. Imports nothing heavy; both sides import it.
"""

import struct
from typing import BinaryIO, TypeAlias

import msgspec
from msgspec import Struct

from thundersync.core.types import FinishReason
from thundersync.generate.base import WeightArena

LENGTH = struct.Struct("<I")


class WorkerSettings(Struct, frozen=True, kw_only=True):
    """Everything the engine's process is started with; travels as JSON on its command line."""

    model_path: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    kv_cache_bytes: int
    """For live and kept sequences together, on a CPU; on a GPU see `gpu_memory_share`."""
    gpu_memory_share: float
    """Of the memory that is free once the model is loaded."""
    seed: int
    cpus: list[int]
    threads: int


class Message(Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"): ...


class Ask(Message, frozen=True, kw_only=True):
    """Sample one reply."""

    number: int
    prompt_ids: list[int]
    temperature: float
    max_tokens: int
    """Already cut to the room left in the context."""
    stop: tuple[str, ...]
    to_limit: bool = False
    """End tokens end nothing."""

    @property
    def reusable_ids(self) -> list[int]:
        """Tokens that may come out of an earlier sequence's cache, all but the last of them."""
        return self.prompt_ids

    @property
    def cache_tokens(self) -> int:
        """Places its own cache needs."""
        return len(self.prompt_ids) + self.max_tokens


class Score(Message, frozen=True, kw_only=True):
    """Say how probable `token_ids[start:]` are; nothing is sampled."""

    number: int
    token_ids: list[int]
    start: int
    topk: int

    @property
    def reusable_ids(self) -> list[int]:
        """As `Ask.reusable_ids`: the last token before `start` predicts the first one scored, so it is computed."""
        return self.token_ids[: self.start]

    @property
    def cache_tokens(self) -> int:
        """The last token is only predicted, never fed."""
        return len(self.token_ids) - 1


class Abort(Message, frozen=True, kw_only=True):
    """Nobody waits for this request any more; it gets no answer."""

    number: int


class Publish(Message, frozen=True, kw_only=True):
    """Become `version`. Only sent when no request is in flight."""

    arena: WeightArena
    version: int


class Ready(Message, frozen=True, kw_only=True):
    """The model is loaded as version 0."""

    max_concurrency: int
    vocabulary: int
    """Rows of the output head: ids are below it."""


class Answer(Message, frozen=True, kw_only=True):
    number: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    policy_version: int
    cached_tokens: int


class Scores(Message, frozen=True, kw_only=True):
    """The answer to a `Score`; lists as in `TokenScores`."""

    number: int
    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
    policy_version: int
    cached_tokens: int


class Published(Message, frozen=True, kw_only=True):
    """`faults` is empty when every weight has arrived."""

    version: int
    faults: list[str]


ToWorker: TypeAlias = Ask | Score | Abort | Publish
FromWorker: TypeAlias = Ready | Answer | Scores | Published


def frame(message: ToWorker | FromWorker) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def read_frame(pipe: BinaryIO) -> bytes | None:
    """The next frame's body; blocks. None when the other side has closed the pipe."""
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = pipe.read(length)
    return body if len(body) == length else None
