from collections.abc import Sequence

import pytest

from thundersync.config_file import config_from
from thundersync.errors import ConfigError
from thundersync.placement import Placement, place, place_engines

SMALL: dict[str, object] = {"model": {"name": "m"}, "env": {"path": "p"}}
OPD: dict[str, object] = {"algo": {"type": "opd"}, "teacher": {"name": "t"}}


def on(cores: Sequence[int], gpus: Sequence[int] = (), flags: set[str] | None = None, **sections: object) -> Placement:
    return place(config_from(SMALL | sections), cores=cores, gpus=gpus, cpu_flags=flags or set())


def learning(placement: Placement) -> list[int | None]:
    return [trainer.gpu for trainer in placement.trainers]


def test_two_cores_are_one_for_each_side() -> None:
    placement = on([0, 1])
    (trainer,) = placement.trainers
    assert (placement.engine.cpus, trainer.cpus, trainer.device) == ([0], [1], "cpu")
    assert trainer.environment({})["OMP_NUM_THREADS"] == "1"
    assert placement.sentence() == "core 0 generates, core 1 learns, in float32"


def test_one_core_is_shared() -> None:
    placement = on([3])
    assert (placement.engine.cpus, placement.trainers[0].cpus) == ([3], [3])
    assert placement.sentence() == "generation and learning share core 3, in float32"


def test_several_workers_share_the_trainers_cores_out() -> None:
    placement = on(range(10), trainer={"workers": 3})
    assert [trainer.cpus for trainer in placement.trainers] == [[5], [6, 7], [8, 9]]
    assert [trainer.environment({})["OMP_NUM_THREADS"] for trainer in placement.trainers] == ["1", "2", "2"]
    assert placement.sentence().endswith("cores 5, 6, 7, 8, 9 learn (3 workers), in float32")


def test_more_workers_than_cores_share_cores() -> None:
    placement = on([0, 1], trainer={"workers": 3})
    assert [trainer.cpus for trainer in placement.trainers] == [[1], [1], [1]]
    assert placement.sentence() == "core 0 generates, core 1 learns (3 workers), in float32"


@pytest.mark.parametrize(
    ("gpus", "sections", "engines", "trainers"),
    [
        ([0], {}, [0], [0]),
        ([0, 1], {}, [0], [1]),
        ([0, 1, 2], {}, [0, 1], [2]),
        (range(8), {}, [0, 1, 2, 3], [4, 5, 6, 7]),
        (range(6), {"engine": {"tensor_parallel_size": 2}}, [0, 1], [2, 3, 4, 5]),
        (range(8), {"engine": {"tensor_parallel_size": 4}}, [0, 1, 2, 3], [4, 5, 6, 7]),
        (range(4), {"trainer": {"workers": 1}}, [0, 1, 2], [3]),
        (range(8), {"engine": {"replicas": 3, "tensor_parallel_size": 2}}, [0, 1, 2, 3, 4, 5], [6, 7]),
        (range(4), {"engine": {"gpus": [3]}, "trainer": {"gpus": [0, 1]}}, [3], [0, 1]),
    ],
)
def test_gpus_are_shared_out_with_one_worker_for_each_that_learns(
    gpus: Sequence[int], sections: dict[str, object], engines: list[int], trainers: list[int]
) -> None:
    placement = on([0, 1], gpus=gpus, **sections)
    assert (placement.engine.gpus, learning(placement)) == (engines, trainers)
    for trainer in placement.trainers:
        assert trainer.device == "cuda:0"
        assert trainer.environment({})["CUDA_VISIBLE_DEVICES"] == str(trainer.gpu)
    assert placement.dtype == "bfloat16"


def test_gpus_are_named_in_the_sentence() -> None:
    assert on([0], gpus=range(4)).sentence() == "GPUs 0, 1 generate, GPUs 2, 3 learn, in bfloat16"
    assert on([0], gpus=[0]).sentence() == "generation and learning share GPU 0, in bfloat16"


@pytest.mark.parametrize(
    ("count", "sections"),
    [
        (2, {"trainer": {"workers": 2}}),
        (1, {"trainer": {"workers": 2}}),
        (2, {"engine": {"tensor_parallel_size": 2}}),
        (4, {"engine": {"gpus": [0], "tensor_parallel_size": 2}, "trainer": {"gpus": [1]}}),
    ],
)
def test_more_than_is_there_is_refused(count: int, sections: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="GPUs need"):
        on([0], gpus=range(count), **sections)


