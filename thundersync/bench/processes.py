"""What a step costs the machine: processor seconds and peak memory of its processes, as the kernel counts them.

Knows process ids; nothing of what they do.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import psutil
from msgspec import Struct


class Cpu(Struct, frozen=True, kw_only=True):
    """Processor seconds, by what they were spent for."""

    coordinator_s: float = 0.0
    trainer_s: float = 0.0
    engine_s: float = 0.0

    def since(self, before: Cpu) -> Cpu:
        return Cpu(
            coordinator_s=self.coordinator_s - before.coordinator_s,
            trainer_s=self.trainer_s - before.trainer_s,
            engine_s=self.engine_s - before.engine_s,
        )


class Processes:
    """This process, the trainer workers, and the children that are neither: engines."""

    def __init__(self, trainers: Sequence[int]) -> None:
        """`trainers`: process ids of the trainer workers of all arms."""
        self._own = psutil.Process()
        self._trainers = set(trainers)

    def cpu(self) -> Cpu:
        """Since each of them began."""
        spent = {True: 0.0, False: 0.0}
        for child in self._own.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = child.cpu_times()
                spent[child.pid in self._trainers] += times.user + times.system
        own = self._own.cpu_times()
        return Cpu(coordinator_s=own.user + own.system, trainer_s=spent[True], engine_s=spent[False])


class PeakMemory:
    """The most memory that some processes had at once each, since `reset`. Linux only: elsewhere it is not known."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = list(pids)

    def reset(self) -> None:
        """Forget the peak: from here on it is what they hold now, or more."""
        for pid in self._pids:
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")

    def gib(self) -> float:
        """Resident, of the process that had most; 0 where the kernel does not say."""
        return max((_high_water_kib(pid) for pid in self._pids), default=0) / 2**20


def _high_water_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def machine() -> str:
    """The processor, for people."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{len(os.sched_getaffinity(0))} cores, {line.partition(':')[2].strip()}"
    return f"{os.cpu_count()} cores"
