"""The policy in a trainer worker, and the frozen models beside it: loaded, checked, and given block attention where
that is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from thundersync.errors import ConfigError, ModelMissing
from thundersync.learn.blocks import NO_LABEL, Block, use_block_attention
from thundersync.learn.head import Head
from thundersync.learn.lora import adapter_base, add_adapter, load_adapter
from thundersync.learn.settings import LoraSettings

SELF_CHECK_TOKENS = 16
SELF_CHECK_LIMIT = {torch.float32: 2e-4, torch.bfloat16: 0.5}
"""Largest difference of a logprob (nats) between the model's own attention and blocks; bfloat16 rounds per path."""

REACHES = ("sliding_window", "attention_window_size", "window_size", "attention_chunk_size", "index_topk")
"""Names that model configurations have for how many tokens an attention layer sees. Masks carry these limits, and
sequences as short as the self-check's never meet them."""


def load_policy(
    path: str,
    *,
    dtype: str,
    device: str,
    max_model_len: int,
    lora: LoraSettings | None = None,
    activation_checkpointing: bool = False,
    seed: int = 0,
) -> tuple[Any, bool]:
    """A model ready for `Block`, in evaluation mode (no dropout), and whether its sequences may be cut into blocks.

    Cut in two, 16 tokens must get the probabilities of the model's own code, and no layer may see fewer tokens than
    `max_model_len`. Any other model keeps its own attention and runs each sequence whole: exact, only slower.

    With `lora`, or when `path` is an adapter's folder, only the adapter is trained. `activation_checkpointing` keeps
    one hidden state a layer, and makes the rest again in the backward. `seed` draws a new adapter.
    Raises: ModelMissing, ConfigError, ResumeError.
    """
    base = adapter_base(Path(path))
    model = _pretrained(base or path, dtype)
    _assert_positions_are_fixed(model, max_model_len)
    model.requires_grad_(True)
    if base:
        load_adapter(model, Path(path), lora)
    elif lora is not None:
        add_adapter(model, lora, seed=seed)
    model.to(device)
    if activation_checkpointing:
        _checkpoint_activations(model)
    return model, _may_be_cut(model, max_model_len)


def load_reference(path: str, *, dtype: str, device: str, max_model_len: int) -> tuple[Any, bool]:
    """The frozen start of a fully trained policy, for a KL term; as `load_policy` gives it, but without gradients."""
    model = load_frozen(path, dtype=dtype, device=device)
    _assert_positions_are_fixed(model, max_model_len)
    return model, _may_be_cut(model, max_model_len)


def load_frozen(path: str, *, dtype: str, device: str) -> Any:
    """A model without gradients that keeps its own attention, such as a teacher held beside the policy."""
    return _pretrained(path, dtype).to(device).requires_grad_(False)


def _pretrained(path: str, dtype: str) -> Any:
    if Path(path).is_dir():
        path = str(Path(path).resolve())  # an adapter's file names it: it must mean the same from everywhere
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    except OSError as error:
        raise ModelMissing(f"no model can be loaded from {path}: {error}") from error


def _checkpoint_activations(model: Any) -> None:
    """Let the decoder's layers make their activations again in the backward.

    Transformers does so only in a layer whose `training` is set. The layers' own is; modules inside them stay in
    evaluation, so dropout stays off, unless a layer draws it itself: the check at the end refuses those.
    """
    ids = torch.arange(SELF_CHECK_TOKENS, device=model.device)[None]
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no layers that can make their activations again",
            remedy="Set trainer.activation_checkpointing = false.",
        )
    # Nothing random runs, so there is no generator's state to keep.
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    # Its hook makes the embeddings' output want a gradient: a need of the reentrant kind only.
    model.disable_input_require_grads()
    for layer in layers:
        layer.training = True
    with torch.no_grad():
        after = model(ids, use_cache=False).logits
    if not torch.equal(before, after):
        raise ConfigError(
            f"the layers of {type(model).__name__} behave differently in training: dropout, or noise",
            remedy="Set the dropout probabilities in the model's config.json to 0, "
            "or trainer.activation_checkpointing = false.",
        )


def _assert_positions_are_fixed(model: Any, max_model_len: int) -> None:
    """Refuse rotary embeddings whose frequencies follow the longest sequence of a pass: what a token's gradient is
    would depend on its neighbours. They are fixed up to a length, and the self-check is too short to see more."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [each for each in rope.values() if isinstance(each, dict)] or [rope]:
        limit = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
        if parameters.get("rope_type") in ("dynamic", "longrope") and max_model_len > limit:
            raise ConfigError(
                f"the positions of {type(model).__name__} change with a sequence's length beyond {limit} tokens",
                remedy=f"Set model.max_model_len to at most {limit}.",
            )


def _may_be_cut(model: Any, max_model_len: int) -> bool:
    config = model.config.get_text_config()
    if any(0 < (getattr(config, name, None) or 0) < max_model_len for name in REACHES):
        return False
    few = min(config.vocab_size, 1000)
    ids = torch.randint(0, few, (1, SELF_CHECK_TOKENS), generator=torch.Generator().manual_seed(0)).to(model.device)
    own_attention = model.config._attn_implementation
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, :-1].float()
        own = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        use_block_attention(model)
        try:
            difference = float((_cut_in_two(model, ids) - own).abs().max())
        except Exception:  # Unsplittable, or whatever the model's own code meets when its masks and caches are gone
            difference = float("inf")
    if difference < SELF_CHECK_LIMIT[model.dtype]:
        return True
    model.config._attn_implementation = own_attention
    with torch.no_grad():
        labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], NO_LABEL)], dim=1)
        whole = Block(model, ids, labels).forward(Head(model))[0]
    if not float((whole - own).abs().max()) < SELF_CHECK_LIMIT[model.dtype]:
        raise ConfigError(
            f"the output head of {type(model).__name__} is more than a matrix, in a way that is not known here: its "
            "log-probabilities would be wrong",
            remedy="Use another model; and report this one.",
        )
    return False


def _cut_in_two(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logprobs [T - 1] of `ids` [1, T], the second half as a child block of the first."""
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], NO_LABEL)], dim=1)
    half = ids.shape[1] // 2
    root = Block(model, ids[:, :half], labels[:, :half])
    head = Head(model)
    first = root.forward(head)[0]
    root.open()
    return torch.cat([first, Block(model, ids[:, half:], labels[:, half:], root).forward(head)[0]])
