"""A configuration -> what its steps maximise, in the words of `core.objective` and of the trainer workers."""

from __future__ import annotations

from typing import Literal

from thundersync.config import DISTILLING, Config
from thundersync.core.advantage import AdvantageRule
from thundersync.core.objective import Objective, SeparableObjective
from thundersync.learn import messages as m
from thundersync.learn.settings import LoraSettings, OptimSettings


def objective_of(config: Config) -> Objective:
    """Which scalars and sums the run's objective is."""
    algo = config.algo
    of_step = AdvantageRule(norm_by_std=True, std_unbiased=algo.std_unbiased, eps=algo.adv_eps)
    plain = AdvantageRule(norm_by_std=False)
    by_type: dict[str, AdvantageRule | None] = {
        "rloo": AdvantageRule(norm_by_std=False, leave_one_out=True),
        "reinforce_pp": of_step,
        "opd": None,
        "opsd": None,
    }
    by_std = of_step if algo.norm_by_std is True else plain
    whole_step = algo.type == "reinforce_pp"
    return Objective(
        rule=by_type.get(algo.type, by_std),
        cohort="step" if whole_step else "group",
        step_std=of_step if algo.norm_by_std == "batch" and not whole_step else None,
        loss_agg=algo.loss_agg,
        constant=float(config.loss_constant_tokens),
        kl_coef=algo.kl_coef if algo.kl_type != "k1" else 0.0,
        entropy_coef=algo.entropy_coef,
        entropy_agg=algo.loss_agg,
        distils=algo.type in DISTILLING,
    )


def kl_in_reward(config: Config) -> float:
    """How much of a rollout's k1 is taken off its reward."""
    return config.algo.kl_coef if config.algo.kl_type == "k1" else 0.0


def terms_of(config: Config, objective: SeparableObjective | None = None) -> m.Terms:
    """What a worker makes of a token; `objective` in the place of the configuration's."""
    algo = config.algo
    teacher = config.teacher[0] if config.teacher else None
    return m.Terms(
        temperature=config.rollout.temperature,
        mismatch=algo.mismatch,
        mismatch_low=algo.mismatch_low,
        mismatch_high=algo.mismatch_high,
        kl=algo.kl_type if algo.kl_coef else "",
        entropy=algo.entropy_coef != 0.0,
        divergence=teacher.kl if teacher is not None and teacher.topk != 0 else "",
        mix=teacher.mix if teacher is not None else 0.5,
        sums=(objective or objective_of(config)).sums,
    )


def measured_terms(config: Config) -> frozenset[str]:
    """The optional terms that a step's metrics tell."""
    wanted = {
        "kl": bool(config.algo.kl_coef) and config.algo.kl_type != "k1",
        "entropy": config.algo.entropy_coef != 0.0,
        "divergence": config.algo.type in DISTILLING,
    }
    return frozenset(name for name, present in wanted.items() if present)


def turn_schedule(config: Config, *, may_be_cut: bool) -> Literal["deferred", "forward", "immediate"]:
    """When turns are worked; a model whose sequences must run whole has only one way."""
    chosen = config.stream.turns
    if not may_be_cut or config.stream.mode != "stream":
        return "deferred"
    return "forward" if chosen == "auto" else chosen


def optim_of(config: Config) -> OptimSettings:
    optim = config.optim
    return OptimSettings(
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        max_grad_norm=optim.max_grad_norm,
        scheduler=optim.scheduler,
        warmup_steps=optim.warmup_steps,
        max_steps=config.max_steps,
        offload=optim.offload,
    )


def lora_of(config: Config) -> LoraSettings | None:
    lora = config.model.lora
    if lora is None:
        return None
    return LoraSettings(rank=lora.rank, alpha=lora.alpha, target_modules=tuple(lora.target_modules))
