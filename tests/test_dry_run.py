"""What `--dry-run` says before anything starts: units, every term of the objective, places, memory."""

from pathlib import Path

import pytest

from tests.tiny import tiny_model
from thundersync.config import LoraConfig
from thundersync.config_file import config_from
from thundersync.dry_run import describe, units
from thundersync.sizes import parameters, trainable

SHAPES = {
    "model.embed_tokens.weight": [1000, 64],
    "model.layers.0.self_attn.q_proj.weight": [64, 64],
    "model.layers.0.mlp.down_proj.weight": [64, 256],
    "model.layers.0.input_layernorm.weight": [64],
    "lm_head.weight": [1000, 64],
}


def said(**sections: object) -> str:
    """What follows the resolved configuration."""
    text = describe(config_from({"model": {"name": "org/absent"}, "env": {"path": "p"}} | sections))
    return text[text.index("One step = ") :]


def test_a_step_is_counted_in_rollouts_or_in_turns() -> None:
    algo: dict[str, object] = {"group_size": 8, "prompts_per_step": 4}
    raw: dict[str, object] = {"model": {"name": "m"}, "env": {"path": "p"}, "max_steps": 10}
    assert units(config_from(raw | {"algo": algo})) == (
        "One step = 4 prompts x 8 rollouts = 32 backward units, one optimizer step; 10 steps."
    )
    assert units(config_from(raw | {"algo": algo | {"type": "opd"}, "teacher": {"name": "t"}})) == (
        "One step = 4 prompts x 8 rollouts = 32 rollouts, each turn one backward unit, one optimizer step; 10 steps."
    )


@pytest.mark.parametrize(
    ("algo", "formula"),
    [
        ({}, "A = (r - mean(group)) / (std(group, n-1) + 1e-06); loss: mean over all sampled tokens of the step"),
        ({"norm_by_std": "batch"}, "A = (r - mean(group)) / (std(step) + 1e-06)"),
        ({"type": "dr_grpo"}, "A = r - mean(group); loss: mean over rollouts of each rollout's token sum / 4096"),
        ({"type": "rloo"}, "A = r - mean(others of the group); loss: mean over rollouts of each rollout's token sum"),
        ({"type": "reinforce_pp"}, "A = (r - mean(step)) / (std(step, n-1) + 1e-06)"),
        ({"kl_coef": 0.1}, "KL to the policy that the run begins with: 0.1 times exp(d) - d - 1"),
        ({"kl_coef": 0.1, "kl_type": "k1"}, "0.1 taken off the reward"),
        ({"entropy_coef": 0.01}, "Entropy: 0.01 times the policy's entropy"),
        ({"mismatch": "icepop"}, "each token weighs trainer / engine within 0.5..2, and 0 outside"),
        ({"kl_coef": 0.1, "zero_variance": "skip"}, "their KL and entropy gradient with them"),
    ],
)
def test_every_term_of_the_objective_is_written_out(algo: dict[str, object], formula: str) -> None:
    assert formula in said(algo=algo)


def test_what_a_teacher_does_is_written_out() -> None:
    opd: dict[str, object] = {"algo": {"type": "opd"}}
    sampled = said(**opd, teacher={"name": "t"})
    assert "each sampled token's log policy - log teacher" in sampled
    assert "Teacher: t, for all tasks." in sampled
    best = said(**opd, teacher=[{"name": "t", "topk": 20, "kl": "mixed"}, {"name": "u", "topk": 20, "kl": "mixed"}])
    assert "Jensen-Shannon divergence with 0.5 of the teacher in the mixture over the teacher's 20 best tokens" in best
    assert "Teacher: u, for all tasks." in best
    itself = said(algo={"type": "opsd"}, teacher={"privileged": "solution"})
    assert "Teacher: the policy itself, shown the solution, for all tasks." in itself


def test_memory_is_told_for_each_worker(tmp_path: Path) -> None:
    model: dict[str, object] = {"name": str(tiny_model(tmp_path / "model"))}
    alone, shared = said(model=model), said(model=model, trainer={"workers": 2})
    assert "Trainer 0." in alone
    assert "Each of 2 trainer workers 0." in shared
    adapters = said(model=model | {"lora": {"rank": 2}})
    assert "million of them in adapters that learn" in adapters
    assert "Memory: not known before org/absent is downloaded." in said()


def test_parameters_are_counted_from_shapes_alone() -> None:
    assert parameters(SHAPES) == 2 * 64_000 + 64 * 64 + 64 * 256 + 64
    assert trainable(SHAPES, None) == parameters(SHAPES)
    assert trainable(SHAPES, LoraConfig(rank=4)) == 4 * (128 + 320)
    assert trainable(SHAPES, LoraConfig(rank=4, target_modules=("q_proj",))) == 4 * 128
