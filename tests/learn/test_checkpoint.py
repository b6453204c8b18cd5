"""A resumed run is the uninterrupted one: bit for bit with the same number of workers, and with any other."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.learn.rank_processes import RankProcesses
from tests.tiny import tiny_model
from thundersync.errors import ResumeError
from thundersync.learn.checkpoint import load_optimizer, save_checkpoint
from thundersync.learn.collective import Ranks
from thundersync.learn.flat import FlatParameters
from thundersync.learn.optimizer import Optimizer
from thundersync.learn.policy import load_policy
from thundersync.learn.settings import LoraSettings, OptimSettings

LORA = LoraSettings(rank=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("base"))


class Trainer:
    """A worker reduced to what a checkpoint holds."""

    def __init__(
        self, source: Path, ranks: Ranks, *, dtype: str = "float32", lora: LoraSettings | None = None, lr: float = 1e-3
    ) -> None:
        self.policy, _ = load_policy(str(source), dtype=dtype, device="cpu", max_model_len=64, lora=lora)
        self.flat = FlatParameters(self.policy)
        self.ranks = ranks
        settings = OptimSettings(
            lr=lr,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=0.01,
            max_grad_norm=1.0,
            scheduler="linear",
            warmup_steps=2,
            max_steps=10,
        )
        self.optimizer = Optimizer(self.flat, settings, ranks)
        if (source / "optimizer").is_dir():
            load_optimizer(source, self.optimizer)

    def train(self, *steps: int) -> list[float]:
        rates = []
        for step in steps:
            whole = torch.randn(self.flat.size, generator=torch.Generator().manual_seed(step))
            # Two ranks' halves are exact, so that one and two ranks reduce to the same bits.
            self.optimizer.reduce(whole / self.ranks.world)
            rates.append(self.optimizer.step())
        return rates


def first_half(ranks: Ranks, source: Path, target: Path, options: dict[str, Any]) -> Tensor:
    trainer = Trainer(source, ranks, **options)
    trainer.train(0, 1, 2)
    save_checkpoint(target, trainer.policy, trainer.optimizer)
    trainer.train(3, 4)
    return trainer.flat.buffer.float()


def second_half(ranks: Ranks, checkpoint: Path, options: dict[str, Any]) -> Tensor:
    trainer = Trainer(checkpoint, ranks, **options)
    trainer.train(3, 4)
    return trainer.flat.buffer.float()


KINDS: list[dict[str, Any]] = [{}, {"dtype": "bfloat16"}, {"lora": LORA}, {"lora": LORA, "dtype": "bfloat16"}]


@pytest.mark.parametrize("options", KINDS, ids=["full", "bfloat16", "lora", "lora-bfloat16"])
def test_a_resumed_run_is_the_uninterrupted_one(folder: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    expected = first_half(Ranks.alone(), folder, tmp_path, options)
    assert torch.equal(second_half(Ranks.alone(), tmp_path, options), expected)


@pytest.mark.parametrize("options", [KINDS[0], KINDS[1], KINDS[3]], ids=["full", "bfloat16", "lora-bfloat16"])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 3), (3, 2)])
def test_a_run_resumes_with_any_number_of_workers(
    folder: Path, tmp_path: Path, rank_processes: RankProcesses, before: int, after: int, options: dict[str, Any]
) -> None:
    expected = rank_processes.run(before, first_half, folder, tmp_path, options)
    shards = sorted(path.name for path in (tmp_path / "optimizer").glob("*.safetensors"))
    assert shards == [f"shard-{rank:05d}-of-{before:05d}.safetensors" for rank in range(before)]
    resumed = rank_processes.run(after, second_half, tmp_path, options)
    for weights in (*expected, *resumed):
        if before == after:
            assert torch.equal(weights, expected[0])
        else:
            assert torch.allclose(weights, expected[0], rtol=1e-2 if options.get("dtype") else 1e-5, atol=1e-6)


def test_a_checkpoint_before_any_step_resumes(folder: Path, tmp_path: Path) -> None:
    fresh = Trainer(folder, Ranks.alone())
    save_checkpoint(tmp_path, fresh.policy, fresh.optimizer)
    resumed = Trainer(tmp_path, Ranks.alone())
    assert fresh.train(0, 1) == resumed.train(0, 1)
    assert torch.equal(fresh.flat.buffer, resumed.flat.buffer)


def test_the_place_in_the_schedule_is_the_checkpoints_the_rate_the_configurations(folder: Path, tmp_path: Path) -> None:
    trainer = Trainer(folder, Ranks.alone())
    trainer.train(0, 1, 2)
    save_checkpoint(tmp_path, trainer.policy, trainer.optimizer)
    expected = trainer.train(3, 4)
    assert Trainer(tmp_path, Ranks.alone()).train(3, 4) == expected
    assert Trainer(tmp_path, Ranks.alone(), lr=2e-3).train(3, 4) == [2 * rate for rate in expected]


def test_a_missing_shard_is_named(folder: Path, tmp_path: Path) -> None:
    trainer = Trainer(folder, Ranks.alone())
    save_checkpoint(tmp_path, trainer.policy, trainer.optimizer)
    shard = tmp_path / "optimizer" / "shard-00000-of-00001.safetensors"
    shard.rename(shard.with_name("shard-00001-of-00002.safetensors"))
    with pytest.raises(ResumeError, match="shard-00000-of-00002"):
        Trainer(tmp_path, Ranks.alone())
    (tmp_path / "optimizer" / "shard-00001-of-00002.safetensors").unlink()
    with pytest.raises(ResumeError, match="all of them"):
        Trainer(tmp_path, Ranks.alone())


def test_a_checkpoint_of_other_parameters_is_refused(folder: Path, tmp_path: Path) -> None:
    full = Trainer(folder, Ranks.alone())
    save_checkpoint(tmp_path, full.policy, full.optimizer)
    with pytest.raises(ResumeError, match="parameters"):
        Trainer(tmp_path, Ranks.alone(), lora=LORA)


def test_a_checkpoint_with_an_adapter_holds_no_base_weights(folder: Path, tmp_path: Path) -> None:
    trainer = Trainer(folder, Ranks.alone(), lora=LORA)
    trainer.train(0)
    save_checkpoint(tmp_path, trainer.policy, trainer.optimizer)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)
