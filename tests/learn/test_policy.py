"""The policy as the trainer needs it: in evaluation mode, cut only where that is exact, its memory saved on demand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from tests.tiny import tiny_model
from thundersync.errors import ConfigError, ModelMissing
from thundersync.learn.flat import FlatParameters
from thundersync.learn.policy import load_frozen, load_policy, load_reference
from thundersync.learn.settings import LoraSettings

IDS = torch.arange(3, 40)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("base"))


def load(path: Path, **options: Any) -> Any:
    policy, may_be_cut = load_policy(
        str(path), **({"dtype": "float32", "device": "cpu", "max_model_len": 512} | options)
    )
    assert may_be_cut
    policy.config._attn_implementation = "sdpa"  # called here as a plain model, outside a block
    return policy


def gradient(policy: Any) -> Tensor:
    flat = FlatParameters(policy)
    total = flat.zeros()
    for (_, parameter), view in zip(flat.named, flat.views(total), strict=True):
        parameter.grad = view
    policy(IDS, use_cache=False).logits.log_softmax(-1)[0, :-1].gather(-1, IDS[0, 1:, None]).sum().backward()
    return total


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)], ids=["full", "lora"])
def test_activations_made_again_give_the_same_bits(folder: Path, lora: LoraSettings | None) -> None:
    kept, again = load(folder, lora=lora), load(folder, lora=lora, activation_checkpointing=True)
    runs = []
    again.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    expected = gradient(kept)
    assert torch.equal(gradient(again), expected)
    assert expected.abs().max() > 0
    assert len(runs) == 2  # the layer ran in the forward and once more in the backward


def test_only_the_layers_themselves_are_told_that_they_train(folder: Path) -> None:
    policy = load(folder, activation_checkpointing=True)
    training = [module for module in policy.modules() if module.training]
    assert len(training) == 2
    assert all(isinstance(module, GradientCheckpointingLayer) for module in training)


def test_attention_dropout_of_the_config_stays_off(tmp_path: Path, folder: Path) -> None:
    config = LlamaConfig.from_pretrained(folder)
    config.attention_dropout = 0.5
    with torch.random.fork_rng(devices=[]):
        LlamaForCausalLM(config).save_pretrained(tmp_path)
    kept, again = load(tmp_path), load(tmp_path, activation_checkpointing=True)
    assert torch.equal(gradient(again), gradient(kept))


def test_a_layer_that_draws_dropout_itself_is_refused(tmp_path: Path) -> None:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=32
    )
    OPTForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="behave differently in training"):
        load_policy(str(tmp_path), dtype="float32", device="cpu", max_model_len=64, activation_checkpointing=True)


def test_a_reference_is_the_policy_without_gradients(folder: Path) -> None:
    reference, may_be_cut = load_reference(str(folder), dtype="float32", device="cpu", max_model_len=512)
    assert may_be_cut
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert not reference.training


def test_a_teacher_keeps_its_own_attention(folder: Path) -> None:
    teacher = load_frozen(str(folder), dtype="float32", device="cpu")
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert torch.equal(teacher(IDS).logits, load(folder)(IDS).logits)


@pytest.mark.parametrize("name", ["missing", "/nowhere/at/all"])
def test_a_model_that_is_not_there_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match=name):
        load_policy(str(tmp_path / name), dtype="float32", device="cpu", max_model_len=64)
