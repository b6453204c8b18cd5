"""Which cores and GPUs generate, and which learn: decided once, before anything starts, so that both truly run side
by side. Reads the machine; starts nothing, and asks no library that would wake a GPU."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from thundersync.config import Config
from thundersync.errors import ConfigError

Dtype = Literal["float32", "bfloat16"]
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
QUIET_THREADS = {
    # A second OpenMP thread on a busy core spins: one step took 142 processor-seconds instead of 16.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
}


class Placement(Struct, frozen=True, kw_only=True):
    """The machine, shared out. On GPUs the core lists are empty."""

    engine_cpus: list[int]
    trainer_cpus: list[int]
    engine_gpus: list[int]
    trainer_gpu: int | None
    replicas: int
    gpu_share: float
    """Of an engine GPU's memory, for the engine: half of what is configured where the trainer lives there too."""
    dtype: Dtype

    @property
    def device(self) -> str:
        """Of the trainer, seen from inside its process."""
        return "cpu" if self.trainer_gpu is None else "cuda:0"

    def trainer_environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment of a trainer worker: its own GPU and its own number of threads."""
        environment = {**base, **QUIET_THREADS, "HF_HUB_OFFLINE": "1"}
        if self.trainer_gpu is None:
            environment["CUDA_VISIBLE_DEVICES"] = ""
            environment["OMP_NUM_THREADS"] = str(max(1, len(self.trainer_cpus)))
        else:
            environment["CUDA_VISIBLE_DEVICES"] = str(self.trainer_gpu)
        return environment

    def sentence(self) -> str:
        """For people."""
        if self.trainer_gpu is not None:
            return f"GPUs {_listed(self.engine_gpus)} generate, GPU {self.trainer_gpu} learns, in {self.dtype}"
        if self.engine_cpus == self.trainer_cpus:
            return f"generation and learning share core {_listed(self.engine_cpus)}, in {self.dtype}"
        return f"cores {_listed(self.engine_cpus)} generate, cores {_listed(self.trainer_cpus)} learn, in {self.dtype}"


def place(config: Config, *, cores: Sequence[int], gpus: Sequence[int], cpu_flags: set[str]) -> Placement:
    """Share `cores` and `gpus` out. Raises: ConfigError when the configuration names what is not there."""
    wanted = {
        "engine.gpus": (config.engine.gpus, gpus),
        "trainer.gpus": (config.trainer.gpus, gpus),
        "engine.cpus": (config.engine.cpus, cores),
        "trainer.cpus": (config.trainer.cpus, cores),
    }
    faults = [
        f"{key} names {sorted(set(named) - set(there))}, but this machine has {_listed(there) or 'none'}"
        for key, (named, there) in wanted.items()
        if set(named) - set(there)
    ]
    if faults:
        raise ConfigError("; ".join(faults), remedy="Leave these keys out to let thundersync choose.")
    if gpus:
        trainer = config.trainer.gpus[0] if config.trainer.gpus else gpus[-1]
        engines = config.engine.gpus or [gpu for gpu in gpus if gpu != trainer] or [trainer]
        dtype: Dtype = "bfloat16" if config.model.dtype == "auto" else config.model.dtype
        width = config.engine.tensor_parallel_size
        replicas = config.engine.replicas or len(engines) // width
        if replicas * width > len(engines) or replicas == 0:
            raise ConfigError(
                f"{max(replicas, 1)} engines of {width} GPUs need {max(replicas, 1) * width}, {len(engines)} are there",
                remedy="Lower engine.replicas or engine.tensor_parallel_size, or give engine.gpus more.",
            )
        share = config.engine.gpu_memory_utilization * (0.5 if trainer in engines else 1.0)
        return Placement(
            engine_cpus=[],
            trainer_cpus=[],
            engine_gpus=engines,
            trainer_gpu=trainer,
            replicas=replicas,
            gpu_share=share,
            dtype=dtype,
        )
    half = max(1, len(cores) // 2)
    # A side that is not named takes what the other leaves.
    engine_cpus = config.engine.cpus or _others(cores, config.trainer.cpus)[:half]
    trainer_cpus = config.trainer.cpus or _others(cores, engine_cpus)
    if config.model.dtype == "auto":
        dtype = "bfloat16" if cpu_flags & BF16_FLAGS else "float32"
    else:
        dtype = config.model.dtype
    return Placement(
        engine_cpus=engine_cpus,
        trainer_cpus=trainer_cpus,
        engine_gpus=[],
        trainer_gpu=None,
        replicas=config.engine.replicas or 1,
        gpu_share=0.0,
        dtype=dtype,
    )


def place_here(config: Config) -> Placement:
    """`place` on this machine, as this process may use it. Raises: ConfigError."""
    return place(config, cores=usable_cores(), gpus=visible_gpus(os.environ), cpu_flags=cpu_flags())


def usable_cores() -> list[int]:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def visible_gpus(environment: Mapping[str, str]) -> list[int]:
    """NVIDIA GPUs of this machine, less what CUDA_VISIBLE_DEVICES hides."""
    there = sorted(int(p.name[6:]) for p in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", p.name))
    shown = environment.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return there
    named = [gpu.strip() for gpu in shown.split(",") if gpu.strip()]
    if any(not gpu.lstrip("-").isdigit() for gpu in named):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={shown} does not name GPUs by number",
            remedy="Use numbers, as nvidia-smi lists them.",
        )
    return [int(gpu) for gpu in named if int(gpu) in there]


def cpu_flags() -> set[str]:
    """Instruction sets the kernel reports; empty where it does not."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return set(found.group(1).split()) if found else set()


def _others(cores: Sequence[int], taken: Sequence[int]) -> list[int]:
    """The cores that are not taken; all of them if none is left, to be shared."""
    return [core for core in cores if core not in taken] or list(cores)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
