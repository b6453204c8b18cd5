"""Rewards -> advantages, and the scalars that join gradient parts. Pure arithmetic in float64."""

import math
import statistics
from collections.abc import Sequence

from msgspec import Struct


class AdvantageRule(Struct, frozen=True, kw_only=True):
    """How an advantage is made from the rewards it is compared with: A = (r - mean) / (std + eps), or without std.

    `leave_one_out`: each reward against the mean of the others, r - mean(others) = n / (n - 1) (r - mean).
    """

    norm_by_std: bool = True
    std_unbiased: bool = True
    """Divide by n - 1 (verl, TRL) instead of n (the DeepSeekMath paper)."""
    eps: float = 1e-6
    leave_one_out: bool = False

    def formula(self, over: str = "group") -> str:
        """The rule as a person would write it, over the rewards of `over`."""
        if self.leave_one_out:
            return f"A = r - mean(others of the {over})"
        if not self.norm_by_std:
            return f"A = r - mean({over})"
        return f"A = (r - mean({over})) / (std({over}, {'n-1' if self.std_unbiased else 'n'}) + {self.eps:g})"


class JoinScalars(Struct, frozen=True, kw_only=True):
    """An advantage as a straight line over the reward: A(r) = slope * (r - base) + offset.

    With `base` the first landed reward, a member equal to it adds nothing to the reward part, and rewards such as
    1000 +- 1 lose nothing to cancellation (facts: 1.4e-7 instead of 2.5e-4 in float32).
    """

    base: float
    slope: float
    offset: float

    def advantage(self, reward: float) -> float:
        return self.slope * (reward - self.base) + self.offset


def is_flat(rewards: Sequence[float]) -> bool:
    """True if the rewards carry no signal: all equal, or too few to differ. Raises nothing on an empty list."""
    return len(set(rewards)) < 2


def advantages(rewards: Sequence[float], rule: AdvantageRule) -> list[float]:
    """The textbook form, member by member; shape [G] in, [G] out. Equal rewards are exactly zero.

    Source: DeepSeekMath (arXiv:2402.03300), section 4.1.2; Dr. GRPO (arXiv:2503.20783) without the std; RLOO
    (arXiv:2402.14740) leaves one out.
    """
    if is_flat(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    scale = _scale(rewards, rule)
    return [(reward - mean) * scale for reward in rewards]


def join_scalars(rewards: Sequence[float], *, base: float, rule: AdvantageRule) -> JoinScalars:
    """The same advantages as one line over the reward, so that no part waits for the statistics.

    The sum of A_i g_i equals slope * (sum of (r_i - base) g_i) + offset * (sum of g_i).
    """
    if is_flat(rewards):
        # Equal rewards carry no signal; joining would blow rounding noise up by 1 / eps.
        return JoinScalars(base=base, slope=0.0, offset=0.0)
    scale = _scale(rewards, rule)
    centre = math.fsum(reward - base for reward in rewards) / len(rewards)
    return JoinScalars(base=base, slope=scale, offset=-scale * centre)


def spread(rewards: Sequence[float], *, unbiased: bool) -> float:
    """The standard deviation; zero for fewer than two rewards."""
    if len(rewards) < 2:
        return 0.0
    return statistics.stdev(rewards) if unbiased else statistics.pstdev(rewards)


def _scale(rewards: Sequence[float], rule: AdvantageRule) -> float:
    if rule.leave_one_out:
        return len(rewards) / (len(rewards) - 1)
    return 1.0 / (spread(rewards, unbiased=rule.std_unbiased) + rule.eps) if rule.norm_by_std else 1.0
