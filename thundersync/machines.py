"""The processes of a run: the policy's engines, the teachers, the trainer workers; made, then started side by side.

Each one's end is registered before any of them begins. Knows nothing of tasks and rollouts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from msgspec import Struct

from thundersync import fleet, trainers
from thundersync.config import Config
from thundersync.core.objective import SeparableObjective
from thundersync.generate.supervised import SupervisedGenerator
from thundersync.learn import messages as m
from thundersync.learn.link import WorkerLink
from thundersync.models import base_of
from thundersync.monitor.events import AnyEvent
from thundersync.placement import Placement
from thundersync.score.teacher import TeacherPool
from thundersync.teaching import held_path, teacher_pool


class Machines(Struct, kw_only=True):
    """What runs beside this process."""

    generators: list[SupervisedGenerator]
    teachers: TeacherPool | None
    """None: there are none, or the trainer workers hold it."""
    workers: list[WorkerLink]


async def make_machines(
    config: Config,
    placement: Placement,
    *,
    model_path: Path,
    teachers_at: Sequence[Path | None],
    context_tokens: int,
    environment: Mapping[str, str],
    logs: Path,
    start_step: int,
    emit: Callable[[AnyEvent], None],
    stack: AsyncExitStack,
) -> Machines:
    """Nothing is started yet. `teachers_at` are the teachers' folders; `context_tokens` of the policy's engines may be
    more than a rollout's, for what they score where the policy teaches itself."""
    teaches_itself = config.algo.type == "opsd"
    generators = fleet.engines(
        config,
        placement.engine,
        base_of(model_path),
        name="engine",
        dtype=placement.dtype,
        logs=logs,
        seed=config.seed * 1009 + start_step,
        max_model_len=context_tokens,
        max_topk=config.teacher[0].topk if teaches_itself else 0,
        emit=emit,
    )
    stack.push_async_callback(fleet.close_all, generators)
    teachers = teacher_pool(
        config,
        placement,
        teachers_at,
        model_path=model_path,
        generators=generators,
        environment=environment,
        logs=logs,
        emit=emit,
    )
    if teachers is not None:
        stack.push_async_callback(teachers.close)
    workers = trainers.links(placement, logs)
    stack.push_async_callback(trainers.close_all, workers)
    return Machines(generators=generators, teachers=teachers, workers=workers)


async def start_machines(
    machines: Machines,
    config: Config,
    placement: Placement,
    *,
    model_path: Path,
    shapes: Mapping[str, Sequence[int]],
    teachers_at: Sequence[Path | None],
    checkpoint: str,
    say: Callable[[str], None],
    objective: SeparableObjective | None = None,
) -> tuple[m.Ready, list[str]]:
    """Side by side. Returns the first worker's answer, which has the arena, and what the teachers want to be said.

    Raises an ExceptionGroup of EngineFailed, WorkerLost, TeacherFailed, TokenizerMismatch.
    """
    generators, teachers, workers = machines.generators, machines.teachers, machines.workers
    told = trainers.setups(
        config,
        placement,
        workers,
        model_path=model_path,
        shapes=shapes,
        teacher_path=held_path(config, teachers_at),
        checkpoint=checkpoint,
        objective=objective,
    )
    engines = _counted(len(generators), f"{generators[0].name} engine")
    say(f"starting {engines} and {_counted(len(workers), 'trainer worker')}")
    async with asyncio.TaskGroup() as starting:
        starting.create_task(fleet.start_all(generators))
        teaching = starting.create_task(teachers.start()) if teachers is not None else None
        answering = starting.create_task(trainers.start_all(workers, told))
    return answering.result()[0], teaching.result() if teaching is not None else []


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