def test_a_gpu_that_several_live_on_gives_each_engine_its_share_of_memory() -> None:
    engine: dict[str, object] = {"gpu_memory_utilization": 0.9}
    assert on([0], gpus=[0, 1], engine=engine).engine.gpu_share == pytest.approx(0.9)
    assert on([0], gpus=[0], engine=engine).engine.gpu_share == pytest.approx(0.45)
    shared = on([0], gpus=[0, 1], engine=engine, **OPD)
    assert shared.teachers[0] is not None
    assert shared.engine.gpu_share == shared.teachers[0].gpu_share == pytest.approx(0.45)


def test_a_teacher_shares_the_engines_place_unless_it_has_its_own() -> None:
    (shared,) = on([0, 1, 2, 3], **OPD).teachers
    assert shared is not None
    assert shared.cpus == [0, 1]
    own = OPD | {"teacher": {"name": "t", "gpus": [0]}}
    placement = on([0], gpus=range(5), **own)
    assert (placement.engine.gpus, learning(placement)) == ([1, 2], [3, 4])
    assert placement.teachers[0] is not None
    assert (placement.teachers[0].gpus, placement.teachers[0].replicas) == ([0], 1)
    assert placement.sentence() == "GPUs 1, 2 generate, GPUs 3, 4 learn, the teacher is on GPU 0, in bfloat16"


@pytest.mark.parametrize("teacher", [{"base_url": "http://h/v1"}, {"name": "t", "topk": -1}])
def test_a_teacher_elsewhere_gets_no_place(teacher: dict[str, object]) -> None:
    assert on([0, 1], algo={"type": "opd"}, teacher=teacher).teachers == [None]


def test_what_the_configuration_names_is_taken() -> None:
    placement = on([0, 1, 2, 3], engine={"cpus": [2]}, trainer={"cpus": [0, 1]})
    assert (placement.engine.cpus, placement.trainers[0].cpus) == ([2], [0, 1])


def test_what_is_not_there_is_refused_with_what_is() -> None:
    with pytest.raises(ConfigError, match=r"trainer.gpus names \[5\], but this machine has none"):
        on([0], engine={"gpus": [4]}, trainer={"gpus": [5]})
    with pytest.raises(ConfigError, match=r"teacher.cpus names \[7\], but this machine has 0"):
        on([0], algo={"type": "opd"}, teacher={"name": "t", "cpus": [7]})


def test_a_cpu_without_bfloat16_instructions_computes_in_float32() -> None:
    assert on([0, 1], flags={"avx2"}).dtype == "float32"
    assert on([0, 1], flags={"avx512_bf16"}).dtype == "bfloat16"
    assert on([0, 1], flags={"avx2"}, model={"name": "m", "dtype": "bfloat16"}).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("cores", "workers", "expected"), [(2, 1, [[0, 1]]), (2, 2, [[0], [1]]), (4, 3, [[0], [1], [2, 3]]), (1, 1, [[0]])]
)
def test_while_nothing_is_generated_trainers_have_all_cores(
    cores: int, workers: int, expected: list[list[int]]
) -> None:
    assert on(range(cores), trainer={"workers": workers}).learning_alone() == expected


def test_on_gpus_trainers_stay_where_they_are() -> None:
    assert on([0, 1], [0, 1]).learning_alone() == []


def alone(cores: Sequence[int], gpus: Sequence[int] = (), **sections: object) -> Placement:
    return place_engines(config_from(SMALL | sections), cores=cores, gpus=gpus, cpu_flags=set())


def test_without_a_trainer_the_engines_have_everything() -> None:
    assert alone(range(4)).engine.cpus == [0, 1, 2, 3]
    assert alone(range(4), engine={"cpus": [1]}, trainer={"cpus": [2]}).engine.cpus == [1]
    both = alone([0], range(4), engine={"tensor_parallel_size": 2, "gpu_memory_utilization": 0.9})
    assert (both.engine.gpus, both.engine.replicas, both.engine.gpu_share) == ([0, 1, 2, 3], 2, 0.9)
    named = alone([0], range(4), engine={"gpus": [1]}, trainer={"gpus": [2]})
    assert (named.engine.gpus, named.engine.replicas) == ([1], 1)
    with pytest.raises(ConfigError, match=r"engine\.gpus names \[7\]"):
        alone([0], [0], engine={"gpus": [7]}, trainer={"gpus": [0]})
    with pytest.raises(ConfigError, match="3 engines of 1 GPUs need 3, 2 are there"):
        alone([0], [0, 1], engine={"replicas": 3})
