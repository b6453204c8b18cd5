"""What the run asks of a generation engine: exact token ids in, sampled ids and their logprobs out.

Knows nothing of chat templates, tools or training. Two engines implement it: `generate.vllm` and
`generate.transformers`; one contract test suite runs over both.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from thundersync.core.types import FinishReason


class Sampling(Struct, frozen=True, kw_only=True):
    """How one reply is sampled. Training uses temperature only: filters such as top-p would change the policy."""

    temperature: float = 1.0
    """0 is greedy."""
    max_tokens: int = 256
    """Per reply; the context limit may end it earlier (finish reason `context`)."""
    stop: tuple[str, ...] = ()
    """Stop strings. The tokens that complete one are kept: they were sampled, so they are trained on."""


class Generation(Struct, frozen=True, kw_only=True):
    """One sampled reply. `token_ids` and `logprobs` have shape [T], and T >= 1 unless aborted."""

    token_ids: list[int]
    """Includes the stop token or EOS where one was sampled."""
    logprobs: list[float]
    """Natural log of the probability each token was sampled with (after temperature)."""
    finish_reason: FinishReason
    policy_version: int
    """The version that sampled every token; a generator never mixes two in one reply."""
    cached_tokens: int = 0
    """Prompt tokens that needed no prefill."""


class TensorSpec(Struct, frozen=True, kw_only=True):
    """Where one tensor lies in the shared weight arena."""

    name: str
    """Name in the Hugging Face state dict."""
    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    shape: list[int]
    offset: int
    """Bytes from the start of the arena."""
    checksum: str = ""
    """Hex digest of the bytes as they must arrive; names the tensor that differs (see `generate.arena`)."""


class WeightArena(Struct, frozen=True, kw_only=True):
    """A file in shared memory that holds every published tensor once; the trainer writes, engines read."""

    path: str
    tensors: list[TensorSpec]
    checksum: str = ""
    """Hex digest over all tensors' names and checksums, in order."""


class EngineStats(Struct, frozen=True, kw_only=True):
    """A snapshot for gauges; cumulative counts since start."""

    running: int
    busy_s: float
    """Seconds during which at least one request was in flight."""
    prompt_tokens: int
    cached_tokens: int
    sampled_tokens: int


class Generator(Protocol):
    """One engine replica. Every method is a coroutine on the coordinator's loop and never blocks it."""

    @property
    def name(self) -> str:
        """For people: `vllm` or `transformers`."""

    @property
    def policy_version(self) -> int: ...

    @property
    def max_concurrency(self) -> int:
        """Requests that run at once without thrashing; more are queued by the engine."""

    async def start(self) -> None:
        """Load the model (version 0) and be ready. Raises EngineFailed with the log's last lines."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        """Sample one reply. Cancelling the caller aborts the request.

        Raises: EngineFailed if the engine is dead. A prompt that leaves no room for one token answers with
        finish reason `context` and no tokens, never an exception.
        """

    async def publish(self, arena: WeightArena, *, version: int) -> float:
        """Take every tensor of `arena` and become `version`; no request may be in flight. Returns seconds.

        Raises: PublishFailed when a name is missing or unknown, or a checksum differs; the engine then refuses to
        generate until a good publish.
        """

    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """End every process and file this engine made. Idempotent, bounded."""
