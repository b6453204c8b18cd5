"""What a step maximises, in the form that streams: a gradient is *separable* if it is known up to scalars.

    gradient = sum over terms of scale * sum over pieces of coefficient * weight * gradient of the piece

`weight` is known when a piece is released (its length), `coefficient` when the rewards it is compared with are
complete (its advantage; for KL, entropy and distillation it is known from the start), `scale` at commit (tokens or
rollouts of the step). So a backward needs no more than `weight`, and scalars applied to sums do the rest. Pure.
"""

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

from msgspec import Struct

from thundersync.core.advantage import AdvantageRule, JoinScalars, advantages, is_flat, join_scalars, spread

LossAggregation: TypeAlias = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"]


class Weights(Struct, frozen=True, kw_only=True):
    """What one piece's tokens weigh in each term, before any coefficient that depends on rewards."""

    policy: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    teacher: float = 0.0

    @property
    def known(self) -> bool:
        """There is a term whose coefficient does not wait for rewards."""
        return bool(self.kl or self.entropy or self.teacher)


class Tally(Struct, frozen=True, kw_only=True):
    """What a step came to: of the members that vote, in membership order."""

    tokens: int
    rollouts: int
    rewards: list[float]


class TermSums(Struct, frozen=True, kw_only=True):
    """Which of the step's sums each term goes to: terms with one scale share one sum."""

    policy: int = 0
    kl: int = 0
    entropy: int = 0
    teacher: int = 0
    count: int = 1


class SeparableObjective(Protocol):
    """An objective is one small class: `Objective` below is all of the group-relative family and distillation."""

    @property
    def cohort(self) -> Literal["group", "step"]:
        """Whose rewards a reward is compared with: parts are kept per cohort until its last reward."""

    @property
    def sums(self) -> TermSums: ...

    def weights(self, sampled_tokens: int) -> Weights:
        """At release: of a piece whose rollout has `sampled_tokens`."""

    def signal(self, rewards: Sequence[float]) -> bool:
        """False: the rewards of this complete cohort give every member an advantage of exactly zero."""

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        """At close: the textbook coefficients [G]."""

    def join(self, rewards: Sequence[float], *, base: float) -> JoinScalars:
        """At close: the same as a line over the reward, for parts that are sums already."""

    def scales(self, tally: Tally) -> list[float]:
        """At commit: one factor per sum; the minimised loss is minus the scaled total."""

    def formula(self) -> str:
        """The advantage as a person would write it."""


class Objective(Struct, frozen=True, kw_only=True):
    """GRPO, Dr. GRPO, DAPO, RLOO, REINFORCE++ and on-policy distillation: the same sums under other scalars."""

    rule: AdvantageRule | None = AdvantageRule()
    """None: no term depends on rewards."""
    cohort: Literal["group", "step"] = "group"
    step_std: AdvantageRule | None = None
    """Divide the policy term by the std of all the step's rewards, whatever their group (TRL's `batch`)."""
    loss_agg: LossAggregation = "token_mean"
    constant: float = 1.0
    """Tokens; the fixed divisor of `constant`."""
    kl_coef: float = 0.0
    """Of a KL term in the loss. (In the reward it is no term: it shifts rewards before they land.)"""
    entropy_coef: float = 0.0
    entropy_agg: LossAggregation = "token_mean"
    distils: bool = False

    @property
    def sums(self) -> TermSums:
        count, kl, entropy = 1, 0, 0
        if self.step_std is not None and self.kl_coef:
            kl, count = count, count + 1
        if self.entropy_coef:
            shared = {_per_token(self.loss_agg): kl if self.kl_coef else (0 if self.step_std is None else None)}
            found = shared.get(_per_token(self.entropy_agg))
            entropy, count = (found, count) if found is not None else (count, count + 1)
        return TermSums(kl=kl, entropy=entropy, count=count)

    def weights(self, sampled_tokens: int) -> Weights:
        own = self._share(self.loss_agg, sampled_tokens)
        return Weights(
            policy=own if self.rule is not None else 0.0,
            kl=self.kl_coef * own,
            entropy=self.entropy_coef * self._share(self.entropy_agg, sampled_tokens),
            teacher=own if self.distils else 0.0,
        )

    def signal(self, rewards: Sequence[float]) -> bool:
        return self.rule is not None and not is_flat(rewards)

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        return advantages(rewards, self.rule) if self.rule is not None else [0.0] * len(rewards)

    def join(self, rewards: Sequence[float], *, base: float) -> JoinScalars:
        if self.rule is None:
            return JoinScalars(base=base, slope=0.0, offset=0.0)
        return join_scalars(rewards, base=base, rule=self.rule)

    def scales(self, tally: Tally) -> list[float]:
        sums = self.sums
        scales = [_scale(self.loss_agg, tally)] * sums.count
        if self.entropy_coef:
            scales[sums.entropy] = _scale(self.entropy_agg, tally)
        if self.step_std is not None:
            deviation = spread(tally.rewards, unbiased=self.step_std.std_unbiased) + self.step_std.eps
            scales[0] = scales[0] / deviation if deviation else 0.0  # equal rewards: the sum is zero as well
        return scales

    def formula(self) -> str:
        """The advantage as a person would write it."""
        if self.rule is None:
            return "no advantage: the teacher scores every turn"
        if self.step_std is not None:
            return f"A = (r - mean(group)) / (std(step) + {self.step_std.eps:g})"
        return self.rule.formula(self.cohort)

    def _share(self, agg: LossAggregation, sampled_tokens: int) -> float:
        if agg == "seq_mean_token_mean":
            return 1.0 / max(1, sampled_tokens)
        return 1.0 / self.constant if agg == "constant" else 1.0


def _per_token(agg: LossAggregation) -> bool:
    return agg == "token_mean"


def _scale(agg: LossAggregation, tally: Tally) -> float:
    return 1.0 / max(1, tally.tokens if _per_token(agg) else tally.rollouts)
