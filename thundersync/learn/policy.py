"""The policy in a trainer worker: loaded for block attention, parameters in one flat buffer, checked before use."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from thundersync.errors import ThundersyncError
from thundersync.learn.blocks import NO_LABEL, Block, Unsplittable, use_block_attention

SELF_CHECK_TOKENS = 16
SELF_CHECK_LIMIT = {torch.float32: 2e-4, torch.bfloat16: 0.5}
"""Largest difference of a logprob (nats) between the model's own attention and blocks; bfloat16 rounds per path."""


class AttentionDiffers(ThundersyncError):
    """Block attention gives other probabilities than the model's own code."""


def load_policy(path: str, *, dtype: str, device: str, activation_checkpointing: bool) -> tuple[Any, bool]:
    """A model ready for `Block`, in evaluation mode (no dropout), and whether its sequences may be cut.

    Cut in two and run whole, 16 tokens must get the probabilities of the model's own code; a model that only
    differs when cut runs each sequence as one block. Raises: AttentionDiffers if even that differs.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).to(device)
    model.eval().requires_grad_(True)
    model.config.use_cache = False
    ids = torch.randint(0, min(model.config.get_text_config().vocab_size, 1000), (1, SELF_CHECK_TOKENS),
                        generator=torch.Generator().manual_seed(0)).to(device)  # fmt: skip
    with torch.no_grad():
        own = model(ids).logits[0, :-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    use_block_attention(model)
    limit = SELF_CHECK_LIMIT[model.dtype]
    whole, cut = _check(model, ids, own, cut=False), _check(model, ids, own, cut=True)
    if not whole < limit:
        raise AttentionDiffers(
            f"{path}: log-probabilities differ by {whole:.2g} from the model's own attention",
            remedy="This architecture cannot be trained exactly yet; report the model's name.",
        )
    if activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, cut < limit


@torch.no_grad()
def _check(model: Any, ids: torch.Tensor, own: torch.Tensor, *, cut: bool) -> float:
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], NO_LABEL)], dim=1)
    try:
        if not cut:
            got = Block(model, ids, labels).forward()
        else:
            half = ids.shape[1] // 2
            root = Block(model, ids[:, :half], labels[:, :half])
            first = root.forward()
            root.open()
            got = torch.cat([first, Block(model, ids[:, half:], labels[:, half:], root).forward()])
    except Unsplittable:
        return float("inf")
    return float((got - own).abs().max())
