"""An independent trainer's step, worked by this project's own ledger, queue, stream and worker.

`gradient(case, model, aux)` follows the contract in the head of the gradient oracle: rollouts land in the case's
arrival order, each backward runs as soon as it can, and the gradient is read where the optimizer would take it.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.learn import replay as rp
from thundersync.core.advantage import AdvantageRule
from thundersync.core.objective import LossAggregation, Objective
from thundersync.core.types import Rollout, SampledTurn, Scored, TokenSequence, Turn
from thundersync.generate.base import TokenScores
from thundersync.learn import messages as m
from thundersync.learn.worker import Worker

AGGREGATION: dict[str, LossAggregation] = {
    "grpo": "seq_mean_token_mean",
    "dr_grpo": "constant",
    "dapo": "token_mean",
    "bnpo": "token_mean",
    "rloo": "seq_mean_token_sum",
    "jsd": "token_mean",
    "sampled": "token_mean",
}


def gradient(case: dict[str, Any], model: Any, aux: Any) -> dict[str, Tensor]:
    """{parameter name: gradient of the minimised loss} of the step that `case` describes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder / "model")
        if aux is not None:
            aux.save_pretrained(folder / "aux")
        worker = Worker()
        worker.answer(_setup(case, folder))
        work = _distilled if case["kind"] == "opd" else _rewarded
        flat = asyncio.run(work(case, worker, aux))
    return {name: view for (name, _), view in zip(worker._flat.named, worker._flat.views(flat), strict=True)}


def objective_of(case: dict[str, Any]) -> Objective:
    distils = case["kind"] == "opd"
    over = AdvantageRule(eps=case["std_eps"])
    rule: AdvantageRule | None = over if case["scale_rewards"] == "group" else AdvantageRule(norm_by_std=False)
    if case["loss_type"] == "rloo":
        rule = AdvantageRule(norm_by_std=False, leave_one_out=True)
    batch = case["scale_rewards"] == "batch" and case["loss_type"] != "rloo"
    return Objective(
        rule=None if distils else rule,
        step_std=over if batch and not distils else None,
        loss_agg=AGGREGATION[case["loss_type"]],
        constant=float(case["max_completion_length"]),
        kl_coef=0.0 if distils or case["loss_type"] == "rloo" else case["beta"],
        entropy_coef=case["entropy_coef"],
        entropy_agg="token_mean",
        distils=distils,
    )


def _setup(case: dict[str, Any], folder: Path) -> m.Setup:
    distils = case["kind"] == "opd"
    kind = {1.0: "reverse", 0.0: "forward"}.get(case["beta"], "mixed") if case["loss_type"] == "jsd" else ""
    kl = "" if distils or not case["beta"] else "k2" if case["kl_form"] == "unbiased" else "k3"
    terms = m.Terms(
        temperature=case["temperature"],
        mismatch="tis" if case["tis_max"] else "none",
        mismatch_high=case["tis_max"] or 2.0,
        kl="k1" if case["loss_type"] == "rloo" and case["beta"] else kl,  # type: ignore[arg-type]
        entropy=bool(case["entropy_coef"]),
        divergence=kind,  # type: ignore[arg-type]
        mix=case["beta"],
        sums=objective_of(case).sums,
    )
    return rp.setup(
        folder / "model",
        folder / "weights",
        terms=terms,
        max_model_len=64,
        reference_path=str(folder / "aux") if terms.kl else "",
        teacher_path=str(folder / "aux") if kind else "",
    )


async def _rewarded(case: dict[str, Any], worker: Worker, aux: Any) -> Tensor:
    step = rp.RecordedStep(prompts=_prompts(case), rollouts=[_rollout(r) for r in case["rollouts"]])
    ledger, _ = await rp.replay(
        worker,
        step,
        order=case["arrival"],
        objective=objective_of(case),
        kl_in_reward=case["beta"] if case["loss_type"] == "rloo" else 0.0,
    )
    return rp.gradient_of(worker, ledger)


async def _distilled(case: dict[str, Any], worker: Worker, aux: Any) -> Tensor:
    turns = [_turn(r) for r in case["rollouts"]]

    async def score(turn: SampledTurn) -> TokenScores | None:
        if case["loss_type"] == "jsd":
            return None
        with torch.no_grad():
            ids = torch.tensor([turn.token_ids])
            logprobs = (aux(ids).logits[0, :-1].float() / case["temperature"]).log_softmax(-1)
            own = logprobs.gather(-1, ids[0, 1:, None])[turn.start - 1 :, 0]
        return TokenScores(logprobs=own.tolist(), top_ids=[], top_logprobs=[], policy_version=0)

    return await rp.replay_turns(
        worker,
        _prompts(case),
        [(turn, _rollout(r)) for turn, r in zip(turns, case["rollouts"], strict=True)],
        order=case["arrival"],
        objective=objective_of(case),
        score=score,
    )


def _prompts(case: dict[str, Any]) -> dict[str, list[int]]:
    return {str(r["group"]): r["prompt"] for r in case["rollouts"]}


def _rollout(r: dict[str, Any]) -> Rollout:
    before, mask = len(r["prompt"]), [bool(x) for x in r["mask"]]
    sequence = TokenSequence(
        token_ids=r["prompt"] + r["completion"],
        sampled=[False] * before + mask,
        logprobs=[0.0] * before + r["sampling_logps"],
        prompt_tokens=before,
    )
    return Rollout(
        rollout_id=f"{r['group']}-{r['index']}",
        group_id=str(r["group"]),
        task_id=str(r["group"]),
        policy_version=0,
        messages=[],
        sequences=[sequence],
        turns=[Turn(index=0, sequence=0, start=before, end=before + 1, finish_reason="stop", policy_version=0)],
        outcome=Scored(reward=r["reward"], stop="submitted"),
        started_s=0.0,
    )


def _turn(r: dict[str, Any]) -> SampledTurn:
    before = len(r["prompt"])
    return SampledTurn(
        rollout_id=f"{r['group']}-{r['index']}",
        group_id=str(r["group"]),
        task_id=str(r["group"]),
        attempt=1,
        turn=0,
        sequence=0,
        token_ids=r["prompt"] + r["completion"],
        start=before,
        end=before + len(r["completion"]),
        logprobs=r["sampling_logps"],
        prompt_tokens=before,
        policy_version=0,
    )
