"""An engine that comes back: when the one inside dies, it is started anew with the weights of the open step.

The rollouts that ran on it fail as `engine` at once and are tried again under the same policy version; new requests
wait for the new engine. One that dies too often, or cannot come back, ends the run. A request that fails on a living
engine is passed on as it is.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from thundersync.errors import EngineDied, EngineFailed, EngineLost, PublishFailed
from thundersync.generate.base import EngineStats, Generation, Generator, Sampling, TokenScores, WeightArena
from thundersync.monitor.events import AnyEvent, Warned

MAX_RESTARTS = 5
"""Per run. More is not bad luck."""


class SupervisedGenerator:
    """Implements `Generator` over another one; `make` is given the number of restarts so far, for the seed."""

    def __init__(self, make: Callable[[int], Generator], emit: Callable[[AnyEvent], None]) -> None:
        self._make = make
        self._emit = emit
        self._inner = make(0)
        self._arena: WeightArena | None = None
        self._version = 0
        self._restarts = 0
        self._mending: asyncio.Task[None] | None = None
        self._past = EngineStats(running=0, busy_s=0.0, prompt_tokens=0, cached_tokens=0, sampled_tokens=0)

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def max_concurrency(self) -> int:
        return self._inner.max_concurrency

    async def start(self) -> None:
        await self._inner.start()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        """As the engine inside. Raises: EngineFailed (this request), EngineLost (the run)."""
        await self._mended()
        inner = self._inner
        try:
            return await inner.generate(prompt_ids, sampling, request_id=request_id)
        except EngineDied as error:
            self._mend(inner, error)
            raise

    async def score(self, token_ids: Sequence[int], *, start: int, topk: int = 0, request_id: str) -> TokenScores:
        """As the engine inside. Raises: EngineFailed (this request), EngineLost (the run)."""
        await self._mended()
        inner = self._inner
        try:
            return await inner.score(token_ids, start=start, topk=topk, request_id=request_id)
        except EngineDied as error:
            self._mend(inner, error)
            raise

    async def publish(self, arena: WeightArena, *, version: int) -> float:
        """As the engine inside; one that died meanwhile comes back with these weights. Raises: PublishFailed."""
        await self._mended()
        self._arena, self._version = arena, version
        inner = self._inner
        try:
            return await inner.publish(arena, version=version)
        except EngineDied as error:
            self._mend(inner, error)
            await self._mended()
            return 0.0

    def stats(self) -> EngineStats:
        now, past = self._inner.stats(), self._past
        return EngineStats(
            running=now.running,
            busy_s=past.busy_s + now.busy_s,
            prompt_tokens=past.prompt_tokens + now.prompt_tokens,
            cached_tokens=past.cached_tokens + now.cached_tokens,
            sampled_tokens=past.sampled_tokens + now.sampled_tokens,
            asked_tokens=now.asked_tokens,
            kv_tokens=now.kv_tokens,
        )

    async def close(self) -> None:
        if self._mending is not None and not self._mending.done():
            self._mending.cancel()
            await asyncio.wait({self._mending})
        await self._inner.close()

    async def _mended(self) -> None:
        """Wait for a replacement that is under way; the waiter may be cancelled, the replacement goes on."""
        if self._mending is not None:
            await asyncio.shield(self._mending)

    def _mend(self, dead: Generator, error: EngineDied) -> None:
        """Begin to replace `dead`, unless another request's failure has done so."""
        if self._inner is dead and (self._mending is None or self._mending.done()):
            self._mending = asyncio.create_task(self._replace(dead, error), name="mend-engine")

    async def _replace(self, dead: Generator, error: EngineDied) -> None:
        if self._restarts >= MAX_RESTARTS:
            raise EngineLost(f"the {dead.name} engine died {self._restarts + 1} times: {error.message}")
        self._restarts += 1
        text = f"the {dead.name} engine died and is restarted: {error.message}"
        self._emit(Warned(at_s=time.time(), text=text))
        total = self.stats()
        await dead.close()
        fresh = self._make(self._restarts)
        try:
            await fresh.start()
            if self._arena is not None:
                await fresh.publish(self._arena, version=self._version)
        except (EngineFailed, PublishFailed) as again:
            await fresh.close()
            raise EngineLost(f"the {dead.name} engine could not be restarted: {again.message}") from error
        except BaseException:
            await fresh.close()
            raise
        self._past, self._inner = total, fresh
