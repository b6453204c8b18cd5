"""What each trainer worker is told before it starts."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from thundersync import trainers
from thundersync.budget import EVERY_PART, SHARE, part_budget
from thundersync.config_file import config_from
from thundersync.core.ready_queue import PartRoom
from thundersync.forecast.memory import Decoder, activation_bytes
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
    assert budget.resident == int(SHARE * held / (4 * learning)) == 2
    assert budget.room.most > budget.resident
    assert budget.room.tokens == 0


DECODER = Decoder(
    layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, head_size=64, vocabulary=49152
)  # SmolLM2-135M


@pytest.mark.parametrize("checkpointing", [False, True])
def test_by_default_parts_on_a_cpu_take_no_more_than_the_activations_that_they_replace(checkpointing: bool) -> None:
    raw = {"model": {"name": "m"}, "env": {"path": "p"}, "trainer": {"activation_checkpointing": checkpointing}}
    whole, lazy = 134_515_008, 8192
    budget = part_budget(
        config_from(raw), whole=whole, learning=whole, width=4, workers=1, on_gpus=False, decoder=DECODER
    )
    room, part, spare = budget.room, 4 * whole, SHARE * (4 + 8 + 4) * whole  # weights, moments, gradient
    activations = partial(activation_bytes, DECODER, width=4, checkpointing=checkpointing)
    assert room.most == (2 if checkpointing else 21)
    for parts in range(1, room.most + 1):
        beside = int(lazy + room.spare - parts * room.tokens)
        assert activations(tokens=max(0, beside)) + parts * part <= activations(tokens=lazy) + spare


@pytest.mark.parametrize(("given_gib", "decoder", "most"), [(3.5, DECODER, 3), (3.5, None, 3), (0.0, None, 0)])
def test_given_memory_is_for_parts_alone_and_without_it_an_unknown_model_streams_none_of_a_group(
    given_gib: float, decoder: Decoder | None, most: int
) -> None:
    config = config_from({"model": {"name": "m"}, "env": {"path": "p"}, "stream": {"partials_gib": given_gib}})
    whole = 2**28
    budget = part_budget(config, whole=whole, learning=whole, width=4, workers=1, on_gpus=False, decoder=decoder)
    assert budget.room == PartRoom(most=most)
