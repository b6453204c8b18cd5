"""The engine of an evaluation that needs none: it has seats for rollouts, and is never asked for a token."""

from __future__ import annotations

from collections.abc import Sequence

from thundersync.errors import EngineFailed
from thundersync.generate.base import EngineStats, Generation, Sampling, TokenScores, WeightArena


class NoEngine:
    """Implements `Generator`. `seats`: rollouts at once."""

    def __init__(self, seats: int) -> None:
        self._seats = seats

    @property
    def name(self) -> str:
        return "no"

    @property
    def policy_version(self) -> int:
        return 0

    @property
    def max_concurrency(self) -> int:
        return self._seats

    async def start(self) -> None:
        """Nothing starts."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        raise EngineFailed(f"{request_id} asked for tokens, and there is no engine here")

    async def score(self, token_ids: Sequence[int], *, start: int, topk: int = 0, request_id: str) -> TokenScores:
        raise EngineFailed(f"{request_id} asked for scores, and there is no engine here")

    async def publish(self, arena: WeightArena, *, version: int) -> float:
        return 0.0

    def stats(self) -> EngineStats:
        return EngineStats(running=0, busy_s=0.0, prompt_tokens=0, cached_tokens=0, sampled_tokens=0)

    async def close(self) -> None:
        """Nothing to end."""
