"""What a model's files tell without loading a weight."""

import json
from pathlib import Path

import pytest

from tests.plan.test_plan import DECODER, configured
from thundersync.config_file import config_from
from thundersync.forecast.memory import shapes_of, total
from thundersync.plan.model import find_model, memory_of
from thundersync.sizes import parameters


def test_a_bare_config_is_enough(tmp_path: Path) -> None:
    model = find_model(configured(tmp_path))
    assert model is not None and model.decoder is not None
    assert model.whole == model.learning == parameters(shapes_of(DECODER))


def test_an_adapter_leaves_gradients_and_optimizer_small(tmp_path: Path) -> None:
    full = configured(tmp_path, algo={"group_size": 2, "prompts_per_step": 2, "kl_coef": 0.1})
    lora = configured(tmp_path, model={"name": str(tmp_path / "model"), "max_model_len": 1024, "lora": {"rank": 2}})
    sizes = {}
    for name, config in (("full", full), ("lora", lora)):
        model = find_model(config)
        assert model is not None
        sizes[name] = {
            item.name: item.size for item in memory_of(config, model, dtype="bfloat16", workers=2, on_gpus=True).trainer
        }
    assert sizes["full"]["reference weights"] == sizes["full"]["weights"]
    assert "reference weights" not in sizes["lora"] and sizes["lora"]["adapter"] > 0
    assert sizes["lora"]["step gradient"] < sizes["full"]["step gradient"] / 4
    assert sizes["full"]["4 parts of open groups"] == 4 * sizes["full"]["step gradient"]


def test_parts_that_do_not_fit_beside_the_model_are_told_as_host_memory(tmp_path: Path) -> None:
    config = configured(tmp_path, stream={"partials_gib": 1e-3, "spill_gib": 1e-3})
    model = find_model(config)
    assert model is not None
    memory = memory_of(config, model, dtype="bfloat16", workers=1, on_gpus=True)
    assert total(memory.trainer, "host") > 0
    on_a_gpu, on_a_cpu = (
        model.parts_allowed(config, dtype="bfloat16", workers=1, on_gpus=gpus).room.most for gpus in (True, False)
    )
    assert on_a_gpu > on_a_cpu == 1


@pytest.mark.parametrize("content", ["not json", json.dumps({"hidden_size": 4})])
def test_a_folder_that_does_not_say_is_no_model(tmp_path: Path, content: str) -> None:
    config = configured(tmp_path)
    (tmp_path / "model" / "config.json").write_text(content)
    assert find_model(config) is None


def test_a_model_that_is_not_here_is_not_downloaded(tmp_path: Path) -> None:
    raw = {"model": {"name": "nobody/has-this-model"}, "env": {"path": "starter/train"}}
    assert find_model(config_from(raw)) is None
