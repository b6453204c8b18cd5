"""What each trainer worker is told before it starts."""

from collections.abc import Sequence
from pathlib import Path

from thundersync import trainers
from thundersync.budget import EVERY_PART, GPU_SHARE, part_budget
from thundersync.config_file import config_from
from thundersync.learn import messages as m
from thundersync.placement import place

SHAPES = {"model.embed_tokens.weight": [1000, 64], "model.layers.0.mlp.down_proj.weight": [64, 256]}


async def told(folder: Path, gpus: Sequence[int] = (), **sections: object) -> list[m.Setup]:
    config = config_from({"model": {"name": "m"}, "env": {"path": "p"}} | sections)
    placement = place(config, cores=[0, 1, 2], gpus=gpus, cpu_flags=set())
    workers = trainers.links(placement, folder)
    try:
        return trainers.setups(
            config, placement, workers, model_path=folder, shapes=SHAPES, teacher_path="", checkpoint=""
        )
    finally:
        await trainers.close_all(workers)


async def test_workers_are_ranks_of_one_group_with_one_arena(tmp_path: Path) -> None:
    setups = await told(tmp_path, trainer={"workers": 2})
    assert [(setup.rank, setup.world, setup.cpus) for setup in setups] == [(0, 2, [1]), (1, 2, [2])]
    assert len({setup.arena_path for setup in setups}) == len({setup.rendezvous for setup in setups}) == 1


async def test_the_parts_that_stay_on_a_gpu_are_those_that_fit_its_budget(tmp_path: Path) -> None:
    part_gib = 4 * (1000 * 64 + 64 * 256) / 2**30
    (setup,) = await told(tmp_path, gpus=[0, 1], stream={"partials_gib": 3.5 * part_gib})
    assert (setup.resident_parts, setup.device, setup.dtype) == (3, "cuda:0", "bfloat16")


async def test_on_a_cpu_every_part_stays_where_it_is(tmp_path: Path) -> None:
    (setup,) = await told(tmp_path, stream={"partials_gib": 1e-6})
    assert setup.resident_parts == EVERY_PART


def test_by_default_parts_take_a_twentieth_of_a_gpu_workers_memory_and_the_rest_moves_to_the_host() -> None:
    config = config_from({"model": {"name": "m", "lora": {"rank": 8}}, "env": {"path": "p"}})
    whole, learning = 1_000_000, 10_000
    budget = part_budget(config, whole=whole, learning=learning, width=2, workers=1, on_gpus=True)
    held = 2 * whole + learning * (2 + 4 + 8 + 4)  # weights, adapter, master weights, moments, gradient
    assert budget.resident == int(GPU_SHARE * held / (4 * learning)) == 2
    assert budget.most > budget.resident
    assert part_budget(config, whole=whole, learning=learning, width=2, workers=1, on_gpus=False).resident == EVERY_PART
