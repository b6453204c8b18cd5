from collections.abc import Sequence

import pytest

from thundersync.config_file import config_from
from thundersync.errors import ConfigError
from thundersync.placement import Placement, place

SMALL: dict[str, object] = {"model": {"name": "m"}, "env": {"path": "p"}}


def on(cores: Sequence[int], gpus: Sequence[int] = (), flags: set[str] | None = None, **sections: object) -> Placement:
    return place(config_from(SMALL | sections), cores=cores, gpus=gpus, cpu_flags=flags or set())


def test_two_cores_are_one_for_each_side() -> None:
    placement = on([0, 1])
    assert (placement.engine_cpus, placement.trainer_cpus, placement.device) == ([0], [1], "cpu")
    assert placement.trainer_environment({})["OMP_NUM_THREADS"] == "1"


def test_one_core_is_shared() -> None:
    placement = on([3])
    assert (placement.engine_cpus, placement.trainer_cpus) == ([3], [3])
    assert "share core 3" in placement.sentence()


def test_the_last_gpu_learns_and_the_others_generate() -> None:
    placement = on([0, 1], gpus=[0, 1, 2, 3])
    assert (placement.engine_gpus, placement.trainer_gpu, placement.device) == ([0, 1, 2], 3, "cuda:0")
    assert placement.trainer_environment({})["CUDA_VISIBLE_DEVICES"] == "3"
    assert placement.dtype == "bfloat16"


def test_what_the_configuration_names_is_taken() -> None:
    placement = on([0, 1, 2, 3], engine={"cpus": [2]}, trainer={"cpus": [0, 1]})
    assert (placement.engine_cpus, placement.trainer_cpus) == ([2], [0, 1])


def test_what_is_not_there_is_refused_with_what_is() -> None:
    with pytest.raises(ConfigError, match=r"trainer.gpus names \[5\], but this machine has none"):
        on([0], engine={"gpus": [4]}, trainer={"gpus": [5]})


def test_a_cpu_without_bfloat16_instructions_computes_in_float32() -> None:
    assert on([0, 1], flags={"avx2"}).dtype == "float32"
    assert on([0, 1], flags={"avx512_bf16"}).dtype == "bfloat16"
    assert on([0, 1], flags={"avx2"}, model={"name": "m", "dtype": "bfloat16"}).dtype == "bfloat16"
