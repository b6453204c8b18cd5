"""Twice a second: how busy engines and trainer are, and how late the event loop runs. Measures; decides nothing."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

from msgspec import Struct

from thundersync.generate.base import EngineStats, Generator
from thundersync.learn.link import WorkerLink
from thundersync.monitor.events import AnyEvent, EngineGauge, Gauges, SandboxGauge, Warned
from thundersync.monitor.lag import Lag, LoopProbe

PERIOD_S = 0.5
WINDOW = 10
"""Samples a share is taken over: 5 seconds."""
TOKENS_WINDOW = 120
"""Samples a rate of tokens is taken over: a minute. They are counted when their reply ends, so that a window shorter
than replies are would tell nothing for long, and then a burst that no engine samples at."""
LAG_ALARM_S = 1.0


class Sample(Struct, frozen=True):
    at_s: float
    engines: list[EngineStats]
    trainer_busy_s: float


class GaugeReader:
    """Samples engines, workers and the loop until it is cancelled."""

    def __init__(
        self,
        *,
        generators: Sequence[Generator],
        workers: Sequence[WorkerLink],
        queue: Callable[[], tuple[int, int]],
        tools_running: Callable[[], int],
        emit: Callable[[AnyEvent], None],
        sandboxes: Callable[[], SandboxGauge] | None = None,
    ) -> None:
        """`queue` gives (pieces waiting, parts in use)."""
        self._sandboxes = sandboxes
        self._generators = generators
        self._workers = workers
        self._queue = queue
        self._tools_running = tools_running
        self._emit = emit
        self._samples: deque[Sample] = deque(maxlen=TOKENS_WINDOW)
        self._probe = LoopProbe()

    async def run(self) -> None:
        self._samples.append(self._sample())
        self._probe.start()
        try:
            while True:
                due_s = time.monotonic() + PERIOD_S
                await asyncio.sleep(PERIOD_S)
                own_s, lag = max(0.0, time.monotonic() - due_s), self._probe.lag()
                if lag.max_s > LAG_ALARM_S:
                    self._emit(Warned(at_s=time.time(), text=f"the event loop was {lag.max_s:.1f} s late"))
                self._samples.append(self._sample())
                self._emit(self._gauges(own_s, lag))
        finally:
            self._probe.stop()

    def take_lag(self) -> float:
        """The loop's worst moment since the last call, in seconds."""
        return self._probe.take_max_s()

    def _gauges(self, own_s: float, lag: Lag) -> Gauges:
        first, last = self._samples[max(0, len(self._samples) - WINDOW)], self._samples[-1]
        earliest = self._samples[0]
        tokens_s = max(last.at_s - earliest.at_s, 1e-9)
        span_s = max(last.at_s - first.at_s, 1e-9)
        pieces, parts = self._queue()
        engines = [
            _engine(*each, span_s, tokens_s) for each in zip(earliest.engines, first.engines, last.engines, strict=True)
        ]
        return Gauges(
            at_s=time.time(),
            engine_busy=min(1.0, sum(each.busy for each in engines) / max(1, len(engines))),
            trainer_busy=min(1.0, (last.trainer_busy_s - first.trainer_busy_s) / span_s / max(1, len(self._workers))),
            generate_running=sum(each.running for each in engines),
            tools_running=self._tools_running(),
            queue_pieces=pieces,
            open_slots=parts,
            loop_lag_ms=own_s * 1000,
            loop_lag_p50_ms=lag.p50_s * 1000,
            loop_lag_p99_ms=lag.p99_s * 1000,
            loop_lag_max_ms=lag.max_s * 1000,
            tokens_per_s=sum(each.tokens_per_s for each in engines),
            engines=engines,
            sandboxes=self._sandboxes() if self._sandboxes is not None else None,
        )

    def _sample(self) -> Sample:
        now_s = time.monotonic()
        return Sample(
            now_s,
            [generator.stats() for generator in self._generators],
            sum(worker.busy_so_far_s(now_s) for worker in self._workers),
        )


def _engine(
    earliest: EngineStats, first: EngineStats, last: EngineStats, span_s: float, tokens_s: float
) -> EngineGauge:
    """What one engine did: how busy it was since `first`, what tokens its replies had since `earliest`."""
    prompt_tokens = last.prompt_tokens - earliest.prompt_tokens
    return EngineGauge(
        running=last.running,
        busy=min(1.0, (last.busy_s - first.busy_s) / span_s),
        tokens_per_s=(last.sampled_tokens - earliest.sampled_tokens) / tokens_s,
        prompt_tokens_per_s=prompt_tokens / tokens_s,
        cached_share=(last.cached_tokens - earliest.cached_tokens) / prompt_tokens if prompt_tokens else 0.0,
        kv_asked=last.asked_tokens / last.kv_tokens if last.kv_tokens else 0.0,
    )
