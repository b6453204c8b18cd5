"""How long calls took, by kind: figures for a run's panel and for finding an overloaded daemon. Knows no runtime."""

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from msgspec import Struct

WINDOW = 2048
"""Calls of a kind that the percentiles are taken over: the latest. Memory stays the same however long a run is."""


class Latency(Struct, frozen=True):
    """Of the latest calls of one kind; `count`, `failed` and `max_s` of all there were."""

    count: int
    failed: int
    p50_s: float
    p95_s: float
    max_s: float


class Latencies:
    """Collects the seconds of calls."""

    def __init__(self) -> None:
        self._latest: dict[str, deque[float]] = {}
        self._count: dict[str, int] = {}
        self._failed: dict[str, int] = {}
        self._max: dict[str, float] = {}

    def add(self, kind: str, seconds: float, *, failed: bool = False) -> None:
        self._latest.setdefault(kind, deque(maxlen=WINDOW)).append(seconds)
        self._count[kind] = self._count.get(kind, 0) + 1
        self._failed[kind] = self._failed.get(kind, 0) + failed
        self._max[kind] = max(self._max.get(kind, 0.0), seconds)

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Time a call, one that raises too. A cancelled call says nothing about the daemon and does not count."""
        started = time.monotonic()
        try:
            yield
        except Exception:
            self.add(kind, time.monotonic() - started, failed=True)
            raise
        self.add(kind, time.monotonic() - started)

    def read(self) -> dict[str, Latency]:
        """The figures so far, by kind."""
        return {
            kind: Latency(
                self._count[kind],
                self._failed[kind],
                percentile(latest, 0.50),
                percentile(latest, 0.95),
                self._max[kind],
            )
            for kind, latest in self._latest.items()
        }


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed; 0.0 of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
