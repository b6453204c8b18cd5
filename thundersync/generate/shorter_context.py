"""An engine whose replies end earlier than its context does: what lies beyond is for another's prompt.

A policy that teaches itself is shown more as teacher than it was as student, in the same engine. So the engine's
context is longer than `model.max_model_len`, and rollouts see it through this.
"""

from collections.abc import Sequence

import msgspec

from thundersync.generate.base import EngineStats, Generation, Generator, Sampling, TokenScores, WeightArena


class ShorterContext:
    """Implements `Generator` over another one, whose lifetime stays its owner's: `start` and `close` do nothing."""

    def __init__(self, inner: Generator, *, context_tokens: int) -> None:
        self._inner = inner
        self._context_tokens = context_tokens

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def policy_version(self) -> int:
        return self._inner.policy_version

    @property
    def max_concurrency(self) -> int:
        return self._inner.max_concurrency

    async def start(self) -> None:
        """Its owner starts it."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        """As the engine inside; a reply that reaches the shorter context ends with the reason `context`."""
        room = self._context_tokens - len(prompt_ids)
        if room <= 0:
            version = self._inner.policy_version
            return Generation(token_ids=[], logprobs=[], finish_reason="context", policy_version=version)
        if sampling.max_tokens <= room:
            return await self._inner.generate(prompt_ids, sampling, request_id=request_id)
        cut = msgspec.structs.replace(sampling, max_tokens=room)
        reply = await self._inner.generate(prompt_ids, cut, request_id=request_id)
        if reply.finish_reason == "length":
            return msgspec.structs.replace(reply, finish_reason="context")
        return reply

    async def score(self, token_ids: Sequence[int], *, start: int, topk: int = 0, request_id: str) -> TokenScores:
        return await self._inner.score(token_ids, start=start, topk=topk, request_id=request_id)

    async def publish(self, arena: WeightArena, *, version: int) -> float:
        return await self._inner.publish(arena, version=version)

    def stats(self) -> EngineStats:
        return self._inner.stats()

    async def close(self) -> None:
        """Its owner closes it."""
