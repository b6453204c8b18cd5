"""Every objective and option, streamed in several orders, equals its definition: relative L2 at most 5e-6, float32."""

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.learn import replay as rp
from tests.learn import textbook
from tests.tiny import tiny_model
from thundersync.core.advantage import AdvantageRule
from thundersync.core.objective import Objective
from thundersync.learn import messages as m
from thundersync.learn.worker import Worker

TOLERANCE = 5e-6
PLAIN = AdvantageRule(norm_by_std=False)
KINDS: dict[str, tuple[Objective, str]] = {
    "grpo": (Objective(), "token_mean"),
    "dapo": (Objective(), "token_mean"),
    "dr_grpo": (Objective(rule=PLAIN, loss_agg="constant", constant=40.0), "constant"),
    "rloo": (
        Objective(rule=AdvantageRule(norm_by_std=False, leave_one_out=True), loss_agg="seq_mean_token_sum"),
        "seq_mean_token_sum",
    ),
    "reinforce_pp": (Objective(cohort="step"), "token_mean"),
    "batch": (Objective(rule=PLAIN, step_std=AdvantageRule(), loss_agg="seq_mean_token_mean"), "seq_mean_token_mean"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "k2": {"kl": "k2", "kl_coef": 0.3},
    "k3": {"kl": "k3", "kl_coef": 0.3},
    "k1": {"kl": "k1", "kl_coef": 0.01},
    "entropy": {"entropy_coef": 0.05},
    "all": {"kl": "k3", "kl_coef": 0.2, "entropy_coef": 0.05, "mismatch": "tis"},
    "icepop": {"mismatch": "icepop", "low": 0.8, "high": 1.4},
    "seq_mask": {"mismatch": "seq_mask", "low": 1e-3, "high": 1e4},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), std=0.1)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("reference"), std=0.1, seed=9)


def objective_of(kind: str, options: dict[str, Any]) -> Objective:
    base, agg = KINDS[kind]
    return Objective(
        rule=base.rule,
        cohort=base.cohort,
        step_std=base.step_std,
        loss_agg=agg,  # type: ignore[arg-type]
        constant=base.constant,
        kl_coef=options.get("kl_coef", 0.0) if options.get("kl") != "k1" else 0.0,
        entropy_coef=options.get("entropy_coef", 0.0),
        entropy_agg=agg,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
async def test_streamed_equals_the_definition(
    model: Path, reference: Path, tmp_path: Path, kind: str, option: str
) -> None:
    options = OPTIONS[option]
    objective = objective_of(kind, options)
    terms = m.Terms(
        mismatch=options.get("mismatch", "none"),
        mismatch_low=options.get("low", 0.5),
        mismatch_high=options.get("high", 2.0),
        kl=options.get("kl", ""),
        entropy="entropy_coef" in options,
        sums=objective.sums,
    )
    worker = Worker()
    worker.answer(rp.setup(model, tmp_path / "weights", terms=terms, reference_path=str(reference)))
    frozen = AutoModelForCausalLM.from_pretrained(reference).eval()
    for seed, max_tokens in ((42, 10_000), (43, 30)):
        step = rp.record(seed, rewards=(0.0, 0.5, 1.0), failed=0.1, forked=0.1)
        expected = textbook.gradient(
            model, step, kind=kind, agg=KINDS[kind][1], constant=40.0, reference=frozen, **options
        )
        order = list(range(len(step.rollouts)))
        random.Random(seed).shuffle(order)
        ledger, _ = await rp.replay(
            worker,
            step,
            order=order,
            objective=objective,
            kl_in_reward=options["kl_coef"] if options.get("kl") == "k1" else 0.0,
            max_tokens=max_tokens,
        )
        assert rp.relative_l2(rp.gradient_of(worker, ledger), expected) < TOLERANCE


async def test_flat_groups_keep_their_kl_gradient_or_lose_it_as_configured(
    model: Path, reference: Path, tmp_path: Path
) -> None:
    objective = Objective(kl_coef=0.1)
    terms = m.Terms(kl="k3", sums=objective.sums)
    worker = Worker()
    worker.answer(rp.setup(model, tmp_path / "weights", terms=terms, reference_path=str(reference)))
    step = rp.record(3, rewards=(1.0,))
    frozen = AutoModelForCausalLM.from_pretrained(reference).eval()
    expected = textbook.gradient(model, step, kind="dr_grpo", agg="token_mean", kl="k3", kl_coef=0.1, reference=frozen)
    ledger, _ = await rp.replay(worker, step, objective=objective)
    assert rp.relative_l2(rp.gradient_of(worker, ledger), expected) < TOLERANCE
    ledger, link = await rp.replay(worker, step, objective=objective, skip_flat=True)
    assert ledger.empty
    assert not [request for request in link.requests if isinstance(request, m.RunPass)]
    worker._gradient.discard()


async def test_a_value_that_is_not_finite_is_named_and_spoils_nothing_else(model: Path, tmp_path: Path) -> None:
    worker = Worker()
    worker.answer(rp.setup(model, tmp_path / "weights"))
    step = rp.record(4, groups=1, rewards=(0.0, 1.0))
    row = m.Row(
        **{f: getattr(step.rollouts[0].sequences[0], f) for f in ("token_ids", "sampled", "logprobs")}, policy=1.0
    )
    broken = m.Row(
        token_ids=row.token_ids, sampled=row.sampled, logprobs=[float("nan")] * len(row.logprobs), policy=1.0
    )
    report = worker.answer(m.RunPass(group_id="g0", cohort_id="g0", prompt=[], rows=[row, broken], direct=True))
    assert isinstance(report, m.PassReport)
    assert report.bad_rows == [1]
    # Nothing of the step is worked any further, and the next one is as good as ever.
    later = worker.answer(m.RunPass(group_id="g0", cohort_id="g0", prompt=[], rows=[row], direct=True))
    assert later == m.PassReport(busy_s=0.0)
    assert worker.answer(m.CloseCohort(cohort_id="g0", groups=["g0"], join=None)) == m.Done()
    worker.answer(m.Discard())
    good = worker.answer(m.RunPass(group_id="g0", cohort_id="g0", prompt=[], rows=[row], direct=True))
    assert isinstance(good, m.PassReport)
    assert good.sampled_tokens and not good.bad_rows
    worker.answer(m.Discard())


async def test_a_backward_that_is_not_finite_is_named_too(model: Path, tmp_path: Path) -> None:
    """Finite logprobs, a gradient that overflows: the pass says so, and the step's only way on is to be discarded."""
    worker = Worker()
    worker.answer(rp.setup(model, tmp_path / "weights"))
    step = rp.record(4, groups=1, rewards=(0.0, 1.0))
    fields = ("token_ids", "sampled", "logprobs")
    row = m.Row(**{f: getattr(step.rollouts[0].sequences[0], f) for f in fields}, policy=3e38)
    report = worker.answer(m.RunPass(group_id="g0", cohort_id="g0", prompt=[], rows=[row], direct=True))
    assert isinstance(report, m.PassReport)
    assert report.bad_rows == [0]
    worker.answer(m.Discard())
    good = m.Row(token_ids=row.token_ids, sampled=row.sampled, logprobs=row.logprobs, policy=1.0)
    report = worker.answer(m.RunPass(group_id="g0", cohort_id="g0", prompt=[], rows=[good], direct=True))
    assert isinstance(report, m.PassReport)
    assert not report.bad_rows
    worker.answer(m.Discard())
