"""The words of other trainers: which keys and values of theirs mean ours, which need no key here, which cannot be.

Plain tables. `config_file` reads them, and tells the user of every name it translated.
"""

from typing import Any

from msgspec import Struct

ALIASES: dict[str, str] = {
    "total_training_steps": "max_steps",
    "distillation": "teacher",
    "distillation.teacher": "teacher.name",
    "model.path": "model.name",
    "model.model_name_or_path": "model.name",
    "model.seq_len": "model.max_model_len",
    "model.lora.r": "model.lora.rank",
    "model.lora.lora_rank": "model.lora.rank",
    "model.lora.lora_alpha": "model.lora.alpha",
    "algo.adv_estimator": "algo.type",
    "algo.advantage_estimator": "algo.type",
    "algo.loss_type": "algo.type",
    "algo.n": "algo.group_size",
    "algo.num_generations": "algo.group_size",
    "algo.n_samples_per_prompt": "algo.group_size",
    "algo.rollouts_per_example": "algo.group_size",
    "algo.num_prompts_per_step": "algo.prompts_per_step",
    "algo.groups_per_batch": "algo.prompts_per_step",
    "algo.norm_adv_by_std_in_grpo": "algo.norm_by_std",
    "algo.grpo_norm_by_std": "algo.norm_by_std",
    "algo.scale_rewards": "algo.norm_by_std",
    "algo.loss_agg_mode": "algo.loss_agg",
    "algo.loss_reduction": "algo.loss_agg",
    "algo.loss_scale_factor": "algo.loss_constant",
    "algo.beta": "algo.kl_coef",
    "algo.kl_loss_coef": "algo.kl_coef",
    "algo.kl_loss_type": "algo.kl_type",
    "algo.kl_estimator_type": "algo.kl_type",
    "algo.entropy_coeff": "algo.entropy_coef",
    "algo.use_tis": "algo.mismatch",
    "algo.tis_imp_ratio_cap": "algo.mismatch_high",
    "algo.filter_zero_advantages": "algo.zero_variance",
    "algo.zero_variance_filter": "algo.zero_variance",
    "rollout.max_completion_length": "rollout.max_tokens",
    "rollout.max_completion_tokens": "rollout.max_tokens",
    "rollout.max_new_tokens": "rollout.max_tokens",
    "rollout.max_assistant_turns": "rollout.max_turns",
    "engine.infer_gpus": "engine.gpus",
    "trainer.train_gpus": "trainer.gpus",
    "trainer.max_tokens_per_gpu": "trainer.micro_batch_tokens",
    "trainer.gradient_checkpointing": "trainer.activation_checkpointing",
    "trainer.enable_gradient_checkpointing": "trainer.activation_checkpointing",
    "optim.learning_rate": "optim.lr",
    "optim.clip_grad": "optim.max_grad_norm",
    "optim.optimizer_offload": "optim.offload",
    "optim.cpu_offload": "optim.offload",
    "eval.test_freq": "eval.interval",
    "eval.eval_every": "eval.interval",
    "eval.val_period": "eval.interval",
    "ckpt.save_freq": "ckpt.interval",
    "ckpt.save_every": "ckpt.interval",
}
"""Names of other trainers -> ours, where the unit is the same. A batch size that counts something else is not here."""

ALIAS_NOTES: dict[str, str] = {
    "algo.loss_type": "; how tokens are averaged is algo.loss_agg, whatever the type is called elsewhere",
}
"""What else to say of an alias whose meaning overlaps with ours only in part."""


class Word(Struct, frozen=True):
    """A value in another trainer's words."""

    value: Any
    note: str = ""


