"""One flat buffer for all trainable parameters, and the hooks that carry gradients into flat float32 buffers.

Parameters are views of the buffer, so that scaling, clipping, stepping, publishing and saving are each one
operation on one tensor. Knows nothing of groups or objectives.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn


class FlatParameters:
    """The trainable parameters of `module`, moved into one buffer; tied parameters lie there once.

    `buffer` has the parameters' dtype, shape [P]. All trainable parameters must share one dtype and device.
    """

    def __init__(self, module: nn.Module) -> None:
        self.named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        kinds = {(p.dtype, p.device) for _, p in self.named}
        if len(kinds) != 1:
            raise ValueError(
                f"trainable parameters of one dtype and device are needed, found {sorted(map(str, kinds))}"
            )
        self.dtype, self.device = kinds.pop()
        self.sum_dtype = wide(self.dtype)
        self.size = sum(p.numel() for _, p in self.named)
        self.buffer = torch.empty(self.size, dtype=self.dtype, device=self.device)
        for (_, parameter), view in zip(self.named, self.views(self.buffer), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view

    def views(self, flat: Tensor) -> list[Tensor]:
        """`flat` [P] cut into the parameters' shapes, in their order, without a copy."""
        sizes = [parameter.numel() for _, parameter in self.named]
        return [piece.view(p.shape) for piece, (_, p) in zip(torch.split(flat, sizes), self.named, strict=True)]

    def zeros(self) -> Tensor:
        """A buffer [P] for sums, on the parameters' device."""
        return torch.zeros(self.size, dtype=self.sum_dtype, device=self.device)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums of `dtype` are kept in: float32, or float64 for a float64 model (tests of exactness)."""
    return torch.promote_types(dtype, torch.float32)


WITNESSES = 64
"""A value that is not finite anywhere in a backward reaches the small parameters of all layers below it."""


class GradientSink:
    """Adds each parameter's gradient to flat float32 buffers the moment autograd has it.

    No full gradient in the model's dtype is ever held, and bfloat16 gradients are cast up before they are added.
    """

    def __init__(self, flat: FlatParameters) -> None:
        self._flat = flat
        self._targets: list[tuple[list[Tensor], float]] = []
        self._largest = max(p.numel() for _, p in flat.named)
        self._scratch: Tensor | None = None
        by_size = sorted(range(len(flat.named)), key=lambda index: flat.named[index][1].numel())
        self._witnesses = by_size[:WITNESSES]
        for index, (_, parameter) in enumerate(flat.named):
            parameter.register_post_accumulate_grad_hook(partial(self._carry, index))  # type: ignore[no-untyped-call]

    @contextmanager
    def into(self, targets: Sequence[tuple[Tensor, float]]) -> Iterator[None]:
        """Within the block, every backward adds weight x gradient to each target buffer [P]."""
        self._targets = [(self._flat.views(buffer), weight) for buffer, weight in targets]
        alias = (
            self._flat.dtype == self._flat.sum_dtype
            and len(targets) == 1
            and targets[0][1] == 1.0
            and targets[0][0].device == self._flat.device
        )
        if alias:  # autograd then adds in place: the same arithmetic, one pass over memory less
            for (_, parameter), view in zip(self._flat.named, self._targets[0][0], strict=True):
                parameter.grad = view
            self._targets = []
        try:
            yield
        finally:
            self._targets = []
            for _, parameter in self._flat.named:
                parameter.grad = None

    def finite(self, buffer: Tensor) -> bool:
        """Whether what has been added to `buffer` [P] is finite, by the smallest parameters: a look, not a proof."""
        views = self._flat.views(buffer)
        return bool(torch.isfinite(torch.stack([views[index].sum() for index in self._witnesses])).all())

    def _carry(self, index: int, parameter: nn.Parameter) -> None:
        if not self._targets:
            return
        gradient = parameter.grad
        assert gradient is not None
        if gradient.dtype != self._flat.sum_dtype:
            gradient = self._cast_up(gradient)
        for views, weight in self._targets:
            view = views[index]
            if view.device == gradient.device:
                view.add_(gradient, alpha=weight)
            else:  # a spilled part: one parameter of it visits the device
                view.copy_(view.to(gradient.device, non_blocking=True).add_(gradient, alpha=weight), non_blocking=True)
        parameter.grad = None

    def _cast_up(self, gradient: Tensor) -> Tensor:
        # Adding bfloat16 to float32 directly is 2.7 times slower on a CPU than casting into a scratch first.
        if self._scratch is None:
            self._scratch = torch.empty(self._largest, dtype=self._flat.sum_dtype, device=gradient.device)
        return self._scratch[: gradient.numel()].view(gradient.shape).copy_(gradient)
