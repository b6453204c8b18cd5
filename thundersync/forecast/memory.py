"""What each device has to hold: bytes told from a model's shapes, before anything is loaded.

Weights, gradients, optimizer and parts follow from parameter counts and are exact; activations are an estimate for a
decoder of the usual kind, and are named so. Knows numbers only: no configuration, no files.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

FLOAT32 = 4
HEAD_CHUNK_TOKENS = 512
"""Positions whose logits the trainer holds at once (`learn.head`)."""


class Decoder(Struct, frozen=True, kw_only=True):
    """The sizes of a model that its memory depends on, from its `config.json`."""

    layers: int
    hidden: int
    intermediate: int
    """Of one token's way through a layer: with experts, those that it is sent to, together."""
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int

    def kv_bytes(self, width: int) -> int:
        """Keys and values of one token, as if every layer attended to all of them."""
        return 2 * self.layers * self.kv_heads * self.head_size * width


def decoder_of(config: Mapping[str, Any]) -> Decoder:
    """`config` as parsed from JSON. Raises: KeyError, naming what it does not say."""
    text = config.get("text_config", config)
    heads = int(text["num_attention_heads"])
    experts = int(text.get("num_experts_per_tok") or 0)
    wide = int(text.get("moe_intermediate_size") or 0) * experts or int(text["intermediate_size"]) * max(1, experts)
    return Decoder(
        layers=int(text["num_hidden_layers"]),
        hidden=int(text["hidden_size"]),
        intermediate=wide,
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_size=int(text.get("head_dim") or int(text["hidden_size"]) // heads),
        vocabulary=int(text["vocab_size"]),
    )


class Item(Struct, frozen=True, kw_only=True):
    """So many bytes for one purpose."""

    name: str
    size: int
    where: str = "device"
    """`device`, or `host` for what was moved to host memory."""
    estimated: bool = False


def learning_items(
    *,
    whole: int,
    learning: int,
    width: int,
    adapter: bool,
    reference: bool,
    sums: int,
    workers: int,
    offload: bool,
) -> list[Item]:
    """Of one trainer worker, whatever lengths its rollouts have.

    `whole` and `learning` are parameters, `width` bytes of one in the model's dtype, `sums` the objective's; each of
    `workers` owns its share of the master weights and moments, `offload` moves them to host memory.
    """
    weights, part = whole * width, learning * FLOAT32
    away = "host" if offload else "device"
    items = [
        Item(name="weights", size=weights),
        Item(name="adapter", size=learning * width if adapter else 0),
        Item(name="reference weights", size=weights if reference else 0),
        Item(name="master weights", size=0 if width == FLOAT32 else part // workers, where=away),
        Item(name="Adam moments", size=2 * part // workers, where=away),
        Item(name="step gradient", size=part * sums),
    ]
    return [item for item in items if item.size]


def parts_items(*, learning: int, most: int, resident: int) -> list[Item]:
    """Parts of open groups, if `most` of them are held at once, `resident` on the device."""
    part, here = learning * FLOAT32, min(most, resident)
    items = [
        Item(name=f"{here} parts of open groups", size=here * part),
        Item(name=f"{most - here} parts of open groups", size=(most - here) * part, where="host"),
    ]
    return [item for item in items if item.size]


def activation_bytes(decoder: Decoder, *, tokens: int, width: int, checkpointing: bool) -> int:
    """What a pass over `tokens` keeps for its backward, roughly.

    A layer keeps per token: its two norms' inputs and results in float32 and in its own dtype, queries, keys, values
    and the attention's output, and four rows of the feed-forward network. With checkpointing every layer keeps its
    input only, and one layer at a time the rest. The head adds a chunk of logits in float32, three times over.
    """
    attention = 2 * decoder.heads * decoder.head_size + 2 * decoder.kv_heads * decoder.head_size
    norms = decoder.hidden * (16 + 4 * width if width < FLOAT32 else 7 * width)
    layer = norms + width * (attention + 4 * decoder.intermediate)
    kept = decoder.layers * decoder.hidden * width + layer if checkpointing else decoder.layers * layer
    head = 3 * FLOAT32 * decoder.vocabulary * min(tokens, HEAD_CHUNK_TOKENS)
    return tokens * (kept + decoder.hidden * width) + head


def engine_items(decoder: Decoder, *, whole: int, width: int, shards: int, sequences: int, tokens: int) -> list[Item]:
    """Of one engine device, one of `shards` that share a model: its weights, and K/V for `sequences` of `tokens`."""
    kv = decoder.kv_bytes(width) * sequences * tokens
    return [
        Item(name="weights", size=whole * width // shards),
        Item(name=f"K/V of {sequences} rollouts of {tokens} tokens", size=kv // shards),
    ]


def total(items: Sequence[Item], where: str = "device") -> int:
    """Bytes."""
    return sum(item.size for item in items if item.where == where)


def shapes_of(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """The linear layers, embeddings and norms of a decoder with this `config.json`, for a folder without weights.

    Layers without biases, gated feed-forward, every layer alike: Llama, Qwen, Mistral and their kin, with experts where
    the config counts them. Raises: KeyError, naming what the config does not say.
    """
    text = config.get("text_config", config)
    d = decoder_of(config)
    queries, keys = d.heads * d.head_size, d.kv_heads * d.head_size
    experts = int(text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts") or 0)
    wide = int(text.get("moe_intermediate_size") or text["intermediate_size"]) if experts else d.intermediate
    shapes = {"model.embed_tokens.weight": [d.vocabulary, d.hidden], "model.norm.weight": [d.hidden]}
    if not config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)):
        shapes["lm_head.weight"] = [d.vocabulary, d.hidden]
    for index in range(d.layers):
        layer = f"model.layers.{index}"
        shapes |= {
            f"{layer}.input_layernorm.weight": [d.hidden],
            f"{layer}.post_attention_layernorm.weight": [d.hidden],
            f"{layer}.self_attn.q_proj.weight": [queries, d.hidden],
            f"{layer}.self_attn.k_proj.weight": [keys, d.hidden],
            f"{layer}.self_attn.v_proj.weight": [keys, d.hidden],
            f"{layer}.self_attn.o_proj.weight": [d.hidden, queries],
        }
        mlps = [f"{layer}.mlp.experts.{expert}" for expert in range(experts)] or [f"{layer}.mlp"]
        if experts:
            shapes[f"{layer}.mlp.gate.weight"] = [experts, d.hidden]
        for mlp in mlps:
            shapes |= {
                f"{mlp}.gate_proj.weight": [wide, d.hidden],
                f"{mlp}.up_proj.weight": [wide, d.hidden],
                f"{mlp}.down_proj.weight": [d.hidden, wide],
            }
    return shapes
