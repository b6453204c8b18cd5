"""The gradient parts of open cohorts: what a backward leaves behind before its advantage is known.

An open cohort keeps one part per distinct reward value; when a third value lands they are folded into two, the plain
part (sum of g) and the reward part (sum of (r - base) g). Either way one scalar per part joins them at close. A part
covers the parameters and the adjoints on the prompts' keys and values. Parts are float32 whatever the model's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thundersync.core.advantage import JoinScalars

Adjoint = list[Tensor]


class Part:
    """One running sum: parameters [P] and, by group, adjoints on the prompt's keys and values."""

    def __init__(self, home: Tensor, *, spilled: bool) -> None:
        self.home, self.spilled = home, spilled
        """`home` is on the device, or in host memory for a spilled part."""
        self.adjoints: dict[str, Adjoint] = {}

    def add_adjoint(self, group_id: str, adjoint: Sequence[Tensor], weight: float) -> None:
        self.adjoints[group_id] = add_scaled(self.adjoints.get(group_id, []), adjoint, weight)


class PartPool:
    """Flat buffers [P], made once and lent again: a close costs no allocation.

    `resident` of them live on the device; what is lent beyond that lives in (pinned) host memory, and is added to
    piece by piece as gradients come.
    """

    def __init__(
        self, size: int, device: torch.device, *, resident: int = 1_000_000, dtype: torch.dtype = torch.float32
    ) -> None:
        self._size, self._device, self._resident, self._dtype = size, device, resident, dtype
        self._here: list[Tensor] = []
        self._away: list[Tensor] = []
        """Free buffers on the device and in host memory."""
        self.lent = 0
        self._lent_here = 0

    def keep(self, resident: int) -> None:
        """Let `resident` parts live on the device from now on. Between two steps, when none is lent."""
        self._resident = resident
        self._here, self._away = [], []

    def take(self) -> Part:
        spilled = self._lent_here == self._resident
        self.lent += 1
        self._lent_here += not spilled
        free = self._away if spilled else self._here
        if spilled and free:
            self.settle()
        return Part(free.pop().zero_() if free else self._new(spilled=spilled), spilled=spilled)

    def settle(self) -> None:
        """Wait for copies that are on their way to host memory: before the host touches a spilled part."""
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def give(self, part: Part) -> None:
        self.lent -= 1
        self._lent_here -= not part.spilled
        (self._away if part.spilled else self._here).append(part.home)

    def _new(self, *, spilled: bool) -> Tensor:
        if spilled:
            return torch.zeros(self._size, dtype=self._dtype, pin_memory=self._device.type == "cuda")
        return torch.zeros(self._size, dtype=self._dtype, device=self._device)


class CohortParts:
    """The parts of one open cohort."""

    def __init__(self, pool: PartPool, base: float) -> None:
        self._pool = pool
        self._base = base
        self._values: dict[float, Part] = {}
        self._folded: tuple[Part, Part] | None = None
        """(plain, reward) once three distinct values have landed."""

    def targets(self, reward: float) -> list[tuple[Part, float]]:
        """Where the gradient of a member with this reward goes, and with which weight."""
        if self._folded is None and reward not in self._values:
            if len(self._values) < 2:
                self._values[reward] = self._pool.take()
            else:
                self._fold()
        if self._folded is None:
            return [(self._values[reward], 1.0)]
        plain, rewarded = self._folded
        return [(plain, 1.0)] if reward == self._base else [(plain, 1.0), (rewarded, reward - self._base)]

    def join(self, scalars: JoinScalars | None, total: Tensor) -> dict[str, Adjoint]:
        """Add the cohort's gradient to `total` [P], return the buffers; gives each group's joined prompt adjoint.

        None throws the parts away: a flat or dropped cohort contributes exactly nothing.
        """
        adjoints: dict[str, Adjoint] = {}
        for part, coefficient in self._coefficients(scalars):
            if coefficient != 0.0:
                add_flat(total, part.home, coefficient)
                for group_id, adjoint in part.adjoints.items():
                    adjoints[group_id] = add_scaled(adjoints.get(group_id, []), adjoint, coefficient)
            self._pool.give(part)
        self._values, self._folded = {}, None
        return adjoints

    def take_over(self, held: CohortParts, reward: float) -> None:
        """Take the one part of `held`, a rollout that was worked before its reward was known: no third buffer."""
        self._pool.settle()
        (gradient,) = held._values.values()
        if self._folded is None and reward not in self._values and len(self._values) < 2:
            self._values[reward] = gradient
            return
        for part, weight in self.targets(reward):
            add_flat(part.home, gradient.home, weight)
            for group_id, adjoint in gradient.adjoints.items():
                part.add_adjoint(group_id, adjoint, weight)
        self._pool.give(gradient)

    def _coefficients(self, scalars: JoinScalars | None) -> list[tuple[Part, float]]:
        if self._folded is not None:
            plain, rewarded = self._folded
            return [
                (plain, scalars.offset if scalars else 0.0),
                (rewarded, scalars.slope if scalars else 0.0),
            ]
        return [(part, scalars.advantage(value) if scalars else 0.0) for value, part in self._values.items()]

    def _fold(self) -> None:
        self._pool.settle()
        (v1, plain), (v2, rewarded) = self._values.items()
        # plain = B1 + B2; reward part = (v1 - b) B1 + (v2 - b) B2 = (v2 - v1) B2 + (v1 - b) plain: no third buffer.
        add_flat(plain.home, rewarded.home, 1.0)
        rewarded.home.mul_(v2 - v1)
        add_flat(rewarded.home, plain.home, v1 - self._base)
        for group_id, adjoint in rewarded.adjoints.items():
            plain.add_adjoint(group_id, adjoint, 1.0)
            rewarded.adjoints[group_id] = [tensor * (v2 - v1) for tensor in adjoint]
        for group_id, adjoint in plain.adjoints.items():
            rewarded.add_adjoint(group_id, adjoint, v1 - self._base)
        self._folded, self._values = (plain, rewarded), {}


SLAB = 1 << 24
"""Elements brought from host memory at once."""


def add_flat(total: Tensor, terms: Tensor, weight: float) -> None:
    """total [P] += weight x terms [P], in place, wherever each of them lives."""
    for into, term in zip(torch.split(total, SLAB), torch.split(terms, SLAB), strict=True):
        # Waits for the copy: what comes to the host must be there before it is read.
        into.add_(term.to(into.device), alpha=weight)


def add_scaled(total: Adjoint, terms: Sequence[Tensor], weight: float) -> Adjoint:
    """total + weight x terms, in place where `total` has tensors; an empty list stands for zero on either side."""
    if not terms:
        return total
    if not total:
        return [term * weight for term in terms]
    for tensor, term in zip(total, terms, strict=True):
        tensor.add_(term, alpha=weight)
    return total
