"""Where a configuration computes, as far as its memory depends on it: as a run recorded it, or as it would be here."""

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from thundersync.config import Config
from thundersync.forecast.memory import total
from thundersync.monitor.events import RunStarted
from thundersync.placement import BF16_FLAGS, Dtype, Placement, cpu_flags
from thundersync.plan.model import Memory


class Site(Struct, frozen=True, kw_only=True):
    """Devices and numbers."""

    sentence: str
    """For people."""
    dtype: Dtype
    workers: int
    on_gpus: bool


def site_here(placement: Placement) -> Site:
    return Site(
        sentence=placement.sentence(),
        dtype=placement.dtype,
        workers=len(placement.trainers),
        on_gpus=placement.on_gpus,
    )


def site_of_run(config: Config, started: RunStarted | None) -> Site | None:
    """As the run told when it started, wherever that was; None: a version of thundersync that did not tell."""
    if started is None or not started.trainer_workers:
        return None
    kind, dtype = "GPU" if started.on_gpus else "core", recorded_dtype(config, started)
    engines, learning = started.engine_devices, started.trainer_devices
    workers = "" if started.on_gpus or started.trainer_workers == 1 else f" ({started.trainer_workers} workers)"
    generated, learned = (f"{count} {kind}{'s' * (count != 1)}" for count in (engines, learning))
    return Site(
        sentence=f"{generated} generated, {learned} learned{workers}, in {dtype}, as the run told",
        dtype=dtype,
        workers=started.trainer_workers,
        on_gpus=started.on_gpus,
    )


def recorded_dtype(config: Config, started: RunStarted | None) -> Dtype:
    """Of the run's weights. An older run that left it to the machine did not tell: on GPUs it was bfloat16, on a CPU
    what this one would take."""
    if started is not None and started.dtype:
        return "float32" if started.dtype == "float32" else "bfloat16"
    if config.model.dtype != "auto":
        return config.model.dtype
    return "bfloat16" if (started is not None and started.on_gpus) or cpu_flags() & BF16_FLAGS else "float32"


def room_gib(run: Path, *, on_gpus: bool) -> float:
    """Memory of the run's smallest GPU, or of its machine; 0: not written down."""
    try:
        told: Mapping[str, str] = msgspec.json.decode((run / "environment.json").read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError):
        return 0.0
    if on_gpus:
        return min((int(size) / 1024 for size in re.findall(r"(\d+) MiB", told.get("GPUs", ""))), default=0.0)
    found = re.fullmatch(r"(\d+) GiB", told.get("memory", ""))
    return float(found[1]) if found else 0.0


def need_gib(config: Config, memory: Memory, *, trainers: int, on_gpus: bool) -> float:
    """Of the fullest GPU; on a CPU of all processes together."""
    if on_gpus:
        weights = sum(item.size for item in memory.engine if item.name == "weights") / 2**30
        return max(total(memory.trainer) / 2**30, weights / config.engine.gpu_memory_utilization)
    engine_gib = sum(item.size for item in memory.engine if item.name == "weights") / 2**30 + config.engine.kv_cache_gib
    return trainers * total(memory.trainer) / 2**30 + max(1, config.engine.replicas) * engine_gib
