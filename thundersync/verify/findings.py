"""What a proof found, as plain values: for the table, for programs, for tests."""

from __future__ import annotations

from msgspec import Struct

from thundersync.placement import Dtype


class Finding(Struct, frozen=True, kw_only=True):
    """One way, compared."""

    path: str
    order: str
    relative_l2: float
    worst: float
    """The largest, over tensors, of max |difference| / max |one-piece|; `worst_name` is whose."""
    worst_name: str
    tolerance: float
    """Of `relative_l2`."""
    same_bits: bool | None
    """As the same way the first time; None: it was not asked."""
    ok: bool
    passes: int
    parts: int
    """The most that one worker held."""
    seconds: float


class Reference(Struct, frozen=True, kw_only=True):
    """A one-piece gradient."""

    norm: float
    seconds: float
    floor: float
    """Its relative L2 from itself with every layer off by one unit in the last place; `worst` by tensor."""
    worst: float


class Proof(Struct, frozen=True, kw_only=True):
    """What `verify` found."""

    objective: str
    trains: str
    dtype: Dtype
    workers: int
    groups: int
    rollouts: int
    tokens: int
    """Sampled."""
    references: list[Reference]
    """One, or a second for rewards that fold parts."""
    notes: list[str]
    findings: list[Finding]
    ok: bool
