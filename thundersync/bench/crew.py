"""Who generates and who learns in an arm: the run's own engines and workers, or all cores for both, in turn.

The colocated crew has engines on the cores that learn, beside the run's own, and a trainer worker with a thread on
every core; it sleeps while other arms are measured, so that all of them can be measured in turn. Knows nothing of
steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import msgspec

from thundersync import fleet, trainers
from thundersync.assembly import Parts
from thundersync.config import Config
from thundersync.errors import ConfigError
from thundersync.generate.base import EngineStats, Generator, WeightArena
from thundersync.generate.manifest import read_manifest
from thundersync.generate.supervised import SupervisedGenerator
from thundersync.learn.link import WorkerLink
from thundersync.models import base_of
from thundersync.monitor.events import AnyEvent
from thundersync.placement import EnginePlace, Placement, TrainerPlace


class Crew:
    """Engines that generate and workers that learn, and the weights that these have published last."""

    def __init__(
        self,
        generators: Sequence[SupervisedGenerator],
        workers: Sequence[WorkerLink],
        *,
        arena: WeightArena,
    ) -> None:
        self.generators = list(generators)
        self.workers = list(workers)
        self.arena = arena
        self.committed = False
        """Its workers have made an optimizer step: from the first one on they hold Adam's moments."""

    @property
    def seats(self) -> Sequence[Generator]:
        return self.generators

    def stats(self) -> EngineStats:
        """Counts of all its engines together."""
        stats = [generator.stats() for generator in self.generators]
        return EngineStats(
            running=sum(each.running for each in stats),
            busy_s=sum(each.busy_s for each in stats),
            prompt_tokens=sum(each.prompt_tokens for each in stats),
            cached_tokens=sum(each.cached_tokens for each in stats),
            sampled_tokens=sum(each.sampled_tokens for each in stats),
        )


def own_crew(parts: Parts) -> Crew:
    """The run's."""
    assert parts.driver.arena is not None  # published at the start
    return Crew(parts.generators, parts.workers, arena=parts.driver.arena)


async def colocated_crew(
    config: Config,
    parts: Parts,
    placement: Placement,
    *,
    emit: Callable[[AnyEvent], None],
    say: Callable[[str], None],
    stack: AsyncExitStack,
) -> Crew:
    """Engines on every core and one worker on all of them. `stack` ends what is started here.

    Raises: ConfigError on GPUs; an ExceptionGroup of EngineFailed, WorkerLost.
    """
    if placement.on_gpus:
        raise ConfigError(
            "the colocated arm shares out cores; two sets of engines and trainers do not fit in GPU memory at once",
            remedy="Leave it out of bench.arms, and measure a configuration whose engine.gpus are its trainer.gpus, "
            "with bench.arms = lazy.",
        )
    cores = sorted({*placement.engine.cpus, *(cpu for place in placement.trainers for cpu in place.cpus)})
    more = [core for core in cores if core not in placement.engine.cpus]
    places = engine_places(config, placement.engine, more)
    count = sum(place.replicas for _, place in places)
    say(f"starting {count} more engines and a trainer worker on cores {', '.join(map(str, cores))}")
    engines = [
        engine
        for index, (own, place) in enumerate(places)
        for engine in fleet.engines(
            own,
            place,
            base_of(parts.model_path),
            name=f"colocated-engine-{index}",
            dtype=placement.dtype,
            logs=parts.folder.logs,
            seed=config.seed * 1009 + 500 + index,
            max_model_len=config.model.max_model_len,
            max_topk=0,
            emit=emit,
        )
    ]
    stack.push_async_callback(fleet.close_all, engines)
    together = msgspec.structs.replace(placement, trainers=[TrainerPlace(cpus=cores)])
    logs = parts.folder.logs / "colocated"
    logs.mkdir(exist_ok=True)
    workers = trainers.links(together, logs)
    stack.push_async_callback(trainers.close_all, workers)
    told = trainers.setups(
        config,
        together,
        workers,
        model_path=parts.model_path,
        shapes=(await asyncio.to_thread(read_manifest, base_of(parts.model_path))).shapes,
        teacher_path="",
        checkpoint="",
    )
    async with asyncio.TaskGroup() as starting:
        starting.create_task(fleet.start_all(engines))
        answering = starting.create_task(trainers.start_all(workers, told))
    arena = answering.result()[0].arena
    assert arena is not None
    return Crew([*parts.generators, *engines], workers, arena=arena)


def engine_places(config: Config, engine: EnginePlace, cores: Sequence[int]) -> list[tuple[Config, EnginePlace]]:
    """Engines like the run's own on more `cores`: as many cores each, so that rollouts, which are shared out evenly,
    find as much of the machine in each. Where fewer are left for the last ones, these take as many fewer at once."""
    size = len(engine.cpus)
    found = []
    for first in range(0, len(cores), size):
        cpus = list(cores[first : first + size])
        seats = max(1, config.engine.max_num_seqs * len(cpus) // size)
        own = msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, max_num_seqs=seats))
        found.append((own, EnginePlace(cpus=cpus, replicas=engine.replicas)))
    return found
