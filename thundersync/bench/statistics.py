"""What repeated measurements say: medians and how far they can be trusted. Pure."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import TypeVar

from msgspec import Struct

T = TypeVar("T")
RESAMPLES = 2000


class Spread(Struct, frozen=True, kw_only=True):
    """Repeated measurements of one number."""

    median: float
    low: float
    high: float
    """The quartiles."""
    median_low: float
    median_high: float
    """Where the median lies, with 95 % confidence (bootstrap)."""
    values: list[float]


def spread(values: Sequence[float], *, seed: int = 0) -> Spread:
    """Raises: StatisticsError without values."""
    chance = random.Random(seed)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(RESAMPLES))
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return Spread(
        median=statistics.median(values),
        low=low,
        high=high,
        median_low=medians[round(0.025 * (RESAMPLES - 1))],
        median_high=medians[round(0.975 * (RESAMPLES - 1))],
        values=list(values),
    )


def turns_taken(names: Sequence[T], repeats: int) -> list[list[T]]:
    """In which order each repeat works the arms: every second one backwards, and beginning elsewhere each time.

    What drifts slowly (heat, another program) then meets all arms alike: two arms are worked A B B A.
    """
    orders = []
    for repeat in range(repeats):
        shift = (repeat // 2) % len(names)
        order = [*names[shift:], *names[:shift]]
        orders.append(order[::-1] if repeat % 2 else order)
    return orders
