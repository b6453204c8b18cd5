"""What keys say together: defaults that follow from `algo.type`, and combinations that contradict each other.

A file and a `Config` built in Python go through the same `contradictions`. Each key alone is `config`'s business, and
what depends on the machine or the tasks is found out later, by `placement` and `refusals`.
"""

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from thundersync.config import DISTILLING, AlgoConfig, AlgoType, Config, EnvConfig, TeacherConfig
from thundersync.config_names import shown
from thundersync.errors import ConfigError

PRESETS: dict[AlgoType, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"norm_by_std": False, "loss_agg": "constant"},
    "rloo": {"norm_by_std": False, "loss_agg": "seq_mean_token_sum"},
    "reinforce_pp": {"norm_by_std": "batch", "min_group_size": 1},
    "dapo": {},
    "opd": {"norm_by_std": False, "min_group_size": 1},
    "opsd": {"norm_by_std": False, "min_group_size": 1},
}
"""Defaults of [algo] that follow from its type, where they differ from `AlgoConfig`'s own."""

_WHOLE_GROUPS = ("grpo", "dr_grpo", "rloo", "dapo")
"""Types whose baseline is the group's: one member alone has no advantage."""

_OTHERWISE: dict[AlgoType, dict[str, tuple[tuple[Any, ...], str]]] = {
    "dr_grpo": {
        "norm_by_std": ((False,), 'it never divides by a deviation: say algo.type = "grpo"'),
        "loss_agg": (
            ("constant", "seq_mean_token_sum"),
            'it divides by a constant, not by lengths: say algo.type = "grpo" with algo.norm_by_std = false',
        ),
    },
    "rloo": {"norm_by_std": ((False,), 'it never divides by a deviation: say algo.type = "grpo"')},
    "reinforce_pp": {
        "norm_by_std": (("batch",), 'it takes mean and deviation of the whole step: say algo.type = "grpo"'),
        "zero_variance": (("keep",), "a group of equal rewards has an advantage here, so it cannot be skipped"),
    },
    "dapo": {
        "norm_by_std": ((True,), 'it divides by the group\'s deviation: say algo.type = "grpo"'),
        "loss_agg": (("token_mean",), 'it is the mean over all tokens of the step: say algo.type = "grpo"'),
    },
    "opd": {"norm_by_std": ((False,), "a teacher scores tokens, and no reward is learned from: leave it out")},
    "opsd": {"norm_by_std": ((False,), "a teacher scores tokens, and no reward is learned from: leave it out")},
}
"""By type, then key: the values that are still that type, and what to do with any other."""


def check(config: Config) -> None:
    """Refuse a configuration that contradicts itself. Raises: ConfigError with all faults."""
    refuse(list(contradictions(config)), "the configuration")


def refuse(faults: list[str], origin: str) -> None:
    """Raises: ConfigError that lists `faults`, if there are any."""
    if faults:
        listed = "\n".join(f"  - {fault}" for fault in faults)
        raise ConfigError(f"{origin} cannot be run:\n{listed}", remedy="Mend these and run again; nothing was started.")


def contradictions(config: Config) -> Iterator[str]:
    """What each key alone cannot tell, as sentences."""
    yield from _objective(config)
    yield from _teachers(config)
    yield from _stream(config)
    yield from _bench(config)
    yield from _serve(config)
    yield from _sizes(config)
    yield from _gpus(config)
    yield from _images(config)
    yield from _inert(config)


def _images(config: Config) -> Iterator[str]:
    for key, env in (("env", config.env), ("eval.env", config.eval.env if config.eval is not None else EnvConfig())):
        if env.bake_tools and config.sandbox.runtime in ("process", "none"):
            yield f"{key}.bake_tools builds images, and sandbox.runtime = {shown(config.sandbox.runtime)} has none"


