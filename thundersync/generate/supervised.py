"""An engine that comes back: when the one inside dies, it is started anew with the weights of the open step.

The rollouts that ran on it fail as `engine` and are tried again under the same policy version. An engine that dies
too often, or cannot come back, ends the run.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from thundersync.errors import EngineFailed, EngineLost
from thundersync.generate.base import EngineStats, Generation, Generator, Sampling, WeightArena
from thundersync.monitor.events import AnyEvent, Warned

MAX_RESTARTS = 5
"""Per run. More is not bad luck."""


class SupervisedGenerator:
    """Implements `Generator` over another one made by `make`."""

    def __init__(self, make: Callable[[], Generator], emit: Callable[[AnyEvent], None]) -> None:
        self._make = make
        self._emit = emit
        self._inner = make()
        self._arena: WeightArena | None = None
        self._restarts = 0
        self._mending = asyncio.Lock()
        self._past = EngineStats(running=0, busy_s=0.0, prompt_tokens=0, cached_tokens=0, sampled_tokens=0)

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
        await self._inner.start()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        """As the engine inside. Raises: EngineFailed (this request; the engine is back by then), EngineLost."""
        inner = self._inner
        try:
            return await inner.generate(prompt_ids, sampling, request_id=request_id)
        except EngineFailed as error:
            await self._mend(inner, error)
            raise

    async def publish(self, arena: WeightArena, *, version: int) -> float:
        inner = self._inner
        try:
            seconds = await inner.publish(arena, version=version)
        except EngineFailed as error:
            self._arena = arena
            await self._mend(inner, error, version=version)
            seconds = 0.0
        self._arena = arena
        return seconds

    def stats(self) -> EngineStats:
        now, past = self._inner.stats(), self._past
        return EngineStats(
            running=now.running,
            busy_s=past.busy_s + now.busy_s,
            prompt_tokens=past.prompt_tokens + now.prompt_tokens,
            cached_tokens=past.cached_tokens + now.cached_tokens,
            sampled_tokens=past.sampled_tokens + now.sampled_tokens,
        )

    async def close(self) -> None:
        await self._inner.close()

    async def _mend(self, broken: Generator, error: EngineFailed, *, version: int | None = None) -> None:
        """Replace `broken` unless another rollout's failure has done so already."""
        async with self._mending:
            if self._inner is not broken:
                return
            if self._restarts >= MAX_RESTARTS:
                raise EngineLost(f"the {broken.name} engine failed {self._restarts + 1} times: {error.message}")
            self._restarts += 1
            self._emit(
                Warned(at_s=time.time(), text=f"the {broken.name} engine failed and is restarted: {error.message}")
            )
            self._past = self.stats()
            bound_to = broken.policy_version if version is None else version
            await broken.close()
            try:
                fresh = self._make()
                await fresh.start()
                if self._arena is not None:
                    await fresh.publish(self._arena, version=bound_to)
            except EngineFailed as again:
                raise EngineLost(f"the {broken.name} engine could not be restarted: {again.message}") from error
            self._inner = fresh
