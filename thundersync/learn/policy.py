"""The policy in a trainer worker: loaded, checked, and given block attention where that is exact."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from thundersync.learn.blocks import NO_LABEL, Block, Unsplittable, use_block_attention

SELF_CHECK_TOKENS = 16
SELF_CHECK_LIMIT = {torch.float32: 2e-4, torch.bfloat16: 0.5}
"""Largest difference of a logprob (nats) between the model's own attention and blocks; bfloat16 rounds per path."""


def load_policy(path: str, *, dtype: str, device: str, max_model_len: int) -> tuple[Any, bool]:
    """A model ready for `Block`, in evaluation mode (no dropout), and whether its sequences may be cut into blocks.

    Cut in two, 16 tokens must get the probabilities of the model's own code, and no attention window may be shorter
    than `max_model_len`. Any other model keeps its own attention and runs each sequence whole: exact, only slower.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).to(device)
    model.eval().requires_grad_(True)
    return model, _may_be_cut(model, max_model_len)


def _may_be_cut(model: Any, max_model_len: int) -> bool:
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    if window and window < max_model_len:
        return False
    few = min(model.config.get_text_config().vocab_size, 1000)
    ids = torch.randint(0, few, (1, SELF_CHECK_TOKENS), generator=torch.Generator().manual_seed(0)).to(model.device)
    own_attention = model.config._attn_implementation
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, :-1].float()
        own = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        use_block_attention(model)
        try:
            difference = float((_cut_in_two(model, ids) - own).abs().max())
        except Unsplittable:
            difference = float("inf")
    if difference < SELF_CHECK_LIMIT[model.dtype]:
        return True
    model.config._attn_implementation = own_attention
    return False


def _cut_in_two(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logprobs [T - 1] of `ids` [1, T], the second half as a child block of the first."""
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], NO_LABEL)], dim=1)
    half = ids.shape[1] // 2
    root = Block(model, ids[:, :half], labels[:, :half])
    first = root.forward()
    root.open()
    return torch.cat([first, Block(model, ids[:, half:], labels[:, half:], root).forward()])
