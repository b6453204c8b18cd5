"""The support table: which model families are cut into blocks, and that all of them get their exact gradient.

Tiny random models with weights wide enough that every part of an attention layer shows in the result.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from thundersync.errors import ConfigError
from thundersync.learn.blocks import NO_LABEL, Block
from thundersync.learn.flat import FlatParameters
from thundersync.learn.head import Head
from thundersync.learn.lora import published_parameters
from thundersync.learn.policy import load_policy
from thundersync.learn.settings import LoraSettings

LENGTH = 64
TOLERANCE = 5e-6
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
ROUTED: dict[str, Any] = EXPERTS | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
CUT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral below its window": ("MistralConfig", {"sliding_window": LENGTH}),
    "phi-3": ("Phi3Config", {}),
    "glm-4": ("Glm4Config", {}),
    "olmo2": ("Olmo2Config", {}),
    "smollm3": ("SmolLM3Config", {}),
    "granite": ("GraniteConfig", {"logits_scaling": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5}),
    "cohere": ("CohereConfig", {"logit_scale": 0.5}),
    "gemma-3 below its window": ("Gemma3TextConfig", {"sliding_window": LENGTH, "query_pre_attn_scalar": 8}),
    "qwen3-moe": ("Qwen3MoeConfig", EXPERTS | {"num_experts": 4}),
    "glm-4-moe": ("Glm4MoeConfig", ROUTED),
    "glm-4.7-flash": ("Glm4MoeLiteConfig", ROUTED | LATENT),
    "deepseek-v3": ("DeepseekV3Config", ROUTED | LATENT),
}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral above its window": ("MistralConfig", {"sliding_window": 8}),
    "gemma-3 above its window": ("Gemma3TextConfig", {"sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma-2, soft caps": ("Gemma2Config", {"sliding_window": LENGTH, "query_pre_attn_scalar": 8}),
    "gpt-oss, sinks": ("GptOssConfig", {"num_local_experts": 4, "sliding_window": LENGTH, "num_experts_per_tok": 2}),
    "llama-4 above its chunk": (
        "Llama4TextConfig",
        {"attention_chunk_size": 8, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 16},
    ),
    "deepseek-v3.2, keys chosen": (
        "DeepseekV32Config",
        ROUTED | LATENT | {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 16},
    ),
    "deepseek-v3.2 with fewer keys than it chooses": (
        "DeepseekV32Config",
        ROUTED | LATENT | {"index_topk": LENGTH, "index_n_heads": 2, "index_head_dim": 16},
    ),
    "qwen3-next, recurrent": ("Qwen3NextConfig", HYBRID | EXPERTS | {"num_experts": 4}),
    "qwen3.5, recurrent": ("Qwen3_5TextConfig", HYBRID),
}


LONG_ROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    },
    "max_position_embeddings": 4 * LENGTH,
}


def tiny(folder: Path, config: str, options: dict[str, Any], **loading: Any) -> tuple[Any, bool]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(getattr(transformers, config)(**(SHAPE | options)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.fill_(1.0)
    model.save_pretrained(folder)
    return load_policy(str(folder), dtype="float32", device="cpu", max_model_len=LENGTH, **loading)


TOKENS = torch.randint(3, 64, (3, 21), generator=torch.Generator().manual_seed(5))
TOKENS[:, :8] = TOKENS[0, :8]  # the prompt of a group
WEIGHTS = torch.randn(3, 20, generator=torch.Generator().manual_seed(6))
WEIGHTS[:, :7] = 0.0
LABELS = torch.where(WEIGHTS == 0.0, NO_LABEL, TOKENS[:, 1:])


def gradient_of(policy: Any, work: Callable[[Any], None]) -> Tensor:
    flat = FlatParameters(policy)
    total = flat.zeros()
    for (_, parameter), view in zip(flat.named, flat.views(total), strict=True):
        parameter.grad = view
    work(policy)
    return total


def by_the_models_own_code(policy: Any) -> None:
    for tokens, weights in zip(TOKENS, WEIGHTS, strict=True):
        logprobs = policy(tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        (weights * logprobs.gather(-1, tokens[1:, None])[:, 0]).sum().backward()


def in_one_block(policy: Any) -> None:
    for tokens, labels, weights in zip(TOKENS, LABELS, WEIGHTS, strict=True):
        block = Block(policy, tokens[None, :-1], labels[None])
        values = block.forward(Head(policy))
        block.backward(values, [weights[labels != NO_LABEL]])


def in_a_tree(policy: Any) -> None:
    """A prompt, three first turns under it, three second turns under those: pulled from the leaves to the root."""
    prompt, first, second = slice(0, 7), slice(7, 13), slice(13, 20)
    root = Block(policy, TOKENS[:1, prompt], LABELS[:1, prompt])
    root.open()
    turn = Block(policy, TOKENS[:, first], LABELS[:, first], root)
    turn.open()
    leaf = Block(policy, TOKENS[:, second], LABELS[:, second], turn)
    leaf.backward(leaf.forward(Head(policy)), [WEIGHTS[:, second].flatten()])
    adjoint = turn.take_adjoint()
    turn.backward(turn.forward(Head(policy)), [WEIGHTS[:, first].flatten()], adjoint)
    adjoint = root.take_adjoint()
    root.forward()
    root.backward([], [], adjoint)


def difference(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("family", CUT)
def test_a_family_that_is_cut_gets_the_gradient_of_its_own_code(family: str, tmp_path: Path) -> None:
    policy, may_be_cut = tiny(tmp_path, *CUT[family])
    assert may_be_cut
    got = gradient_of(policy, in_a_tree)
    policy.config._attn_implementation = "sdpa"
    assert difference(got, gradient_of(policy, by_the_models_own_code)) <= TOLERANCE


@pytest.mark.parametrize("family", WHOLE)
def test_a_family_that_a_cut_would_make_wrong_runs_whole(family: str, tmp_path: Path) -> None:
    policy, may_be_cut = tiny(tmp_path, *WHOLE[family])
    assert not may_be_cut
    got = gradient_of(policy, in_one_block)
    assert difference(got, gradient_of(policy, by_the_models_own_code)) <= TOLERANCE


@pytest.mark.parametrize("family", ["llama", "gemma-3 below its window", "qwen3-moe", "deepseek-v3"])
def test_activations_made_again_give_the_tree_the_same_bits(family: str, tmp_path: Path) -> None:
    kept, _ = tiny(tmp_path, *CUT[family])
    again, may_be_cut = tiny(tmp_path, *CUT[family], activation_checkpointing=True)
    assert may_be_cut
    assert torch.equal(gradient_of(again, in_a_tree), gradient_of(kept, in_a_tree))


@pytest.mark.parametrize(
    "family", ["phi-3", "gemma-3 below its window", "qwen3-moe", "glm-4-moe", "deepseek-v3", "qwen3-next, recurrent"]
)
def test_an_adapter_trains_and_merges_in_any_family(family: str, tmp_path: Path) -> None:
    policy, may_be_cut = tiny(tmp_path, *(CUT | WHOLE)[family], lora=LoraSettings(rank=2))
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
    got = gradient_of(policy, in_a_tree if may_be_cut else in_one_block)
    policy.config._attn_implementation = "sdpa"
    assert difference(got, gradient_of(policy, by_the_models_own_code)) <= TOLERANCE
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    published = dict(published_parameters(policy))
    assert list(published) == [name for name, _ in plain.named_parameters()]
    plain.load_state_dict(plain.state_dict() | published)
    assert torch.allclose(plain(TOKENS).logits, policy(TOKENS).logits, atol=1e-4)


@pytest.mark.parametrize("fixed_up_to", [LENGTH, LENGTH - 1])
def test_positions_that_change_with_the_length_are_refused_beyond_where_they_are_fixed(
    fixed_up_to: int, tmp_path: Path
) -> None:
    options = LONG_ROPE | {"original_max_position_embeddings": fixed_up_to}
    if fixed_up_to == LENGTH:
        assert tiny(tmp_path, "Phi3Config", options)[1]
        return
    with pytest.raises(ConfigError, match="beyond 63 tokens"):
        tiny(tmp_path, "Phi3Config", options)
    dynamic = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
    with pytest.raises(ConfigError, match="beyond 63 tokens"):
        tiny(tmp_path, "LlamaConfig", dynamic | {"max_position_embeddings": fixed_up_to})
