"""Coefficients of every objective against their definitions in float64."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thundersync.core.advantage import AdvantageRule
from thundersync.core.objective import Objective, Tally

REWARDS = st.lists(st.sampled_from([0.0, 1.0, 0.3, 999.0, 1001.0]) | st.floats(-5, 5), min_size=2, max_size=16)


@given(rewards=REWARDS, first=st.integers(0, 15))
def test_leave_one_out_compares_each_reward_with_the_mean_of_the_others(rewards: list[float], first: int) -> None:
    objective = Objective(rule=AdvantageRule(norm_by_std=False, leave_one_out=True))
    expected = [r - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    if len(set(rewards)) > 1:
        assert objective.advantages(rewards) == pytest.approx(expected, abs=1e-9)
    line = objective.join(rewards, base=rewards[first % len(rewards)])
    assert [line.advantage(r) for r in rewards] == pytest.approx(objective.advantages(rewards), abs=1e-9)


def test_a_batch_deviation_scales_the_policy_term_alone() -> None:
    objective = Objective(
        rule=AdvantageRule(norm_by_std=False), step_std=AdvantageRule(eps=1e-4), kl_coef=0.1, entropy_coef=0.01
    )
    rewards = [0.0, 1.0, 1.0, 0.5]
    scales = objective.scales(Tally(tokens=20, rollouts=4, rewards=rewards))
    assert scales[objective.sums.policy] == pytest.approx(1 / 20 / (statistics.stdev(rewards) + 1e-4))
    assert scales[objective.sums.kl] == pytest.approx(1 / 20)
    assert scales[objective.sums.entropy] == pytest.approx(1 / 20)
    assert objective.sums.policy != objective.sums.kl == objective.sums.entropy


def test_terms_with_one_scale_share_one_sum() -> None:
    assert Objective(kl_coef=0.1, entropy_coef=0.1).sums.count == 1
    mixed = Objective(loss_agg="seq_mean_token_mean", kl_coef=0.1, entropy_coef=0.1, entropy_agg="token_mean")
    assert mixed.sums.count == 2
    assert mixed.scales(Tally(tokens=50, rollouts=5, rewards=[])) == [1 / 5, 1 / 50]


@pytest.mark.parametrize(("agg", "share", "scale"), [
    ("token_mean", 1.0, 1 / 60),
    ("seq_mean_token_mean", 1 / 12, 1 / 4),
    ("seq_mean_token_sum", 1.0, 1 / 4),
    ("constant", 1 / 32, 1 / 4),
])  # fmt: skip
def test_aggregations_weigh_tokens_as_named(agg: str, share: float, scale: float) -> None:
    objective = Objective(loss_agg=agg, constant=32.0)  # type: ignore[arg-type]
    assert objective.weights(12).policy == pytest.approx(share)
    assert objective.scales(Tally(tokens=60, rollouts=4, rewards=[])) == pytest.approx([scale])


def test_distillation_waits_for_no_reward() -> None:
    objective = Objective(rule=None, distils=True)
    assert objective.weights(5).known
    assert objective.weights(5).policy == 0.0
    assert not objective.signal([0.0, 1.0])


def test_a_step_without_tokens_divides_by_nothing() -> None:
    assert all(math.isfinite(s) for s in Objective().scales(Tally(tokens=0, rollouts=0, rewards=[])))
