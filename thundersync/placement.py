"""Which cores and GPUs generate, which learn and which teach: decided once, before anything starts, so that they truly
run side by side. Reads the machine; starts nothing, and asks no library that would wake a GPU."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from thundersync.config import Config, TeacherConfig, TrainerConfig
from thundersync.errors import ConfigError

Dtype = Literal["float32", "bfloat16"]
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
QUIET_THREADS = {
    # A second OpenMP thread on a busy core spins: one step took 142 processor-seconds instead of 16.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
}


class TrainerPlace(Struct, frozen=True, kw_only=True):
    """Where one trainer worker computes: on a GPU, or on cores."""

    cpus: list[int] = []
    gpu: int | None = None

    @property
    def device(self) -> str:
        """Seen from inside its process."""
        return "cpu" if self.gpu is None else "cuda:0"

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment of its process: its own GPU, or its own number of threads."""
        environment = {**base, **QUIET_THREADS, "HF_HUB_OFFLINE": "1"}
        if self.gpu is None:
            environment["CUDA_VISIBLE_DEVICES"] = ""
            environment["OMP_NUM_THREADS"] = str(max(1, len(self.cpus)))
        else:
            environment["CUDA_VISIBLE_DEVICES"] = str(self.gpu)
        return environment


class EnginePlace(Struct, frozen=True, kw_only=True):
    """Where engines of one model generate or score. On GPUs `cpus` is empty."""

    cpus: list[int] = []
    gpus: list[int] = []
    replicas: int = 1
    gpu_share: float = 0.0
    """Of each GPU's memory, for each of these engines: less where others live there too."""


class Placement(Struct, frozen=True, kw_only=True):
    """The machine, shared out."""

    engine: EnginePlace
    trainers: list[TrainerPlace]
    teachers: list[EnginePlace | None]
    """As many as the configuration has; None: it has no engines of its own."""
    dtype: Dtype

    @property
    def on_gpus(self) -> bool:
        return self.trainers[0].gpu is not None

    @property
    def engine_cpus(self) -> list[int]:
        """Cores that the coordinator and its sandboxes share with the engines; empty: all of them."""
        return self.engine.cpus

    def learning_alone(self) -> list[list[int]]:
        """Cores of each trainer worker while nothing is generated: the engines' as well; nothing to say on GPUs."""
        learning = {cpu for place in self.trainers for cpu in place.cpus}
        return [] if self.on_gpus else _shares(sorted(learning.union(self.engine.cpus)), len(self.trainers))

    def sentence(self) -> str:
        """For people."""
        if self.on_gpus:
            engine, learning = self.engine.gpus, [place.gpu for place in self.trainers if place.gpu is not None]
        else:
            engine, learning = self.engine.cpus, sorted({cpu for place in self.trainers for cpu in place.cpus})
        workers = f" ({len(self.trainers)} workers)" if len(self.trainers) > 1 and not self.on_gpus else ""
        if engine == learning:
            text = f"generation and learning{workers} share {self._named(engine)}"
        else:
            generate = "generates" if len(engine) == 1 else "generate"
            learn = "learns" if len(learning) == 1 else "learn"
            text = f"{self._named(engine)} {generate}, {self._named(learning)} {learn}{workers}"
        for teacher in self.teachers:
            if teacher is not None:
                text += f", the teacher is on {self._named(teacher.gpus if self.on_gpus else teacher.cpus)}"
        return f"{text}, in {self.dtype}"

    def _named(self, numbers: Sequence[int]) -> str:
        kind = "GPU" if self.on_gpus else "core"
        return f"{kind}{'s' if len(numbers) > 1 else ''} {_listed(numbers)}"


def place(config: Config, *, cores: Sequence[int], gpus: Sequence[int], cpu_flags: set[str]) -> Placement:
    """Share `cores` and `gpus` out. Raises: ConfigError when the configuration names what is not there."""
    wanted = [
        ("engine.gpus", config.engine.gpus, gpus),
        ("trainer.gpus", config.trainer.gpus, gpus),
        ("engine.cpus", config.engine.cpus, cores),
        ("trainer.cpus", config.trainer.cpus, cores),
        *(("teacher.gpus", teacher.gpus, gpus) for teacher in config.teacher),
        *(("teacher.cpus", teacher.cpus, cores) for teacher in config.teacher),
    ]
    faults = [
        f"{key} names {sorted(set(named) - set(there))}, but this machine has {_listed(there) or 'none'}"
        for key, named, there in wanted
        if set(named) - set(there)
    ]
    if faults:
        raise ConfigError("; ".join(faults), remedy="Leave these keys out to let thundersync choose.")
    return _on_gpus(config, gpus) if gpus else _on_cores(config, cores, cpu_flags)


