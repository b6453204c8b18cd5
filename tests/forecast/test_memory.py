"""Bytes told from a model's shapes."""

import pytest

from thundersync.config import LoraConfig
from thundersync.forecast.memory import (
    Decoder,
    activation_bytes,
    decoder_of,
    engine_items,
    learning_items,
    parts_items,
    shapes_of,
    total,
)
from thundersync.sizes import parameters, trainable

SMALL = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
EXPERTS = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
}


def test_a_config_alone_gives_the_parameters_of_the_model() -> None:
    assert parameters(shapes_of(SMALL)) == 134_515_008  # SmolLM2-135M, by its weights
    assert 30.4e9 < parameters(shapes_of(EXPERTS)) < 30.6e9  # Qwen3-30B-A3B
    assert parameters(shapes_of({"text_config": SMALL, "tie_word_embeddings": True})) == 134_515_008


def test_adapters_are_counted_by_their_shapes() -> None:
    learning = trainable(shapes_of(SMALL), LoraConfig(rank=8))
    per_layer = 8 * (2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536))
    assert learning == 30 * per_layer


def test_a_trainer_holds_weights_sums_and_its_share_of_the_optimizer() -> None:
    whole = 1000
    full = learning_items(
        whole=whole, learning=whole, width=2, adapter=False, reference=True, sums=2, workers=4, offload=False
    )
    assert {item.name: item.size for item in full} == {
        "weights": 2000,
        "reference weights": 2000,
        "master weights": 1000,
        "Adam moments": 2000,
        "step gradient": 8000,
    }
    lora = learning_items(
        whole=whole, learning=10, width=4, adapter=True, reference=False, sums=1, workers=1, offload=True
    )
    assert (total(lora), total(lora, "host")) == (4000 + 40 + 40, 80)


def test_parts_beyond_the_budget_are_in_host_memory() -> None:
    items = parts_items(learning=10, most=6, resident=4)
    assert (total(items), total(items, "host")) == (160, 80)
    assert parts_items(learning=10, most=0, resident=4) == []


def test_keys_and_values_grow_with_layers_and_heads() -> None:
    decoder = decoder_of(SMALL)
    assert decoder.kv_bytes(2) == 2 * 30 * 3 * 64 * 2
    weights, cache = engine_items(decoder, whole=1000, width=2, shards=2, sequences=4, tokens=10)
    assert (weights.size, cache.size) == (1000, 40 * decoder.kv_bytes(2) // 2)


@pytest.mark.parametrize("width", [2, 4])
def test_checkpointing_keeps_far_less(width: int) -> None:
    decoder = decoder_of(SMALL)
    whole = activation_bytes(decoder, tokens=4096, width=width, checkpointing=False)
    few = activation_bytes(decoder, tokens=4096, width=width, checkpointing=True)
    assert few < whole / 4
    assert activation_bytes(decoder, tokens=8192, width=width, checkpointing=False) < 2 * whole


def test_experts_count_as_those_that_a_token_is_sent_to() -> None:
    assert decoder_of(EXPERTS) == Decoder(
        layers=48, hidden=2048, intermediate=8 * 768, heads=32, kv_heads=4, head_size=128, vocabulary=151936
    )


def test_a_config_that_is_no_decoders_names_what_it_lacks() -> None:
    with pytest.raises(KeyError, match="hidden_size"):
        decoder_of({"num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 8})
