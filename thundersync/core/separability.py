"""Whether an objective is separable: tried on rewards before anything starts, because streaming a gradient that is not
known up to scalars would quietly be another gradient.

Pure. What is asked of an objective is written in `objective.SeparableObjective`; here it is held to it.
"""

import math
import random
from collections.abc import Iterator, Sequence

from thundersync.core.objective import SeparableObjective, Tally
from thundersync.errors import ThundersyncError

_ROUNDING = 1e-9
_TRIALS = 40


class NotSeparable(ThundersyncError):
    """An objective breaks its promise; says which, with an example."""

    def __init__(self, objective: object, detail: str) -> None:
        super().__init__(
            f"{type(objective).__name__} cannot be streamed: {detail}",
            remedy="An advantage must be a straight line over its own reward whose slope and offset follow from the "
            "cohort's rewards, and weights must follow from a rollout's length: docs/embedding.md, `Own objectives`.",
        )


def check_separable(objective: SeparableObjective) -> None:
    """Try the objective on rewards of many shapes. Raises: NotSeparable with the first broken promise."""
    for name in ("cohort", "sums", "weights", "signal", "advantages", "join", "scales", "formula"):
        if not hasattr(objective, name):
            raise NotSeparable(objective, f"it has no `{name}`; `core.objective.Objective` is one to derive from")
    if objective.cohort not in ("group", "step"):
        raise NotSeparable(objective, f"its cohort is {objective.cohort!r}, which is neither 'group' nor 'step'")
    _check_weights(objective)
    for rewards in _trials():
        try:
            _check_rewards(objective, rewards)
        except (ArithmeticError, ValueError, LookupError) as error:
            raise NotSeparable(objective, f"rewards {rewards} make it raise {type(error).__name__}: {error}") from error
    _check_scales(objective)


def _check_weights(objective: SeparableObjective) -> None:
    sums = objective.sums
    for tokens in (1, 2, 17, 4096):
        weights, again = objective.weights(tokens), objective.weights(tokens)
        if weights != again:
            raise NotSeparable(objective, f"its weights of {tokens} tokens are {weights} once and {again} another time")
        for name in ("policy", "kl", "entropy", "teacher"):
            if not math.isfinite(getattr(weights, name)):
                raise NotSeparable(objective, f"its {name} weight of {tokens} tokens is {getattr(weights, name)}")
            if not 0 <= getattr(sums, name) < sums.count:
                raise NotSeparable(objective, f"its {name} term goes to sum {getattr(sums, name)} of {sums.count}")


def _check_rewards(objective: SeparableObjective, rewards: Sequence[float]) -> None:
    shown = [float(f"{reward:.4g}") for reward in rewards]
    advantages = objective.advantages(rewards)
    if len(advantages) != len(rewards):
        raise NotSeparable(objective, f"{len(rewards)} rewards get {len(advantages)} advantages")
    if not all(map(math.isfinite, advantages)):
        raise NotSeparable(objective, f"the advantages of {shown} are {advantages}")
    if not objective.signal(rewards):
        if any(advantages):
            raise NotSeparable(objective, f"{shown} is said to carry no signal, and has advantages {advantages}")
        return
    scale = max(1.0, *map(abs, advantages))
    # Parts are summed against whichever reward landed first, so the line must be the same from each of them.
    for base in {rewards[0], min(rewards), max(rewards)}:
        join = objective.join(rewards, base=base)
        if join.base != base:
            raise NotSeparable(
                objective, f"parts were summed against reward {base:.4g}, and joined against {join.base}"
            )
        for reward, advantage in zip(rewards, advantages, strict=True):
            if not abs(join.advantage(reward) - advantage) <= _ROUNDING * scale:
                raise NotSeparable(
                    objective,
                    f"among {shown} a reward of {reward:.4g} has the advantage {advantage:.6g}, and "
                    f"{join.advantage(reward):.6g} on the line that joins the parts",
                )
    # Rewards land in any order, and none of it may depend on that.
    order = sorted(range(len(rewards)), key=lambda i: rewards[i])
    other = objective.advantages([rewards[i] for i in order])
    if any(abs(other[at] - advantages[i]) > _ROUNDING * scale for at, i in enumerate(order)):
        raise NotSeparable(objective, f"the advantages of {shown} depend on the order in which they stand")


def _check_scales(objective: SeparableObjective) -> None:
    count = objective.sums.count
    for tally in (
        Tally(tokens=100, rollouts=4, rewards=[0.0, 1.0, 0.5, 1.0]),
        Tally(tokens=1, rollouts=1, rewards=[1.0]),
        Tally(tokens=8, rollouts=2, rewards=[1.0, 1.0]),
    ):
        scales = objective.scales(tally)
        if len(scales) != count or not all(map(math.isfinite, scales)):
            raise NotSeparable(
                objective, f"{count} sums get the scales {scales} at a commit of {tally.rollouts} rollouts"
            )


def _trials() -> Iterator[list[float]]:
    yield from ([0.0, 1.0], [1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.5], [1001.0, 999.0, 1000.0], [-3.0, 0.0, 4.5, 4.5])
    chance = random.Random(0)  # the same trials every time
    for _ in range(_TRIALS):
        size = chance.randint(2, 9)
        if chance.random() < 0.5:
            yield [float(chance.randint(0, 1)) for _ in range(size)]
        else:
            yield [chance.gauss(0.0, 2.0) for _ in range(size)]
