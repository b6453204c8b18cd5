"""A step's rollouts, taken once to be worked many times: what arrived, in which order, and what it was worth.

Knows orders and rewards; nothing of streams and workers.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from thundersync.core.advantage import is_flat
from thundersync.core.turn_ledger import TurnKey
from thundersync.core.types import Failed, GroupId, Rollout, RolloutId, SampledTurn, Scored
from thundersync.learn.turn_stream import ScoredTurn

FOLDS_FROM = 4
"""Members of the smallest cohort whose parts can fold: three values landed, and one still to come."""


class Arrival(Struct, frozen=True, kw_only=True):
    """What lands at one moment: a turn, the end of its attempt or rollout, or (where rewards are learned) a rollout."""

    rollout_id: RolloutId
    turn: SampledTurn | None = None
    broken: Rollout | None = None
    """This attempt is over, and another follows."""
    rollout: Rollout | None = None
    """It is finished."""


class Recording(Struct, frozen=True, kw_only=True):
    """One step."""

    policy_version: int
    groups: dict[GroupId, list[RolloutId]]
    prompts: dict[GroupId, list[int]]
    rollouts: list[Rollout]
    """In membership order."""
    arrivals: list[Arrival]
    turns: dict[TurnKey, ScoredTurn] = {}
    """Where a teacher scores them."""

    @property
    def names(self) -> list[RolloutId]:
        """Whose arrival is whose, in the order recorded: an order of arrival is a permutation of these."""
        return [arrival.rollout_id for arrival in self.arrivals]

    def arriving(self, names: Sequence[RolloutId]) -> list[Arrival]:
        """The arrivals in another order; those of one rollout keep theirs."""
        lines: dict[RolloutId, deque[Arrival]] = defaultdict(deque)
        for arrival in self.arrivals:
            lines[arrival.rollout_id].append(arrival)
        return [lines[name].popleft() for name in names]

    def shuffled(self, seed: int) -> list[RolloutId]:
        return random.Random(seed).sample(self.names, len(self.names))

    def with_rewards(self, rewards: Mapping[RolloutId, float]) -> Recording:
        """The same rollouts, those named worth something else."""
        changed = {
            r.rollout_id: _worth(r, rewards[r.rollout_id]) if r.rollout_id in rewards else r for r in self.rollouts
        }
        return replace(
            self,
            rollouts=list(changed.values()),
            arrivals=[replace(each, rollout=changed[each.rollout_id]) for each in self.arrivals],
        )


def of_rewards(
    policy_version: int,
    groups: Mapping[GroupId, Sequence[RolloutId]],
    prompts: Mapping[GroupId, list[int]],
    landed: Sequence[Rollout],
) -> Recording:
    """From finished rollouts in the order they landed."""
    by_id = {rollout.rollout_id: rollout for rollout in landed}
    return Recording(
        policy_version=policy_version,
        groups={group: list(ids) for group, ids in groups.items()},
        prompts=dict(prompts),
        rollouts=[by_id[name] for ids in groups.values() for name in ids],
        arrivals=[Arrival(rollout_id=rollout.rollout_id, rollout=rollout) for rollout in landed],
    )


def of_turns(
    policy_version: int,
    groups: Mapping[GroupId, Sequence[RolloutId]],
    prompts: Mapping[GroupId, list[int]],
    rollouts: Sequence[Rollout],
    turns: Mapping[TurnKey, ScoredTurn],
) -> Recording:
    """From scored turns in the order of their scores; a rollout ends with its last turn."""
    lines: dict[RolloutId, deque[TurnKey]] = defaultdict(deque)
    for key in sorted(turns, key=lambda key: (key.rollout_id, key.attempt, key.turn)):
        lines[key.rollout_id].append(key)
    by_id = {rollout.rollout_id: rollout for rollout in rollouts}
    arrivals = []
    for name in [key.rollout_id for key in turns]:
        key = lines[name].popleft()
        following = lines[name][0] if lines[name] else None
        arrivals.append(
            Arrival(
                rollout_id=name,
                turn=turns[key].sampled,
                broken=replace(by_id[name], attempt=key.attempt)
                if following is not None and following.attempt > key.attempt
                else None,
                rollout=by_id[name] if following is None else None,
            )
        )
    arrivals += [Arrival(rollout_id=r.rollout_id, rollout=r) for r in rollouts if r.rollout_id not in lines]
    return Recording(
        policy_version=policy_version,
        groups={group: list(ids) for group, ids in groups.items()},
        prompts=dict(prompts),
        rollouts=list(rollouts),
        arrivals=arrivals,
        turns=dict(turns),
    )


def scored(rollouts: Sequence[Rollout]) -> dict[RolloutId, float]:
    """Their rewards, without those that failed."""
    return {r.rollout_id: r.outcome.reward for r in rollouts if isinstance(r.outcome, Scored)}


def flat_cohorts(recording: Recording, *, whole_step: bool) -> list[list[RolloutId]]:
    """Groups (or the step) of which all rewards are equal: they have no gradient, and prove nothing."""
    rewards = scored(recording.rollouts)
    cohorts = [[name for name in ids if name in rewards] for ids in recording.groups.values()]
    if whole_step:
        cohorts = [[name for ids in cohorts for name in ids]]
    return [ids for ids in cohorts if len(ids) > 1 and is_flat([rewards[name] for name in ids])]


def graded(names: Sequence[RolloutId]) -> dict[RolloutId, float]:
    """A different reward for each: 0, 1, 0.5, 0.25, 0.75, 0.125, ..."""
    return {name: _between(index) for index, name in enumerate(names)}


def folds(recording: Recording, rewards: Mapping[RolloutId, float], *, whole_step: bool) -> bool:
    """A third distinct reward lands while its cohort is open, in the order recorded."""
    arrived: dict[str, list[float | None]] = defaultdict(list)
    for arrival in recording.arrivals:
        if arrival.rollout is not None:
            cohort = "step" if whole_step else arrival.rollout.group_id
            arrived[cohort].append(rewards.get(arrival.rollout_id))
    return any(len(set(before[:-1]) - {None}) > 2 for before in arrived.values())


def _worth(rollout: Rollout, reward: float) -> Rollout:
    assert not isinstance(rollout.outcome, Failed)
    return replace(rollout, outcome=replace(rollout.outcome, reward=reward))


def _between(index: int) -> float:
    """0, 1, then ever finer fractions between them."""
    if index < 2:
        return float(index)
    digits = index - 1
    value, weight = 0.0, 0.5
    while digits:
        value, weight, digits = value + weight * (digits % 2), weight / 2, digits // 2
    return value
