"""What a configuration would do, in words, before anything starts: units of a step, formula, placement, memory."""

from __future__ import annotations

from pathlib import Path

from thundersync.config import Config
from thundersync.config_file import to_toml
from thundersync.core.advantage import AdvantageRule
from thundersync.core.ready_queue import PARTS_PER_GROUP
from thundersync.errors import ThundersyncError
from thundersync.generate.manifest import read_manifest
from thundersync.models import resolve_model
from thundersync.placement import Placement, place_here

_AGGREGATION = {
    "token_mean": "mean over all sampled tokens of the step",
    "seq_mean_token_mean": "mean over rollouts of each rollout's token mean",
    "seq_mean_token_sum": "mean over rollouts of each rollout's token sum",
}


def units(config: Config) -> str:
    """The one sentence that says what a step counts."""
    algo = config.algo
    rollouts = algo.prompts_per_step * algo.group_size
    return (
        f"One step = {algo.prompts_per_step} prompts x {algo.group_size} rollouts = {rollouts} backward units, "
        f"one optimizer step; {config.max_steps} steps."
    )


def describe(config: Config) -> str:
    """The resolved configuration and everything that follows from it. Starts nothing, fetches nothing."""
    algo = config.algo
    placement = place_here(config)
    rule = AdvantageRule(norm_by_std=algo.norm_by_std, std_unbiased=algo.std_unbiased, eps=algo.adv_eps)
    lines = [
        to_toml(config).rstrip(),
        "",
        units(config),
        f"Advantage: {rule.formula()}; loss: {_AGGREGATION[algo.loss_agg]}.",
        "Strictly on-policy: the probability ratio is 1, so PPO-style clipping would be inactive and is not a setting.",
        f"Placement: {placement.sentence()}.",
        _memory(config, placement),
    ]
    return "\n".join(lines)


def _memory(config: Config, placement: Placement) -> str:
    """Bytes that can be told from the parameter count alone; activations depend on lengths and are not guessed."""
    if not (Path(config.model.name).is_dir() or config.model.name.startswith("package:")):
        return f"Memory: not known before {config.model.name} is downloaded."
    try:
        path = resolve_model(config.model.name, say=lambda text: None)
        shapes = read_manifest(path).shapes
    except ThundersyncError as error:
        return f"Memory: unknown until the model is there ({error.message})."
    parameters = 0
    for shape in shapes.values():
        size = 1
        for length in shape:
            size *= length
        parameters += size
    width = 2 if placement.dtype == "bfloat16" else 4
    weights = parameters * width
    master = 0 if width == 4 else parameters * 4
    optimizer, total, part = parameters * 8, parameters * 4, parameters * 4
    most_parts = min(
        PARTS_PER_GROUP * config.algo.prompts_per_step,
        int(config.stream.partials_gib * 2**30 / part),
    )
    trainer = weights + master + optimizer + total + most_parts * part
    return (
        f"Memory: {parameters / 1e6:.1f} million parameters. Trainer {_gib(trainer)}: weights {_gib(weights)}"
        + (f", master weights {_gib(master)}" if master else "")
        + f", Adam moments {_gib(optimizer)}, step gradient {_gib(total)}, at most {most_parts} parts of open groups "
        f"of {_gib(part)} each; activations come on top. Each engine {_gib(weights)} of weights and "
        + (f"{config.engine.kv_cache_gib:g} GiB of KV cache." if placement.trainer_gpu is None
           else f"KV cache up to {config.engine.gpu_memory_utilization:.0%} of its GPU.")
    )  # fmt: skip


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
