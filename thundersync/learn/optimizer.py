"""The one optimizer step of a commit: reduce over the workers, clip, AdamW, schedule, and the new weights to all.

Each rank owns a slice of the flat float32 master weights and their moments, on the device or in host memory. Knows
nothing of what the gradient is made of.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor
from transformers import get_scheduler

from thundersync.learn.collective import Ranks
from thundersync.learn.flat import FlatParameters
from thundersync.learn.settings import OptimSettings


class Optimizer:
    """AdamW over this rank's slice. `master` aliases the parameters where they are float32 and may stay on the device.

    A commit is `reduce`, then `step` or `drop`, on all ranks alike.
    """

    def __init__(self, flat: FlatParameters, settings: OptimSettings, ranks: Ranks) -> None:
        self.ranks = ranks
        self.flat = flat
        self._own = flat.buffer[ranks.own(flat.size)]
        """This rank's slice of the model's own weights."""
        self._max_norm = settings.max_grad_norm
        self._norm = 0.0
        self._gradient: Tensor | None = None
        self._landing: Tensor | None = None
        """Pinned: the gradient's way to the host, and the new weights' way back."""
        if settings.offload and flat.device.type == "cuda":
            self.master = self._own.float().cpu()
            self._landing = torch.empty_like(self.master, pin_memory=True)
        else:
            self.master = self._own if flat.dtype == torch.float32 else self._own.float()
        self.adamw = torch.optim.AdamW(
            [self.master],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.schedule: Any = get_scheduler(
            "constant_with_warmup" if settings.scheduler == "constant" else settings.scheduler,
            self.adamw,
            num_warmup_steps=settings.warmup_steps,
            num_training_steps=settings.max_steps,
        )

    @torch.no_grad()
    def reduce(self, gradient: Tensor) -> tuple[float, bool]:
        """Sum `gradient` [P] float32 over the ranks. Returns its norm before clipping, and whether that is finite.

        The tensor is the optimizer's until `step` or `drop`, and clobbered. Norm and verdict are equal on all ranks.
        """
        self._gradient = self.ranks.reduce_scatter(gradient)
        self._norm = sqrt(self.ranks.sum(float(torch.linalg.vector_norm(self._gradient)) ** 2))
        return self._norm, self._norm < float("inf")

    @torch.no_grad()
    def step(self) -> float:
        """Clip the reduced gradient, step, and give every rank the new weights. Returns the learning rate used."""
        gradient, self._gradient = self._gradient, None
        if gradient is None or not self._norm < float("inf"):
            raise RuntimeError("an optimizer step needs a reduced, finite gradient")
        lr = float(self.schedule.get_last_lr()[0])
        if self._norm > self._max_norm:
            gradient.mul_(self._max_norm / (self._norm + 1e-6))
        self.master.grad = gradient if self._landing is None else self._landing.copy_(gradient)
        self.adamw.step()
        self.schedule.step()
        self.master.grad = None
        self.publish_master()
        return lr

    def drop(self) -> None:
        """Forget the reduced gradient: the last good weights stay."""
        self._gradient = None

    @torch.no_grad()
    def publish_master(self) -> None:
        """Round the master weights into the parameters the model runs with, on every rank."""
        if self._landing is not None:
            # The gradient that came down this way is spent; its memory is never smaller than the weights'.
            rounded = self._landing.view(self.flat.dtype)[: self.master.numel()]
            self._own.copy_(rounded.copy_(self.master))
        elif self.master is not self._own:
            self._own.copy_(self.master)
        self.ranks.all_gather(self.flat.buffer)
