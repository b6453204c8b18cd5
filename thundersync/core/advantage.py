"""Rewards of one group -> advantages, and the scalars that join its gradient parts. Pure arithmetic in float64."""

import math
import statistics
from collections.abc import Sequence

from msgspec import Struct


class AdvantageRule(Struct, frozen=True, kw_only=True):
    """How an advantage is made from a group's rewards: A = (r - mean) / (std + eps), or r - mean without std."""

    norm_by_std: bool = True
    std_unbiased: bool = True
    """Divide by n - 1 (verl, TRL) instead of n (the DeepSeekMath paper)."""
    eps: float = 1e-6

    def formula(self) -> str:
        """The rule as a person would write it."""
        if not self.norm_by_std:
            return "A = r - mean(group)"
        return f"A = (r - mean(group)) / (std(group, {'n-1' if self.std_unbiased else 'n'}) + {self.eps:g})"


class JoinScalars(Struct, frozen=True, kw_only=True):
    """An advantage as a straight line over the reward: A(r) = slope * (r - base) + offset.

    With `base` the group's first landed reward, a member equal to it adds nothing to the reward part, and rewards
    such as 1000 +- 1 lose nothing to cancellation (facts: 1.4e-7 instead of 2.5e-4 in float32).
    """

    base: float
    slope: float
    offset: float

    def advantage(self, reward: float) -> float:
        return self.slope * (reward - self.base) + self.offset


def is_flat(rewards: Sequence[float]) -> bool:
    """True if the rewards carry no signal: all equal, or too few to differ. Raises nothing on an empty group."""
    return len(set(rewards)) < 2


def advantages(rewards: Sequence[float], rule: AdvantageRule) -> list[float]:
    """The textbook form, member by member; shape [G] in, [G] out. A flat group is exactly zero.

    Source: DeepSeekMath (arXiv:2402.03300), section 4.1.2; Dr. GRPO (arXiv:2503.20783) without the std.
    """
    if is_flat(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    scale = _scale(rewards, rule)
    return [(reward - mean) * scale for reward in rewards]


def join_scalars(rewards: Sequence[float], *, base: float, rule: AdvantageRule) -> JoinScalars:
    """The same advantages as one line over the reward, so that no part waits for the group's statistics.

    The sum of A_i g_i equals slope * (sum of (r_i - base) g_i) + offset * (sum of g_i).
    """
    if is_flat(rewards):
        # Equal rewards carry no signal; joining would blow rounding noise up by 1 / eps.
        return JoinScalars(base=base, slope=0.0, offset=0.0)
    scale = _scale(rewards, rule)
    centre = math.fsum(reward - base for reward in rewards) / len(rewards)
    return JoinScalars(base=base, slope=scale, offset=-scale * centre)


def _scale(rewards: Sequence[float], rule: AdvantageRule) -> float:
    if not rule.norm_by_std:
        return 1.0
    spread = statistics.stdev(rewards) if rule.std_unbiased else statistics.pstdev(rewards)
    return 1.0 / (spread + rule.eps)
