"""The trainer workers of a run: one process for each place that `placement` gave to learning.

Makes and starts them, and tells each what it needs to know once. What they then work on is `learn.stream`'s business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from thundersync.budget import PartBudget, part_budget
from thundersync.config import Config
from thundersync.core.objective import SeparableObjective
from thundersync.errors import ConfigError
from thundersync.forecast.memory import Decoder
from thundersync.generate.child import child_environment
from thundersync.learn import messages as m
from thundersync.learn.link import WorkerLink
from thundersync.models import base_of
from thundersync.placement import Placement
from thundersync.recipe import lora_of, optim_of, terms_of
from thundersync.sizes import parameters, trainable


def links(placement: Placement, logs: Path) -> list[WorkerLink]:
    """The coordinator's ends, by rank; no process runs yet."""
    workers = [
        WorkerLink(rank, log_path=logs / f"trainer-{rank}.log", environment=place.environment(child_environment({})))
        for rank, place in enumerate(placement.trainers)
    ]
    for worker in workers:
        worker.fellows = workers
    return workers


def setups(
    config: Config,
    placement: Placement,
    workers: Sequence[WorkerLink],
    *,
    model_path: Path,
    shapes: Mapping[str, Sequence[int]],
    teacher_path: str,
    checkpoint: str,
    objective: SeparableObjective | None = None,
) -> list[m.Setup]:
    """What each worker is told. `shapes` are the model's tensors; `teacher_path` is a folder if the workers hold the
    teacher, and empty otherwise."""
    if config.algo.kl_coef and base_of(model_path) != model_path:
        raise ConfigError(
            f"{model_path} is an adapter: algo.kl_coef needs the policy that the run begins with, merged, beside it",
            remedy="Merge it into its base with peft's merge_and_unload and name that folder, or leave out the KL.",
        )
    resident = parts_allowed(config, placement, shapes=shapes, decoder=None).resident
    return [
        m.Setup(
            model_path=str(model_path),
            reference_path=str(base_of(model_path)),
            dtype=placement.dtype,
            max_model_len=config.model.max_model_len,
            arena_path=str(workers[0].arena_path),
            cpus=place.cpus,
            device=place.device,
            terms=terms_of(config, objective),
            optim=optim_of(config),
            lora=lora_of(config),
            teacher_path=teacher_path,
            activation_checkpointing=config.trainer.activation_checkpointing,
            block_tokens=config.trainer.micro_batch_tokens,
            resident_parts=resident,
            seed=config.seed,
            rank=rank,
            world=len(workers),
            rendezvous=str(workers[0].folder / "rendezvous"),
            timeout_s=config.stall_timeout_s,
            checkpoint=checkpoint,
        )
        for rank, place in enumerate(placement.trainers)
    ]


def parts_allowed(
    config: Config, placement: Placement, *, shapes: Mapping[str, Sequence[int]], decoder: Decoder | None
) -> PartBudget:
    """Of open groups, in each worker; `shapes` are the model's tensors."""
    return part_budget(
        config,
        whole=parameters(shapes),
        learning=trainable(shapes, config.model.lora),
        width=2 if placement.dtype == "bfloat16" else 4,
        workers=len(placement.trainers),
        on_gpus=placement.on_gpus,
        decoder=decoder,
    )


async def start_all(workers: Sequence[WorkerLink], told: Sequence[m.Setup]) -> list[m.Ready]:
    """Side by side: they meet each other while they start. Raises an ExceptionGroup of WorkerLost."""
    async with asyncio.TaskGroup() as starting:
        answers = [starting.create_task(worker.start(setup)) for worker, setup in zip(workers, told, strict=True)]
    return [answer.result() for answer in answers]


async def close_all(workers: Sequence[WorkerLink]) -> None:
    """Side by side: each is given seconds to end. Raises what went wrong, after all have been tried."""
    results = await asyncio.gather(*(worker.close() for worker in workers), return_exceptions=True)
    if errors := [result for result in results if isinstance(result, Exception)]:
        raise ExceptionGroup("trainer workers did not close", errors)
