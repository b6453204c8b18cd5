"""What a configuration would do, in words, before anything starts: units of a step, formula, placement, memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from thundersync.config import DISTILLING, Config, TeacherConfig
from thundersync.config_file import to_toml
from thundersync.core.ready_queue import PARTS_PER_COHORT
from thundersync.errors import ThundersyncError
from thundersync.forecast.memory import FLOAT32, learning_items
from thundersync.generate.manifest import read_manifest
from thundersync.models import base_of, resolve_model
from thundersync.placement import Placement, place_here
from thundersync.recipe import objective_of
from thundersync.sizes import decoder_in, parameters, trainable
from thundersync.trainers import parts_allowed

_KL = {
    "k1": "taken off the reward: its sum over a rollout's sampled tokens of log policy - log reference (k1)",
    "k2": "times (log policy - log reference)^2 / 2 at each sampled token (k2)",
    "k3": "times exp(d) - d - 1 at each sampled token, d = log reference - log policy (k3)",
}
_DIVERGENCE = {
    "reverse": "KL(policy || teacher)",
    "forward": "KL(teacher || policy)",
    "mixed": "the Jensen-Shannon divergence with {mix:g} of the teacher in the mixture",
}


def units(config: Config) -> str:
    """The one sentence that says what a step counts."""
    algo = config.algo
    rollouts = algo.prompts_per_step * algo.group_size
    counted = f"{rollouts} backward units"
    if algo.type in DISTILLING:
        counted = f"{rollouts} rollouts, each turn one backward unit"
    return (
        f"One step = {algo.prompts_per_step} prompts x {algo.group_size} rollouts = {counted}, "
        f"one optimizer step; {config.max_steps} steps."
    )


def describe(config: Config) -> str:
    """The resolved configuration and everything that follows from it. Starts nothing, fetches nothing."""
    placement = place_here(config)
    lines = [
        to_toml(config).rstrip(),
        "",
        units(config),
        *_objective(config),
        *_endpoint(config),
        "Strictly on-policy: the probability ratio is 1, so PPO-style clipping would be inactive and is not a setting.",
        f"Placement: {placement.sentence()}.",
        _memory(config, placement),
    ]
    return "\n".join(lines)


def _endpoint(config: Config) -> Iterator[str]:
    if (serve := config.serve) is not None:
        who = f"the program {' '.join(serve.command)}" if serve.command else "programs that take rollouts"
        judge = "the programs" if serve.judge == "client" else "the tasks' checkers"
        where = serve.public_url or f"http://{serve.host}:{serve.port or '(a free port)'}"
        yield f"Agent: {who}, at {where}; rollouts are judged by {judge}."


def _objective(config: Config) -> Iterator[str]:
    """Every term of the step's gradient, as a person would write it."""
    algo = config.algo
    aggregation = {
        "token_mean": "mean over all sampled tokens of the step",
        "seq_mean_token_mean": "mean over rollouts of each rollout's token mean",
        "seq_mean_token_sum": "mean over rollouts of each rollout's token sum",
        "constant": f"mean over rollouts of each rollout's token sum / {config.loss_constant_tokens}",
    }[algo.loss_agg]
    if config.teacher:
        yield f"Objective {algo.type}: {_teaching(config.teacher[0])}; loss: {aggregation}."
        yield from (f"Teacher: {_teacher(config, teacher)}." for teacher in config.teacher)
    else:
        yield f"Objective {algo.type}: {objective_of(config).formula()}; loss: {aggregation}."
    if algo.kl_coef:
        yield f"KL to the policy that the run begins with: {algo.kl_coef:g} {_KL[algo.kl_type]}."
    if algo.entropy_coef:
        yield f"Entropy: {algo.entropy_coef:g} times the policy's entropy at each sampled token, to be maximised."
    if algo.zero_variance == "skip" and (algo.kl_coef or algo.entropy_coef):
        yield "Groups of equal rewards are skipped, their KL and entropy gradient with them; they count in every mean."
    if config.teacher and config.teacher[0].topk != 0:
        return  # a divergence of distributions is what it is, whatever the token's own probability was
    band = f"{algo.mismatch_low:g}..{algo.mismatch_high:g}"
    yield {
        "none": "Engine and trainer probabilities are taken as equal: no correction.",
        "tis": f"Mismatch: each token weighs min(trainer / engine, {algo.mismatch_high:g}) (tis).",
        "icepop": f"Mismatch: each token weighs trainer / engine within {band}, and 0 outside (icepop).",
        "seq_mask": f"Mismatch: each sequence weighs the product of trainer / engine within {band}, and 0 outside.",
    }[algo.mismatch]


