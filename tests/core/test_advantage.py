import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thundersync.core.advantage import AdvantageRule, advantages, is_flat, join_scalars

binary = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=16)
dense = st.lists(st.floats(0, 1), min_size=1, max_size=16)
offset = st.lists(st.sampled_from([999.0, 999.5, 1000.0, 1000.25, 1001.0]), min_size=1, max_size=16)
rewards_of_a_group = st.one_of(binary, dense, offset)
rules = st.builds(
    AdvantageRule, norm_by_std=st.booleans(), std_unbiased=st.booleans(), eps=st.sampled_from([1e-4, 1e-6])
)


@given(rewards_of_a_group, rules, st.integers(0, 15))
def test_joined_line_gives_the_textbook_advantage_whatever_reward_landed_first(
    rewards: list[float], rule: AdvantageRule, first: int
) -> None:
    line = join_scalars(rewards, base=rewards[first % len(rewards)], rule=rule)
    expected = advantages(rewards, rule)
    size = max(map(abs, expected), default=0.0)
    for reward, advantage in zip(rewards, expected, strict=True):
        assert line.advantage(reward) == pytest.approx(advantage, abs=1e-9 * max(size, 1.0), rel=1e-6)


@given(rewards_of_a_group, rules)
def test_advantages_equal_the_float64_reference(rewards: list[float], rule: AdvantageRule) -> None:
    if is_flat(rewards):
        assert advantages(rewards, rule) == [0.0] * len(rewards)
        return
    array = np.array(rewards, dtype=np.float64)
    reference = array - array.mean()
    if rule.norm_by_std:
        reference = reference / (array.std(ddof=1 if rule.std_unbiased else 0) + rule.eps)
    np.testing.assert_allclose(advantages(rewards, rule), reference, rtol=1e-6, atol=1e-9 * np.abs(reference).max())


@given(rewards_of_a_group, rules)
def test_advantages_of_a_group_sum_to_zero(rewards: list[float], rule: AdvantageRule) -> None:
    values = advantages(rewards, rule)
    assert math.fsum(values) == pytest.approx(0.0, abs=1e-6 * (1 + max(map(abs, values))))


def test_the_formula_is_verls_by_default() -> None:
    rewards = [1.0, 1.0, 0.0, 0.0]
    spread = statistics.stdev(rewards)
    assert advantages(rewards, AdvantageRule()) == [pytest.approx((r - 0.5) / (spread + 1e-6)) for r in rewards]
    assert AdvantageRule().formula() == "A = (r - mean(group)) / (std(group, n-1) + 1e-06)"


def test_masked_members_follow_the_published_rule() -> None:
    # Rewards 1, 1, 0, 0 with the second failed: it neither votes nor counts in the mean.
    assert advantages([1.0, 0.0, 0.0], AdvantageRule(norm_by_std=False)) == [
        pytest.approx(0.667, abs=1e-3),
        pytest.approx(-0.333, abs=1e-3),
        pytest.approx(-0.333, abs=1e-3),
    ]
