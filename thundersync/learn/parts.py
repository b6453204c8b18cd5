"""The gradient parts of open groups: what a backward leaves behind before the group's statistics are known.

An open group keeps one part per distinct reward value; when a third value lands they are folded into two, the plain
part (sum of g) and the reward part (sum of (r - base) g). Either way one scalar per part joins them at close. A part
covers the parameters and the adjoints on the prompt's keys and values. Parts are float32 whatever the model's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thundersync.core.advantage import JoinScalars


class PartPool:
    """Flat float32 buffers [P], made once and lent again: a group's close costs no allocation."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._device = size, device
        self._free: list[Tensor] = []
        self.lent = 0

    def take(self) -> Tensor:
        self.lent += 1
        if self._free:
            return self._free.pop().zero_()
        return torch.zeros(self._size, dtype=torch.float32, device=self._device)

    def give(self, buffer: Tensor) -> None:
        self.lent -= 1
        self._free.append(buffer)


class Part:
    """One running sum: parameters [P] and, once a backward reached the prompt, adjoints on its keys and values."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.adjoint: list[Tensor] = []

    def add_adjoint(self, adjoint: Sequence[Tensor], weight: float) -> None:
        self.adjoint = add_scaled(self.adjoint, adjoint, weight)


class GroupParts:
    """The parts of one open group."""

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
                self._values[reward] = Part(self._pool.take())
            else:
                self._fold()
        if self._folded is None:
            return [(self._values[reward], 1.0)]
        plain, rewarded = self._folded
        return [(plain, 1.0)] if reward == self._base else [(plain, 1.0), (rewarded, reward - self._base)]

    def join(self, scalars: JoinScalars | None, total: Tensor) -> list[Tensor]:
        """Add the group's gradient to `total` [P], return the buffers; gives the joined prompt adjoint.

        None throws the parts away: a flat or dropped group contributes exactly nothing.
        """
        adjoint: list[Tensor] = []
        for part, coefficient in self._coefficients(scalars):
            if coefficient != 0.0:
                total.add_(part.buffer, alpha=coefficient)
                adjoint = add_scaled(adjoint, part.adjoint, coefficient)
            self._pool.give(part.buffer)
        self._values, self._folded = {}, None
        return adjoint

    def _coefficients(self, scalars: JoinScalars | None) -> list[tuple[Part, float]]:
        if self._folded is not None:
            plain, rewarded = self._folded
            return [
                (plain, scalars.offset if scalars else 0.0),
                (rewarded, scalars.slope if scalars else 0.0),
            ]
        return [(part, scalars.advantage(value) if scalars else 0.0) for value, part in self._values.items()]

    def _fold(self) -> None:
        (v1, plain), (v2, rewarded) = self._values.items()
        # plain = B1 + B2; reward part = (v1 - b) B1 + (v2 - b) B2 = (v2 - v1) B2 + (v1 - b) plain: no third buffer.
        plain.buffer.add_(rewarded.buffer)
        rewarded.buffer.mul_(v2 - v1).add_(plain.buffer, alpha=v1 - self._base)
        plain.add_adjoint(rewarded.adjoint, 1.0)
        rewarded.adjoint = add_scaled([t * (v2 - v1) for t in rewarded.adjoint], plain.adjoint, v1 - self._base)
        self._folded, self._values = (plain, rewarded), {}


def add_scaled(total: list[Tensor], terms: Sequence[Tensor], weight: float) -> list[Tensor]:
    """total + weight x terms, in place where `total` has tensors; an empty list stands for zero on either side."""
    if not terms:
        return total
    if not total:
        return [term * weight for term in terms]
    for tensor, term in zip(total, terms, strict=True):
        tensor.add_(term, alpha=weight)
    return total
