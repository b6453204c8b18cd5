"""An adapter is added, trained, published, taken away, saved and loaded without the rest of the trainer knowing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.tiny import tiny_model
from thundersync.errors import ConfigError, ResumeError
from thundersync.generate.arena import arena_faults, create_arena, fill_arena, open_arena
from thundersync.learn.flat import FlatParameters, GradientSink
from thundersync.learn.lora import (
    add_adapter,
    has_adapter,
    load_adapter,
    published_parameters,
    save_adapter,
    without_adapter,
)
from thundersync.learn.policy import load_policy
from thundersync.learn.settings import LoraSettings

IDS = torch.arange(3, 40)[None]
SETTINGS = LoraSettings(rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("base"))


def base(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def adapted(
    folder: Path, settings: LoraSettings = SETTINGS, *, trained: bool = True, dtype: torch.dtype = torch.float32
) -> Any:
    """`trained`: with a B that is not zero, so that the adapter shows."""
    policy = base(folder, dtype)
    add_adapter(policy, settings, seed=1)
    if trained:
        draw = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
    return policy


@torch.no_grad()
def logits(policy: Any) -> Tensor:
    result: Tensor = policy(IDS, use_cache=False).logits
    return result


def test_a_new_adapter_changes_nothing_and_trains_nothing_but_itself(folder: Path) -> None:
    policy = adapted(folder, trained=False)
    assert type(policy) is type(base(folder))
    assert torch.equal(logits(policy), logits(base(folder)))
    trained = [(name, p) for name, p in policy.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 7 * 2  # A and B, seven linear layers, two layers deep
    assert all(".lora_" in name for name, _ in trained)
    assert FlatParameters(policy).size == sum(p.numel() for _, p in trained)


def test_equal_seeds_give_equal_adapters_whatever_was_drawn_before(folder: Path) -> None:
    torch.manual_seed(3)
    one = FlatParameters(adapted(folder, trained=False)).buffer
    torch.manual_seed(4)
    state = torch.get_rng_state()
    other = FlatParameters(adapted(folder, trained=False)).buffer
    assert torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)
    assert one.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_published_weights_are_the_merged_ones_under_the_base_models_names(folder: Path, dtype: torch.dtype) -> None:
    policy, plain = adapted(folder, dtype=dtype), base(folder, dtype)
    expected = [(name, p.shape, p.dtype) for name, p in plain.named_parameters()]
    published = dict(published_parameters(policy))
    assert [(name, p.shape, p.dtype) for name, p in published.items()] == expected
    layer = policy.model.layers[1].mlp.up_proj
    delta = 2.0 * layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    exact = layer.base_layer.weight.double() + delta
    assert torch.allclose(
        published["model.layers.1.mlp.up_proj.weight"].double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-7
    )
    plain.load_state_dict({**plain.state_dict(), **published})
    difference = (logits(plain).float() - logits(policy).float()).abs().mean()
    assert difference < (1e-5 if dtype == torch.float32 else 0.1)
    assert (logits(base(folder, dtype)) - logits(policy)).abs().mean() > 0.3


def test_a_plain_policy_publishes_its_own_tensors(folder: Path) -> None:
    policy = base(folder)
    assert [(n, id(p)) for n, p in published_parameters(policy)] == [(n, id(p)) for n, p in policy.named_parameters()]


def test_merged_weights_go_through_the_arena(folder: Path, tmp_path: Path) -> None:
    policy = adapted(folder)
    arena = create_arena(tmp_path / "weights", base(folder).named_parameters(), "float32")
    arena = fill_arena(arena, published_parameters(policy))
    views = open_arena(arena)
    assert arena_faults(arena, views) == []
    for name, tensor in published_parameters(policy):
        assert torch.equal(views[name], tensor)


def test_without_its_adapter_a_policy_is_its_base_and_afterwards_itself_again(folder: Path) -> None:
    policy = adapted(folder)
    flat = FlatParameters(policy)
    sink = GradientSink(flat)
    own = logits(policy)
    with without_adapter(policy):
        assert torch.equal(logits(policy), logits(base(folder)))
    assert torch.equal(logits(policy), own)
    gradient = flat.zeros()
    with sink.into([(gradient, 2.0)]):
        policy(IDS, use_cache=False).logits.logsumexp(-1).sum().backward()
    assert all(view.abs().max() > 0 for view in flat.views(gradient))


def test_a_graph_made_before_the_reference_ran_still_has_its_gradient(folder: Path) -> None:
    policy = adapted(folder)
    flat = FlatParameters(policy)
    gradients = []
    for between in (False, True):
        gradient = flat.zeros()
        sum_ = policy(IDS, use_cache=False).logits.logsumexp(-1).sum()
        if between:
            with without_adapter(policy):
                logits(policy)
        for (_, parameter), view in zip(flat.named, flat.views(gradient), strict=True):
            parameter.grad = view
        sum_.backward()
        gradients.append(gradient)
    assert torch.equal(gradients[0], gradients[1])


def test_a_policy_without_an_adapter_is_not_its_own_reference(folder: Path) -> None:
    with pytest.raises(ValueError, match="reference"), without_adapter(base(folder)):
        pass


@pytest.mark.parametrize(
    ("targets", "layers"),
    [(("q_proj", "v_proj"), 4), (("mlp.up_proj",), 2), (("model.layers.0.self_attn.o_proj",), 1)],
)
def test_target_modules_are_names_or_ends_of_names(folder: Path, targets: tuple[str, ...], layers: int) -> None:
    policy = adapted(folder, LoraSettings(rank=2, target_modules=targets))
    assert sum("lora_A" in name for name, _ in policy.named_parameters()) == layers


@pytest.mark.parametrize("targets", [("qkv",), ("q_proj", "v_porj"), (), ("lm_head",), ("embed_tokens",)])
def test_targets_that_name_nothing_are_refused_with_what_there_is(folder: Path, targets: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        adapted(folder, LoraSettings(target_modules=targets))
    assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in error.value.remedy


def test_a_saved_adapter_is_what_peft_loads_and_what_we_load(folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    policy = adapted(folder)
    save_adapter(policy, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder)
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    theirs = PeftModel.from_pretrained(base(folder), str(tmp_path))
    assert torch.allclose(logits(theirs), logits(policy), atol=1e-5)
    ours = base(folder)
    load_adapter(ours, tmp_path)
    assert torch.equal(FlatParameters(ours).buffer, FlatParameters(policy).buffer)
    assert torch.equal(logits(ours), logits(policy))


def test_layers_that_share_their_last_name_with_others_are_saved_by_whole_names(folder: Path, tmp_path: Path) -> None:
    policy = adapted(folder, LoraSettings(rank=2, target_modules=("layers.0.self_attn.q_proj",)))
    save_adapter(policy, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["model.layers.0.self_attn.q_proj"]
    ours = base(folder)
    load_adapter(ours, tmp_path)
    assert torch.equal(logits(ours), logits(policy))


def test_an_adapter_with_other_settings_is_refused(folder: Path, tmp_path: Path) -> None:
    save_adapter(adapted(folder), tmp_path)
    for other in (
        LoraSettings(rank=8, alpha=8.0),
        LoraSettings(rank=4, alpha=4.0),
        LoraSettings(rank=4, alpha=8.0, target_modules=("q_proj",)),
    ):
        with pytest.raises(ResumeError, match="other settings"):
            load_adapter(base(folder), tmp_path, other)
    with pytest.raises(ResumeError, match="does not fit"):
        load_adapter(adapted(folder, LoraSettings(rank=8)), tmp_path)


@pytest.mark.parametrize("change", [{"use_dora": True}, {"bias": "all"}, {"peft_type": "IA3"}])
def test_an_adapter_of_another_kind_is_refused(folder: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    save_adapter(adapted(folder), tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ResumeError, match="not plain LoRA"):
        load_adapter(base(folder), tmp_path)


def test_an_adapters_folder_is_loaded_as_a_policy(folder: Path, tmp_path: Path) -> None:
    policy = adapted(folder)
    own = logits(policy)
    save_adapter(policy, tmp_path)
    loaded, may_be_cut = load_policy(str(tmp_path), dtype="float32", device="cpu", max_model_len=512, lora=SETTINGS)
    assert may_be_cut
    assert has_adapter(loaded)
    loaded.config._attn_implementation = "sdpa"
    assert torch.equal(logits(loaded), own)