_VALUES: dict[str, dict[str, Word]] = {
    "algo.type": {
        "reinforce_plus_plus": Word("reinforce_pp", ": mean and deviation are of the step's rollouts, not its tokens"),
        "reinforce++": Word("reinforce_pp", ": mean and deviation are of the step's rollouts, not its tokens"),
    },
    "algo.norm_by_std": {"group": Word(True), "none": Word(False)},
    "algo.loss_agg": {
        "token-mean": Word("token_mean"),
        "seq-mean-token-mean": Word("seq_mean_token_mean"),
        "sequence_mean": Word("seq_mean_token_mean"),
        "seq-mean-token-sum": Word("seq_mean_token_sum"),
        "seq-mean-token-sum-norm": Word("constant", " (algo.loss_constant tokens)"),
        "seq_mean_token_sum_norm": Word("constant", " (algo.loss_constant tokens)"),
    },
    "algo.kl_type": {
        "kl": Word("k1", ", which is taken off the reward"),
        "mse": Word("k2"),
        "low_var_kl": Word("k3"),
        "k3+": Word("k2", ", which has its gradient"),
        "low_var_kl+": Word("k2", ", which has its gradient"),
    },
    "algo.mismatch": {"true": Word("tis"), "false": Word("none")},
    "algo.zero_variance": {"true": Word("skip"), "false": Word("keep")},
}


def translated(dotted: str, value: Any) -> Word | None:
    """What another trainer's `value` of our key `dotted` is here; None if it is no such word."""
    words = _VALUES.get(dotted, {})
    if isinstance(value, bool):
        return words.get(str(value).lower())
    return words.get(value) if isinstance(value, str) else None


REFUSED_VALUES: dict[tuple[str, str], str] = {
    ("algo.type", "bnpo"): "it averages over each micro-batch, which is not a function of the rollouts alone; over the "
    'whole step it is "dapo"',
    ("algo.type", "gae"): "it needs a critic, and its advantages are not known before one is trained",
    ("algo.kl_type", "abs"): 'use "k2" or "k3"',
    ("algo.kl_type", "full"): "it needs the reference's whole distribution at each token",
    ("stream.mode", "async"): "it would learn from rollouts of an old policy; `bench` measures how fast that would be",
}
"""Values that cannot be honoured -> why."""


class Refusal(Struct, frozen=True, kw_only=True):
    """A known key that cannot be honoured, unless its value is one of `off`."""

    why: str
    off: tuple[Any, ...] = ()
    note: str = ""
    """About a value of `off`."""


_FILTER = "sampling filters change the policy that is sampled, so the gradient would not be exact"
_ONCE = "each rollout is used for exactly one optimizer step"
_BATCH = "say algo.prompts_per_step (groups) and algo.group_size (rollouts per group)"
_STALE = Refusal(
    why="every rollout counts in the step it was made for; only 0 is possible",
    off=(0,),
    note="how thundersync always works: nothing stale enters a step",
)

REFUSED: dict[str, Refusal] = {
    "algo.train_batch_size": Refusal(why=_BATCH),
    "algo.batch_size": Refusal(why=_BATCH),
    "algo.clip_ratio_c": Refusal(
        why="a dual clip depends on the sign of the advantage, which is not known while its group is open"
    ),
    "algo.ppo_epochs": Refusal(why=_ONCE, off=(1,), note=_ONCE),
    "algo.num_iterations": Refusal(why=_ONCE, off=(1,), note=_ONCE),
    "rollout.top_p": Refusal(why=_FILTER, off=(1,), note="off, as always here"),
    "rollout.top_k": Refusal(why=_FILTER, off=(-1, 0), note="off, as always here"),
    "rollout.min_p": Refusal(why=_FILTER, off=(0,), note="off, as always here"),
}
"""Known names that cannot be honoured."""

STALENESS = ("max_staleness", "staleness", "max_off_policy_steps", "off_policy_steps", "async_level", "max_async_level")
"""Keys of any table that say how old a rollout may be."""

_INACTIVE = "clipping is inactive while the probability ratio is 1, and each rollout is used once: nothing to set"
INACTIVE: dict[str, str] = {
    f"algo.{key}": _INACTIVE
    for key in (
        "clip_eps_low",
        "clip_eps_high",
        "clip_ratio_low",
        "clip_ratio_high",
        "clip_ratio",
        "eps_clip",
        "eps_clip_low",
        "eps_clip_high",
        "epsilon",
        "epsilon_high",
    )
}
"""Keys that would change nothing here, whatever their value -> why."""


def refusal(dotted: str) -> Refusal | None:
    """Why the key `dotted` cannot be honoured; None if it is not known for that."""
    return _STALE if dotted.rpartition(".")[2] in STALENESS else REFUSED.get(dotted)


def shown(value: object) -> str:
    """A value as it stands in a file."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
