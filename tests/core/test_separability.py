"""An objective that could not be streamed is found before anything starts; every objective of ours passes."""

from collections.abc import Sequence
from typing import Any

import pytest

from thundersync.config_file import config_from
from thundersync.core.advantage import AdvantageRule, JoinScalars
from thundersync.core.objective import Objective, SeparableObjective, Tally, TermSums, Weights
from thundersync.core.separability import NotSeparable, check_separable
from thundersync.recipe import objective_of


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "opd"])
@pytest.mark.parametrize("terms", [{}, {"entropy_coef": 0.01, "kl_coef": 0.1, "kl_type": "k2"}])
def test_every_objective_of_a_configuration_is_separable(kind: str, terms: dict[str, Any]) -> None:
    teacher = {"teacher": {"name": "t"}} if kind == "opd" else {}
    config = config_from({"model": {"name": "m"}, "algo": {"type": kind} | terms} | teacher)
    check_separable(objective_of(config))


class OwnSpread(Objective, frozen=True, kw_only=True):
    """A = (r - mean) / (max - min): an objective of somebody else's that is separable."""

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        line = self.join(rewards, base=rewards[0])
        return [line.advantage(reward) for reward in rewards]

    def join(self, rewards: Sequence[float], *, base: float) -> JoinScalars:
        width = max(rewards) - min(rewards)
        if width == 0.0:
            return JoinScalars(base=base, slope=0.0, offset=0.0)
        mean = sum(rewards) / len(rewards)
        return JoinScalars(base=base, slope=1 / width, offset=(base - mean) / width)


def test_an_objective_of_a_programs_own_passes() -> None:
    check_separable(OwnSpread())


class Squared(Objective, frozen=True, kw_only=True):
    def advantages(self, rewards: Sequence[float]) -> list[float]:
        return [own * abs(own) for own in super().advantages(rewards)]


class Ranked(Objective, frozen=True, kw_only=True):
    def advantages(self, rewards: Sequence[float]) -> list[float]:
        return [float(sorted(rewards).index(reward)) for reward in rewards]


class FirstCounts(Objective, frozen=True, kw_only=True):
    def join(self, rewards: Sequence[float], *, base: float) -> JoinScalars:
        return JoinScalars(base=base, slope=1.0, offset=base - rewards[0])

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        return [reward - rewards[0] for reward in rewards]


class WrongBase(Objective, frozen=True, kw_only=True):
    def join(self, rewards: Sequence[float], *, base: float) -> JoinScalars:
        return super().join(rewards, base=0.0)


class Lopsided(Objective, frozen=True, kw_only=True):
    def advantages(self, rewards: Sequence[float]) -> list[float]:
        return super().advantages(rewards)[:-1]


class SilentSignal(Objective, frozen=True, kw_only=True):
    def signal(self, rewards: Sequence[float]) -> bool:
        return max(rewards) > 1.0


class Scaleless(Objective, frozen=True, kw_only=True):
    def scales(self, tally: Tally) -> list[float]:
        return [1.0, 1.0]


class Infinite(Objective, frozen=True, kw_only=True):
    def weights(self, sampled_tokens: int) -> Weights:
        return Weights(policy=float("inf"))


class Nowhere(Objective, frozen=True, kw_only=True):
    @property
    def sums(self) -> TermSums:
        return TermSums(policy=1, count=1)


class OverRange(OwnSpread, frozen=True, kw_only=True):
    def advantages(self, rewards: Sequence[float]) -> list[float]:
        mean = sum(rewards) / len(rewards)
        return [(reward - mean) / (max(rewards) - min(rewards)) for reward in rewards]


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        (Squared(), "on the line that joins the parts"),
        (Ranked(), "on the line that joins the parts"),
        (FirstCounts(), "order in which they stand"),
        (WrongBase(), "joined against"),
        (Lopsided(), "advantages"),
        (SilentSignal(), "no signal"),
        (Scaleless(), "scales"),
        (OverRange(), "raise ZeroDivisionError"),
        (Infinite(), "weight"),
        (Nowhere(), "sum 1 of 1"),
        (Objective(rule=AdvantageRule(), cohort="world"), "cohort"),  # type: ignore[arg-type]
        (object(), "has no `cohort`"),
    ],
)
def test_a_broken_promise_is_named(objective: SeparableObjective, said: str) -> None:
    with pytest.raises(NotSeparable, match=said):
        check_separable(objective)
