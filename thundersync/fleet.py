"""The engines of a run: the policy's, which are published to, and the teachers', which never are.

Makes and starts them where `placement` says, each under a supervisor that brings it back when it dies. Knows nothing of
rollouts or scores.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from thundersync.config import Config
from thundersync.generate import make_generator
from thundersync.generate.base import Generator
from thundersync.generate.supervised import SupervisedGenerator
from thundersync.monitor.events import AnyEvent
from thundersync.placement import EnginePlace


def engines(
    config: Config,
    place: EnginePlace,
    model_path: Path,
    *,
    name: str,
    dtype: str,
    logs: Path,
    seed: int,
    max_model_len: int,
    max_topk: int,
    emit: Callable[[AnyEvent], None],
) -> list[SupervisedGenerator]:
    """The replicas of one model, not yet started; `name` is that of their log files, `max_topk` the most alternatives
    per token that they are asked to score."""
    width = config.engine.tensor_parallel_size

    def make(index: int, restarts: int) -> Generator:
        own = msgspec.structs.replace(
            config.engine,
            gpus=place.gpus[index * width : (index + 1) * width],
            gpu_memory_utilization=place.gpu_share or config.engine.gpu_memory_utilization,
        )
        # Another stream of random numbers for each engine, restart and resume: the same one would sample the
        # rollouts again that a dead engine had finished.
        return make_generator(
            model_path,
            config=own,
            max_model_len=max_model_len,
            dtype=dtype,
            log_path=logs / f"{name}-{index}.log",
            cpus=place.cpus,
            seed=((seed * 1009 + index) * 1009 + restarts) % 2**31,
            max_topk=max_topk,
        )

    return [SupervisedGenerator(functools.partial(make, index), emit) for index in range(place.replicas)]


async def start_all(generators: Sequence[Generator]) -> None:
    """Side by side. Raises an ExceptionGroup of EngineFailed."""
    async with asyncio.TaskGroup() as starting:
        for generator in generators:
            starting.create_task(generator.start())


async def close_all(generators: Sequence[Generator]) -> None:
    """Side by side: each may take seconds. Raises what went wrong, after all have been tried."""
    results = await asyncio.gather(*(generator.close() for generator in generators), return_exceptions=True)
    if errors := [result for result in results if isinstance(result, Exception)]:
        raise ExceptionGroup("engines did not close", errors)
