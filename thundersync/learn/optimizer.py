"""The one optimizer step of a commit: clip, AdamW, schedule, on one flat float32 master copy of the parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import get_scheduler

from thundersync.learn.flat import FlatParameters
from thundersync.learn.messages import Setup


class Optimizer:
    """AdamW over one tensor. `master` aliases the parameters where they are float32 already."""

    def __init__(self, flat: FlatParameters, setup: Setup) -> None:
        self._flat = flat
        self._max_norm = setup.max_grad_norm
        self.master = flat.buffer if flat.dtype == torch.float32 else flat.buffer.float()
        self.adamw = torch.optim.AdamW(
            [self.master],
            lr=setup.lr,
            betas=setup.betas,
            eps=setup.eps,
            weight_decay=setup.weight_decay,
            fused=True,
        )
        self.schedule: Any = get_scheduler(
            "constant_with_warmup" if setup.scheduler == "constant" else setup.scheduler,
            self.adamw,
            num_warmup_steps=setup.warmup_steps,
            num_training_steps=setup.max_steps,
        )

    @torch.no_grad()
    def step(self, gradient: Tensor) -> tuple[float, bool, float]:
        """Apply `gradient` [P] (clobbered). Returns (norm before clipping, finite, learning rate used).

        A gradient that is not finite changes nothing: the last good weights stay.
        """
        norm = float(torch.linalg.vector_norm(gradient))
        lr = float(self.schedule.get_last_lr()[0])
        if not norm < float("inf"):
            return norm, False, lr
        if norm > self._max_norm:
            gradient.mul_(self._max_norm / (norm + 1e-6))
        self.master.grad = gradient
        self.adamw.step()
        self.schedule.step()
        self.master.grad = None
        self.publish_master()
        return norm, True, lr

    def publish_master(self) -> None:
        """Round the master weights into the parameters the model runs with."""
        if self.master is not self._flat.buffer:
            self._flat.buffer.copy_(self.master)
