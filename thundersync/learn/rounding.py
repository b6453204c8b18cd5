"""Rounding made visible: a model whose layers are each moved by one unit in the last place.

Two float32 programs that compute the same agree to about this and no better, whichever kernels they use; how far it
moves a gradient depends on model and tokens. Knows nothing of what the gradient is compared with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

SEED = 20_260_101


@contextmanager
def last_place_noise(policy: nn.Module) -> Iterator[None]:
    """Inside, every element that a decoder layer gives is off by at most one unit in its dtype's last place, at random.

    The same noise each time. A model without layers that transformers marks as such is left as it is.
    """
    draws: dict[torch.device, torch.Generator] = {}

    def noisy(hidden: Tensor) -> Tensor:
        draw = draws.get(hidden.device)
        if draw is None:
            draw = draws[hidden.device] = torch.Generator(hidden.device).manual_seed(SEED)
        # In float32: in bfloat16 the noise itself would be rounded away.
        noise = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device).uniform_(-1, 1, generator=draw)
        return (hidden * noise.mul_(torch.finfo(hidden.dtype).eps).add_(1)).to(hidden.dtype)

    def hook(module: nn.Module, arguments: Any, output: Any) -> Any:
        return (noisy(output[0]), *output[1:]) if isinstance(output, tuple) else noisy(output)

    hooks = [
        module.register_forward_hook(hook)
        for module in policy.modules()
        if isinstance(module, GradientCheckpointingLayer)
    ]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()
