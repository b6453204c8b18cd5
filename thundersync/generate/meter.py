"""Counts what an engine did, for the gauges. Pure bookkeeping: the clock is an argument."""

from thundersync.generate.base import EngineStats, Generation


class Meter:
    """Requests in flight, seconds with any in flight, and tokens; cumulative since start."""

    def __init__(self) -> None:
        self._running = 0
        self._busy_s = 0.0
        self._since_s = 0.0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._sampled_tokens = 0
        self._asked_tokens = 0
        self.kv_tokens = 0
        """What the engine's KV cache holds, once it is known."""

    @property
    def running(self) -> int:
        return self._running

    def began(self, now_s: float, *, prompt_tokens: int = 0) -> None:
        self._asked_tokens += prompt_tokens
        if self._running == 0:
            self._since_s = now_s
        self._running += 1

    def ended(self, now_s: float, *, prompt_tokens: int = 0) -> None:
        """`prompt_tokens` as at the request's beginning."""
        self._asked_tokens -= prompt_tokens
        self._running -= 1
        if self._running == 0:
            self._busy_s += now_s - self._since_s

    def generated(self, prompt_tokens: int, generation: Generation) -> None:
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += generation.cached_tokens
        self._sampled_tokens += len(generation.token_ids)

    def scored(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Given tokens that were scored, and how many of them needed no forward pass."""
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += cached_tokens

    def stats(self, now_s: float) -> EngineStats:
        open_s = now_s - self._since_s if self._running else 0.0
        return EngineStats(
            running=self._running,
            busy_s=self._busy_s + open_s,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            sampled_tokens=self._sampled_tokens,
            asked_tokens=self._asked_tokens,
            kv_tokens=self.kv_tokens,
        )