def _teaching(teacher: TeacherConfig) -> str:
    if teacher.topk == 0:
        return "each sampled token's log policy - log teacher, an estimate of KL(policy || teacher), is lowered"
    over = "the whole vocabulary" if teacher.topk == -1 else f"the teacher's {teacher.topk} best tokens and the rest"
    return f"{_DIVERGENCE[teacher.kl].format(mix=teacher.mix)} over {over} is lowered at each sampled token"


def _teacher(config: Config, teacher: TeacherConfig) -> str:
    name = teacher.name or teacher.base_url or "the policy itself"
    shown = f", shown the {teacher.privileged}" if teacher.privileged else ""
    tasks = "all tasks" if teacher.tasks == "*" else f"tasks {teacher.tasks}"
    return f"{name}{shown}, for {tasks}"


def _memory(config: Config, placement: Placement) -> str:
    """Bytes that can be told from the parameter count alone; activations depend on lengths and are not guessed."""
    if not (Path(config.model.name).is_dir() or config.model.name.startswith("package:")):
        return f"Memory: not known before {config.model.name} is downloaded."
    try:
        folder = base_of(resolve_model(config.model.name))
        shapes = read_manifest(folder).shapes
    except ThundersyncError as error:
        return f"Memory: unknown until the model is there ({error.message})."
    whole, learning, workers = parameters(shapes), trainable(shapes, config.model.lora), len(placement.trainers)
    width = 2 if placement.dtype == "bfloat16" else 4
    weights, part = whole * width, learning * FLOAT32
    items = learning_items(
        whole=whole,
        learning=learning,
        width=width,
        adapter=config.model.lora is not None,
        reference=bool(config.algo.kl_coef) and config.model.lora is None,
        sums=objective_of(config).sums.count,
        workers=workers,
        offload=config.optim.offload and placement.on_gpus,
    )
    on_device = {item.name: item.size for item in items if item.where == "device"}
    in_host = {item.name: item.size for item in items if item.where == "host"}
    cohorts = 0 if config.algo.type in DISTILLING else config.algo.prompts_per_step
    if objective_of(config).cohort == "step":
        cohorts = 1
    budget = parts_allowed(config, placement, shapes=shapes, decoder=decoder_in(folder))
    most_parts = 0 if budget.room.tokens else min(PARTS_PER_COHORT * cohorts, budget.resident, budget.room.most)
    about = "about " if config.model.lora else ""
    text = f"Memory: {whole / 1e6:.1f} million parameters"
    text += f", {about}{learning / 1e6:.1f} million of them in adapters that learn. " if config.model.lora else ". "
    text += f"{'Each of ' + str(workers) + ' trainer workers' if workers > 1 else 'Trainer'} "
    text += f"{about}{_gib(sum(on_device.values()) + most_parts * part)}: "
    text += ", ".join(f"{name} {_gib(size)}" for name, size in on_device.items())
    if most_parts:
        text += f", at most {most_parts} parts of open groups of {_gib(part)} each"
    if budget.room.tokens and cohorts:
        text += f". Activations come on top; parts of open groups, {_gib(part)} each, take their place."
    else:
        text += "; activations come on top."
    if in_host:
        text += f" In host memory {_gib(sum(in_host.values()))}: {', '.join(in_host)}."
    if any(teacher.topk == -1 for teacher in config.teacher):
        text += " Each trainer worker also holds the teacher's weights."
    return text + (
        f" Each of the policy's engines {_gib(weights)} of weights and "
        + (f"KV cache up to {placement.engine.gpu_share:.0%} of its GPU." if placement.on_gpus
           else f"{config.engine.kv_cache_gib:g} GiB of KV cache.")
    )  # fmt: skip


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
