"""Twice a second: how busy engines and trainer are, and how late the event loop runs. Measures; decides nothing."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

from msgspec import Struct

from thundersync.generate.base import Generator
from thundersync.learn.link import WorkerLink
from thundersync.monitor.events import AnyEvent, Gauges, Warned

PERIOD_S = 0.5
WINDOW = 10
"""Samples a share is taken over: 5 seconds."""
LAG_ALARM_S = 1.0


class Sample(Struct, frozen=True):
    at_s: float
    engine_busy_s: float
    trainer_busy_s: float
    sampled_tokens: int


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
    ) -> None:
        """`queue` gives (pieces waiting, parts in use)."""
        self._generators = generators
        self._workers = workers
        self._queue = queue
        self._tools_running = tools_running
        self._emit = emit
        self._samples: deque[Sample] = deque(maxlen=WINDOW)
        self.lag_max_s = 0.0
        """Largest lateness of the loop since the last call of `take_lag`."""

    async def run(self) -> None:
        self._samples.append(self._sample())
        while True:
            due_s = time.monotonic() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            lag_s = max(0.0, time.monotonic() - due_s)
            self.lag_max_s = max(self.lag_max_s, lag_s)
            if lag_s > LAG_ALARM_S:
                self._emit(Warned(at_s=time.time(), text=f"the event loop was {lag_s:.1f} s late"))
            self._samples.append(self._sample())
            self._emit(self._gauges(lag_s))

    def take_lag(self) -> float:
        """Seconds; starts a new maximum."""
        lag_s, self.lag_max_s = self.lag_max_s, 0.0
        return lag_s

    def _gauges(self, lag_s: float) -> Gauges:
        first, last = self._samples[0], self._samples[-1]
        span_s = max(last.at_s - first.at_s, 1e-9)
        pieces, parts = self._queue()
        return Gauges(
            at_s=time.time(),
            engine_busy=min(1.0, (last.engine_busy_s - first.engine_busy_s) / span_s / len(self._generators)),
            trainer_busy=min(1.0, (last.trainer_busy_s - first.trainer_busy_s) / span_s / len(self._workers)),
            generate_running=sum(generator.stats().running for generator in self._generators),
            tools_running=self._tools_running(),
            queue_pieces=pieces,
            open_slots=parts,
            loop_lag_ms=lag_s * 1000,
            tokens_per_s=(last.sampled_tokens - first.sampled_tokens) / span_s,
        )

    def _sample(self) -> Sample:
        stats = [generator.stats() for generator in self._generators]
        now_s = time.monotonic()
        return Sample(
            now_s,
            sum(each.busy_s for each in stats),
            sum(worker.busy_so_far_s(now_s) for worker in self._workers),
            sum(each.sampled_tokens for each in stats),
        )