def _objective(config: Config) -> Iterator[str]:
    algo = config.algo
    for key, (right, remedy) in _OTHERWISE.get(algo.type, {}).items():
        value = getattr(algo, key)
        if value not in right:
            yield f"algo.{key} = {shown(value)} contradicts algo.type = {shown(algo.type)}: {remedy}"
    if algo.loss_constant and algo.loss_agg != "constant":
        yield f'algo.loss_constant = {algo.loss_constant} is for algo.loss_agg = "constant", not {shown(algo.loss_agg)}'
    if algo.mismatch in ("icepop", "seq_mask") and algo.mismatch_low >= algo.mismatch_high:
        yield f"algo.mismatch_low = {algo.mismatch_low:g} is not below algo.mismatch_high = {algo.mismatch_high:g}"
    if algo.type in DISTILLING:
        if algo.loss_agg == "seq_mean_token_mean":
            yield (
                f'algo.loss_agg = "seq_mean_token_mean" with algo.type = {shown(algo.type)}: a turn is worked before '
                'the length of its rollout is known; use "token_mean"'
            )
        if algo.mismatch == "seq_mask":
            yield (
                f'algo.mismatch = "seq_mask" with algo.type = {shown(algo.type)}: a turn is worked before its sequence '
                'is whole; use "tis" or "icepop"'
            )
        if algo.kl_coef and algo.kl_type == "k1":
            yield (
                f'algo.kl_type = "k1" is taken off the reward, which algo.type = {shown(algo.type)} does not learn '
                'from; use "k2" or "k3"'
            )


def _teachers(config: Config) -> Iterator[str]:
    kind, teachers = config.algo.type, config.teacher
    if kind not in DISTILLING:
        if teachers:
            yield f'[teacher] with algo.type = {shown(kind)} would never be asked: say algo.type = "opd", or remove it'
        return
    if not teachers:
        yield (
            'algo.type = "opd" needs a [teacher] with a name or a base_url'
            if kind == "opd"
            else 'algo.type = "opsd" needs a [teacher] with privileged = "solution": what only it is shown'
        )
        return
    for index, teacher in enumerate(teachers):
        where = "teacher" if len(teachers) == 1 else f"teacher[{index}]"
        yield from _self_teacher(teacher, where) if kind == "opsd" else _outside_teacher(teacher, where)
        if teacher.topk == 0 and teacher.kl != "reverse":
            yield (
                f"{where}.kl = {shown(teacher.kl)} compares distributions, and {where}.topk = 0 has the sampled token "
                'only: set topk to 1 or more, or to -1, or use kl = "reverse"'
            )
        if teacher.kl == "mixed" and teacher.mix in (0.0, 1.0):
            plain = "forward" if teacher.mix == 0.0 else "reverse"
            yield f'{where}.mix = {teacher.mix:g} mixes nothing: say {where}.kl = "{plain}"'
    for key in ("topk", "kl", "mix"):
        if len({getattr(teacher, key) for teacher in teachers}) > 1:
            yield f"teacher.{key} differs between teachers: one loss is one formula, so give all the same"
    if kind == "opd" and len(teachers) > 1 and any(teacher.topk == -1 for teacher in teachers):
        yield f"teacher.topk = -1 with {len(teachers)} teachers: each trainer worker holds one"
    if kind == "opsd" and len(teachers) > 1:
        yield f'algo.type = "opsd" has one teacher, the policy itself; {len(teachers)} are given'
    if config.rollout.temperature != 1.0 and any(teacher.topk != -1 for teacher in teachers):
        yield (
            f"rollout.temperature = {config.rollout.temperature:g} with a teacher in an engine: engines give prompt "
            "logprobs at temperature 1 only; set it to 1, or teacher.topk to -1"
        )


def _outside_teacher(teacher: TeacherConfig, where: str) -> Iterator[str]:
    if bool(teacher.name) == bool(teacher.base_url):
        both = "both are given" if teacher.name else "neither is given"
        yield f"{where} is either a model (name) or a server (base_url): {both}"
    if teacher.privileged:
        yield f'{where}.privileged is for algo.type = "opsd", where the policy teaches itself'
    if teacher.base_url and teacher.topk == -1:
        yield (
            f"{where}.topk = -1 holds the teacher's weights in each trainer worker, and {where}.base_url has none: "
            "name the model, or choose how many tokens a server sends (topk = 20)"
        )
    if (teacher.base_url or teacher.topk == -1) and (teacher.gpus or teacher.cpus or teacher.replicas):
        place = "a server has its own" if teacher.base_url else "with topk = -1 it is in the trainer workers"
        yield f"{where}.gpus, cpus and replicas are for a teacher in engines of ours; {place}"
    if teacher.tokenizer and not teacher.base_url:
        yield f"{where}.tokenizer is for {where}.base_url; a named model brings its own"
    if teacher.base_url and not teacher.base_url.startswith(("http://", "https://")):
        yield f"{where}.base_url = {shown(teacher.base_url)} is not an address; it begins with http:// or https://"


