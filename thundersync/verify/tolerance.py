"""How far two exact ways to one gradient may be apart: their rounding, and no more. `docs/exactness.md` says why."""

from __future__ import annotations

from thundersync.placement import Dtype

FLOAT32 = 1e-5
WITH_ENTROPY = 2e-4
"""The entropy term decorrelates the rounding of a few channels with massive activations: measured up to 6e-5."""
BFLOAT16 = 5e-2
"""Each way is about 2.7e-2 from a float64 truth, whatever its order."""
NOTHING = 1e-3
"""A gradient this small beside what was added up has cancelled: its rounding says nothing."""


def tolerance(dtype: Dtype, *, entropy: bool, norm: float, mass: float) -> float:
    """Relative L2 allowed between streamed and one-piece gradient; `norm` is the latter's, `mass` its textbook's.

    Rounding is relative to what is added up, not to what is left of it: a gradient that is smaller than its mass is
    allowed that much more.
    """
    base = BFLOAT16 if dtype == "bfloat16" else WITH_ENTROPY if entropy else FLOAT32
    return base * max(1.0, mass / norm) if norm else base


def says_nothing(*, norm: float, mass: float) -> bool:
    """There is (almost) no gradient to compare: nothing is proved by comparing it."""
    return norm <= NOTHING * mass
