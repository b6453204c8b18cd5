"""Buffers for gradient parts, on the device or in host memory.

A part is one running sum: it covers the parameters and the adjoints on the prompts' keys and values. Parts are
float32 whatever the model's dtype.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

Adjoint = list[Tensor]


class Part:
    """One running sum: parameters [P] and, by group, adjoints on the prompt's keys and values."""

    def __init__(self, home: Tensor, *, spilled: bool) -> None:
        self.home, self.spilled = home, spilled
        """`home` is on the device, or in host memory for a spilled part."""
        self.adjoints: dict[str, Adjoint] = {}

    def add_adjoint(self, group_id: str, adjoint: Sequence[Tensor], weight: float) -> None:
        self.adjoints[group_id] = add_scaled(self.adjoints.get(group_id, []), adjoint, weight)


class PartPool:
    """Flat buffers [P].

    `resident` of them live on the device; what is lent beyond that lives in (pinned) host memory, and is added to
    piece by piece as gradients come. On a GPU they are made once and lent again: a close costs no allocation. On a CPU
    a part that is given back makes room for larger passes.
    """

    def __init__(
        self, size: int, device: torch.device, *, resident: int = 1_000_000, dtype: torch.dtype = torch.float32
    ) -> None:
        self._size, self._device, self._resident, self._dtype = size, device, resident, dtype
        self._here: list[Tensor] = []
        self._away: list[Tensor] = []
        """Free buffers on the device and in host memory."""
        self.lent = 0
        self._lent_here = 0

    def keep(self, resident: int) -> None:
        """Let `resident` parts live on the device from now on. Between two steps, when none is lent."""
        self._resident = resident
        self._here, self._away = [], []

    def take(self) -> Part:
        spilled = self._lent_here == self._resident
        self.lent += 1
        self._lent_here += not spilled
        free = self._away if spilled else self._here
        if spilled and free:
            self.settle()
        return Part(free.pop().zero_() if free else self._new(spilled=spilled), spilled=spilled)

    def settle(self) -> None:
        """Wait for copies that are on their way to host memory: before the host touches a spilled part."""
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def give(self, part: Part) -> None:
        self.lent -= 1
        self._lent_here -= not part.spilled
        if self._device.type == "cuda":
            (self._away if part.spilled else self._here).append(part.home)

    def _new(self, *, spilled: bool) -> Tensor:
        if self._device.type == "cpu" and self._size >= SLAB:
            _let_go()
        if spilled:
            return torch.zeros(self._size, dtype=self._dtype, pin_memory=self._device.type == "cuda")
        return torch.zeros(self._size, dtype=self._dtype, device=self._device)


def _let_go() -> None:
    """Give the system what passes have freed: glibc would keep it, and a part would come on top. Elsewhere nothing."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


SLAB = 1 << 24
"""Elements brought from host memory at once."""


def add_flat(total: Tensor, terms: Tensor, weight: float) -> None:
    """total [P] += weight x terms [P], in place, wherever each of them lives."""
    for into, term in zip(torch.split(total, SLAB), torch.split(terms, SLAB), strict=True):
        # Waits for the copy: what comes to the host must be there before it is read.
        into.add_(term.to(into.device), alpha=weight)


def add_scaled(total: Adjoint, terms: Sequence[Tensor], weight: float) -> Adjoint:
    """total + weight x terms, in place where `total` has tensors; an empty list stands for zero on either side."""
    if not terms:
        return total
    if not total:
        return [term * weight for term in terms]
    for tensor, term in zip(total, terms, strict=True):
        tensor.add_(term, alpha=weight)
    return total
