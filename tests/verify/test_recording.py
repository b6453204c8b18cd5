"""A recording keeps what arrived, in any order that could have happened."""

import random

from hypothesis import given
from hypothesis import strategies as st

from tests.learn import replay as rp
from tests.verify.rig import recorded
from thundersync.verify import recording as rec


@given(st.integers(0, 1000), st.integers(1, 16))
def test_graded_rewards_are_all_different_and_between_zero_and_one(seed: int, count: int) -> None:
    names = [f"r{index}" for index in range(count)]
    random.Random(seed).shuffle(names)
    rewards = rec.graded(names)
    assert list(rewards.values())[:5] == [0.0, 1.0, 0.5, 0.25, 0.75][:count]
    assert len(set(rewards.values())) == count
    assert all(0.0 <= reward <= 1.0 for reward in rewards.values())


@given(st.integers(0, 1000))
def test_any_order_has_every_arrival_once(seed: int) -> None:
    step = recorded(rp.record(seed, groups=2, size=3))
    arrived = [arrival.rollout for arrival in step.arriving(step.shuffled(seed))]
    assert sorted(r.rollout_id for r in arrived if r is not None) == sorted(step.names)


def test_only_groups_without_any_difference_are_flat() -> None:
    step = recorded(rp.record(1, groups=2, size=3, rewards=(1.0,)))
    assert len(rec.flat_cohorts(step, whole_step=False)) == 2
    assert len(rec.flat_cohorts(step, whole_step=True)) == 1
    mixed = step.with_rewards({step.groups["g0"][0]: 0.0})
    assert rec.flat_cohorts(mixed, whole_step=False) == [step.groups["g1"]]
    assert rec.flat_cohorts(mixed, whole_step=True) == []


def test_parts_fold_when_a_third_value_lands_while_another_is_to_come() -> None:
    step = recorded(rp.record(1, groups=1, size=4, rewards=(0.0,)))
    names = step.names
    assert not rec.folds(step, dict(zip(names, (0.0, 1.0, 0.0, 0.5), strict=True)), whole_step=False)
    assert rec.folds(step, dict(zip(names, (0.0, 1.0, 0.5, 0.0), strict=True)), whole_step=False)
