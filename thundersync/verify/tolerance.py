"""How far two exact ways to one gradient may be apart: their rounding, and no more. `docs/exactness.md` says why."""

from __future__ import annotations

from thundersync.learn.messages import Comparison
from thundersync.placement import Dtype

LEAST = 1e-5
"""Relative L2 that needs no explanation: order of sums, shapes of kernels."""
TIMES_FLOOR = 4.0
NOTHING: dict[Dtype, float] = {"float32": 1e-3, "bfloat16": 0.2}
"""Where one unit in the last place moves a gradient by more than this, it has all but cancelled."""


def tolerance(floor: Comparison) -> float:
    """Relative L2 allowed, where `floor` is what one unit in the last place of every layer makes of the reference."""
    return max(LEAST, TIMES_FLOOR * floor.relative_l2)


def says_nothing(floor: Comparison, dtype: Dtype) -> bool:
    """There is (almost) no gradient: what is left of it is rounding, and comparing it proves nothing."""
    return floor.norm == 0.0 or floor.relative_l2 > NOTHING[dtype]