def _self_teacher(teacher: TeacherConfig, where: str) -> Iterator[str]:
    if not teacher.privileged:
        yield f'{where}.privileged is needed for algo.type = "opsd": say "solution"'
    if teacher.topk == -1:
        yield f'{where}.topk = -1 with algo.type = "opsd": a teacher in the trainer workers reads what the policy reads'
    for key in ("name", "base_url", "tokenizer", "gpus", "cpus", "replicas"):
        if getattr(teacher, key):
            yield f'{where}.{key} with algo.type = "opsd": the teacher is the policy itself, in its own engines'


def _stream(config: Config) -> Iterator[str]:
    stream, kind = config.stream, config.algo.type
    terms = config.algo.entropy_coef or (config.algo.kl_coef and config.algo.kl_type != "k1")
    if stream.release == "content" and terms:
        yield (
            'stream.release = "content" holds a gradient that may be thrown away, and the KL and entropy terms go '
            "straight into the step's sums: leave them out, or release at the reward"
        )
    if stream.release == "content" and kind in DISTILLING:
        yield f'stream.release = "content" is meaningless with algo.type = {shown(kind)}: it waits for no reward'
    if stream.turns in ("forward", "immediate") and kind not in DISTILLING:
        yield (
            f"stream.turns = {shown(stream.turns)} needs a teacher: with algo.type = {shown(kind)} a rollout is worked "
            "whole, when its reward is known; leave it out"
        )
    if stream.mode != "stream":
        whole = "step" if stream.mode == "lazy" else "group"
        waits = f"stream.mode = {shown(stream.mode)}, which works after the {whole}"
        if stream.turns in ("forward", "immediate"):
            yield f"stream.turns = {shown(stream.turns)} contradicts {waits}"
        if stream.release == "content":
            yield f'stream.release = "content" contradicts {waits}'
    if stream.mode == "group" and kind == "reinforce_pp":
        yield (
            'stream.mode = "group" with algo.type = "reinforce_pp": rewards of the whole step are compared, so no '
            'group is final by itself; say "stream" or "lazy"'
        )


def _bench(config: Config) -> Iterator[str]:
    bench = config.bench
    if bench is None:
        return
    if bench.turns_min > bench.turns_max:
        yield f"bench.turns_min = {bench.turns_min} is above bench.turns_max = {bench.turns_max}"
    if len(set(bench.arms)) < len(bench.arms):
        yield f"bench.arms = {list(bench.arms)} names an arm twice"


def _serve(config: Config) -> Iterator[str]:
    serve = config.serve
    if serve is None:
        return
    if config.algo.type == "opsd":
        yield (
            'algo.type = "opsd" with [serve]: the teacher is shown more than the agent, and what an outside agent '
            'shows the model is not known beforehand; use "opd" or a type with rewards'
        )
    if not serve.command and config.stall_timeout_s <= serve.idle_timeout_s:
        yield (
            f"serve.idle_timeout_s = {serve.idle_timeout_s:g} is not below stall_timeout_s = "
            f"{config.stall_timeout_s:g}, which would end the run during one silent program"
        )
    if serve.public_url and not _is_base_url(serve.public_url):
        yield (
            f"serve.public_url = {shown(serve.public_url)} is no base URL: say http or https, a host and perhaps a "
            "port and a path, e.g. https://train.example.org"
        )
    if config.sandbox.runtime == "none" and serve.judge == "checker":
        yield 'serve.judge = "checker" with sandbox.runtime = "none": checkers run in sandboxes; say "client"'


