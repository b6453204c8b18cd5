"""The gradient parts of open cohorts: what a backward leaves behind before its advantage is known.

An open cohort keeps one part per distinct reward value; when a third value lands they are folded into two, the plain
part (sum of g) and the reward part (sum of (r - base) g). Either way one scalar per part joins them at close.
"""

from __future__ import annotations

from torch import Tensor

from thundersync.core.advantage import JoinScalars
from thundersync.learn.pool import Adjoint, Part, PartPool, add_flat, add_scaled


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