def _on_gpus(config: Config, gpus: Sequence[int]) -> Placement:
    width = config.engine.tensor_parallel_size
    engines, learning = config.engine.gpus, config.trainer.gpus
    if not learning:
        named = {gpu for teacher in config.teacher for gpu in teacher.gpus}
        engines, learning = _split(config, [gpu for gpu in gpus if gpu not in named] or gpus)
    teaching = [(teacher.gpus or engines) if _has_engines(teacher) else [] for teacher in config.teacher]

    def engine(on: list[int], replicas: int, key: str) -> EnginePlace:
        count = replicas or len(on) // width
        if count * width > len(on) or count == 0:
            raise ConfigError(
                f"{max(count, 1)} {key} engines of {width} GPUs need {max(count, 1) * width}, {len(on)} are there",
                remedy=f"Lower {key}.replicas or engine.tensor_parallel_size, or give {key}.gpus more.",
            )
        tenants = max(sum(gpu in others for others in (engines, learning, *teaching)) for gpu in on)
        share = config.engine.gpu_memory_utilization / tenants
        return EnginePlace(gpus=on, replicas=count, gpu_share=share)

    return Placement(
        engine=engine(engines, config.engine.replicas, "engine"),
        trainers=[TrainerPlace(gpu=gpu) for gpu in learning],
        teachers=[
            engine(on, teacher.replicas, "teacher") if on else None
            for teacher, on in zip(config.teacher, teaching, strict=True)
        ],
        dtype="bfloat16" if config.model.dtype == "auto" else config.model.dtype,
    )


def _split(config: Config, gpus: Sequence[int]) -> tuple[list[int], list[int]]:
    """GPUs that generate and GPUs that learn, where none is named: about half each, a lone one does both."""
    width = config.engine.tensor_parallel_size
    if len(gpus) == 1 and config.trainer.workers < 2:
        return list(gpus), list(gpus)
    if config.trainer.workers:
        engines = len(gpus) - config.trainer.workers
    elif config.engine.replicas:
        engines = config.engine.replicas * width
    else:
        engines = max(width, (len(gpus) - len(gpus) // 2) // width * width)
    if not 0 < engines < len(gpus):
        raise ConfigError(
            f"{config.trainer.workers or 1} trainer workers and {max(config.engine.replicas, 1)} engines of {width} "
            f"GPUs need more than the {len(gpus)} that are there",
            remedy="Lower trainer.workers, engine.replicas or engine.tensor_parallel_size.",
        )
    return list(gpus[:engines]), list(gpus[engines:])


def _on_cores(config: Config, cores: Sequence[int], flags: set[str]) -> Placement:
    half = max(1, len(cores) // 2)
    # A side that is not named takes what the other leaves.
    engine_cpus = config.engine.cpus or _others(cores, config.trainer.cpus)[:half]
    trainer_cpus = config.trainer.cpus or _others(cores, engine_cpus)
    if config.model.dtype == "auto":
        dtype: Dtype = "bfloat16" if flags & BF16_FLAGS else "float32"
    else:
        dtype = config.model.dtype
    return Placement(
        engine=EnginePlace(cpus=engine_cpus, replicas=config.engine.replicas or 1),
        trainers=[TrainerPlace(cpus=cpus) for cpus in _shares(trainer_cpus, config.trainer.workers or 1)],
        teachers=[
            EnginePlace(cpus=teacher.cpus or engine_cpus, replicas=teacher.replicas or 1)
            if _has_engines(teacher)
            else None
            for teacher in config.teacher
        ],
        dtype=dtype,
    )


def _has_engines(teacher: TeacherConfig) -> bool:
    """False: it is behind a server, or the policy itself, or the trainer workers hold it for its whole vocabulary."""
    return bool(teacher.name) and teacher.topk != -1


def _shares(cores: Sequence[int], workers: int) -> list[list[int]]:
    """The cores of each worker, as even as they come; with more workers than cores, some cores have several."""
    if workers > len(cores):
        return [[cores[index % len(cores)]] for index in range(workers)]
    return [
        list(cores[index * len(cores) // workers : (index + 1) * len(cores) // workers]) for index in range(workers)
    ]


def place_here(config: Config) -> Placement:
    """`place` on this machine, as this process may use it. Raises: ConfigError."""
    return place(config, cores=usable_cores(), gpus=visible_gpus(os.environ), cpu_flags=cpu_flags())


def place_engines(config: Config, *, cores: Sequence[int], gpus: Sequence[int], cpu_flags: set[str]) -> Placement:
    """Where the policy's engines generate when nothing learns: everywhere. Raises: ConfigError as `place` does."""
    alone = msgspec.structs.replace(
        config, teacher=[], trainer=TrainerConfig(cpus=config.engine.cpus or list(cores), gpus=[])
    )
    if not gpus:
        own = msgspec.structs.replace(alone.engine, cpus=config.engine.cpus or list(cores))
        return place(msgspec.structs.replace(alone, engine=own), cores=cores, gpus=[], cpu_flags=cpu_flags)
    on, width = config.engine.gpus or list(gpus), config.engine.tensor_parallel_size
    if missing := sorted(set(on) - set(gpus)):
        raise ConfigError(f"engine.gpus names {missing}, which this machine has not", remedy="Leave engine.gpus out.")
    replicas = config.engine.replicas or len(on) // width
    if not 0 < replicas * width <= len(on):
        raise ConfigError(
            f"{max(replicas, 1)} engines of {width} GPUs need {max(replicas, 1) * width}, {len(on)} are there",
            remedy="Lower engine.replicas or engine.tensor_parallel_size.",
        )
    share = config.engine.gpu_memory_utilization
    return Placement(
        engine=EnginePlace(gpus=on, replicas=replicas, gpu_share=share),
        trainers=[],
        teachers=[],
        dtype="bfloat16" if config.model.dtype == "auto" else config.model.dtype,
    )


def place_engines_here(config: Config) -> Placement:
    """`place_engines` on this machine. Raises: ConfigError."""
    return place_engines(config, cores=usable_cores(), gpus=visible_gpus(os.environ), cpu_flags=cpu_flags())


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