def _is_base_url(url: str) -> bool:
    """Paths can be written behind it, and it tells no password."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    plain = not (parts.query or parts.fragment or parts.username or parts.password or re.search(r"[\s?#]", url))
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and plain


def _sizes(config: Config) -> Iterator[str]:
    algo = config.algo
    if algo.type in _WHOLE_GROUPS:
        if algo.group_size < 2:
            yield "algo.group_size = 1: a reward relative to its group of one is always zero; use 2 or more"
        if algo.min_group_size < 2:
            yield "algo.min_group_size = 1: one member has no advantage; use 2 or more"
    elif algo.type == "reinforce_pp" and algo.group_size * algo.prompts_per_step < 2:
        yield "algo.group_size x algo.prompts_per_step = 1: one reward has no deviation; use 2 or more"
    if algo.min_group_size > algo.group_size:
        yield (
            f"algo.min_group_size = {algo.min_group_size} is more than algo.group_size = {algo.group_size}: "
            "every group would be dropped"
        )
    if config.rollout.max_tokens >= config.model.max_model_len:
        yield (
            f"rollout.max_tokens = {config.rollout.max_tokens} leaves no room for a prompt within "
            f"model.max_model_len = {config.model.max_model_len}"
        )
    if config.optim.warmup_steps > config.max_steps:
        yield f"optim.warmup_steps = {config.optim.warmup_steps} is more than max_steps = {config.max_steps}"
    if config.name and (not re.fullmatch(r"[^/\\\0]{1,100}", config.name) or config.name in (".", "..")):
        yield f"name = {config.name!r}: it names a folder, so at most 100 characters and no slash"
    slowest = max(config.rollout.timeout_s, config.rollout.command_timeout_s)
    if config.stall_timeout_s <= slowest:
        yield (
            f"stall_timeout_s = {config.stall_timeout_s:g} would end the run during one slow rollout of {slowest:g} s "
            "(rollout.timeout_s); make it longer"
        )


def _gpus(config: Config) -> Iterator[str]:
    engine, trainer = config.engine.gpus, config.trainer.gpus
    if engine and not trainer:
        yield "engine.gpus is given but trainer.gpus is not: say which GPUs learn"
    if trainer and not engine:
        yield "trainer.gpus is given but engine.gpus is not: say which GPUs generate"
    if both := sorted(set(engine) & set(trainer)):
        yield f"GPUs {both} are in engine.gpus and in trainer.gpus: give each to one of them"
    if trainer and config.trainer.workers not in (0, len(trainer)):
        yield (
            f"trainer.workers = {config.trainer.workers}, but trainer.gpus names {len(trainer)}: each GPU has one "
            "worker; leave trainer.workers out"
        )
    for key, gpus in (("engine", engine), ("trainer", trainer)):
        if len(set(gpus)) < len(gpus):
            yield f"{key}.gpus = {gpus} names a GPU twice"
    for teacher in config.teacher:
        if both := sorted(set(teacher.gpus) & set(trainer)):
            yield f"GPUs {both} are in teacher.gpus and in trainer.gpus: give each to one of them"


def _inert(config: Config) -> Iterator[str]:
    """Keys that were set and that nothing would read: told, instead of silently ignored."""
    algo, default = config.algo, AlgoConfig()
    read_if: dict[str, tuple[bool, str]] = {
        "mismatch_low": (algo.mismatch in ("icepop", "seq_mask"), 'algo.mismatch = "icepop" or "seq_mask"'),
        "mismatch_high": (algo.mismatch != "none", 'an algo.mismatch other than "none"'),
        "max_attempts": (algo.on_failure == "retry", 'algo.on_failure = "retry"'),
    }
    for key, (read, when) in read_if.items():
        if not read and getattr(algo, key) != getattr(default, key):
            yield f"algo.{key} = {shown(getattr(algo, key))} is read only with {when}: leave it out"
    if algo.mismatch == "tis" and algo.mismatch_high < 1.0:
        yield f"algo.mismatch_high = {algo.mismatch_high:g} would cut nearly every token: a cap is 1 or more"
    for index, teacher in enumerate(config.teacher):
        if teacher.mix != TeacherConfig().mix and teacher.kl != "mixed":
            yield f'teacher[{index}].mix = {teacher.mix:g} is read only with kl = "mixed": leave it out'
