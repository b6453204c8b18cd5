"""What the run asks of a generation engine: exact token ids in, sampled ids and their logprobs out.

The same engine scores given tokens: a teacher is an engine that is only asked for scores and never published to.
Knows nothing of chat templates, tools or training. Two engines implement it: `generate.vllm` and
`generate.transformers`; one contract test suite runs over both.
"""

import math
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from thundersync.core.types import FinishReason

# A probability of one, after rounding in bfloat16.
ROUNDING = 1e-2


class Sampling(Struct, frozen=True, kw_only=True):
    """How one reply is sampled. Training uses temperature only: filters such as top-p would change the policy."""

    temperature: float = 1.0
    """0 is greedy."""
    max_tokens: int = 256
    """Per reply; the context limit may end it earlier (finish reason `context`)."""
    stop: tuple[str, ...] = ()
    """Stop strings. The tokens that complete one are kept: they were sampled, so they are trained on."""
    to_limit: bool = False
    """Only `max_tokens` or a full context ends the reply; end tokens are sampled like any other. For workloads whose
    lengths are given."""


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


class TokenScores(Struct, frozen=True, kw_only=True):
    """What a model says of N given tokens, each after everything before it: natural logs, at temperature 1."""

    logprobs: list[float]
    """[N], of the given tokens themselves."""
    top_ids: list[list[int]]
    """[N][k], the k most probable tokens at each place, best first; empty when k is 0."""
    top_logprobs: list[list[float]]
    """[N][k], theirs."""
    policy_version: int
    """The version that scored every token; 0 for a model that is never published to."""

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers, 8 each: what a payload grows with."""
        return 8 * (len(self.logprobs) + sum(map(len, self.top_ids)) + sum(map(len, self.top_logprobs)))

    def fault(self, *, count: int, topk: int) -> str:
        """Why these are not scores of `count` tokens with `topk` alternatives, as a sentence; empty when they are."""
        if len(self.logprobs) != count:
            return f"{len(self.logprobs)} tokens were scored instead of {count}"
        places = count if topk else 0
        for name, rows in (("ids", self.top_ids), ("logprobs", self.top_logprobs)):
            if len(rows) != places or any(len(row) != topk for row in rows):
                return f"the most probable {name} are not {topk} at each of {count} places"
        # A sum of finite logprobs is finite, and summing is much faster than asking each.
        if not all(math.isfinite(sum(row)) for row in (self.logprobs, *self.top_logprobs)):
            return "a logprob is not finite"
        if any(max(row, default=0.0) > ROUNDING for row in (self.logprobs, *self.top_logprobs)):
            return "a logprob is above zero, so it is not the log of a probability"
        return ""


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
    asked_tokens: int = 0
    """Prompt tokens of the requests in flight; a prefix that several share counts for each."""
    kv_tokens: int = 0
    """Tokens that the KV cache holds; 0 where the engine does not say."""


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

    async def score(self, token_ids: Sequence[int], *, start: int, topk: int = 0, request_id: str) -> TokenScores:
        """Logprobs of `token_ids[start:]`, each given all tokens before it, at temperature 1; nothing is sampled.

        `1 <= start < len(token_ids)`, and `token_ids` may fill the context to its last token. With `topk` also the
        most probable tokens of each place. A conversation that grows pays only for what is new, where its beginning
        is still cached. Cancelling the caller aborts the request.
        Raises: EngineFailed when the request is impossible, a logprob is not finite, or the engine is dead.
        """

    async def publish(self, arena: WeightArena, *, version: int) -> float:
        """Take every tensor of `arena` and become `version`; no request may be in flight. Returns seconds.

        Raises: PublishFailed when a name is missing or unknown, or a checksum differs; the engine then refuses to
        generate until a good publish.
        """

    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """End every process and file this engine made. Idempotent, bounded."""
