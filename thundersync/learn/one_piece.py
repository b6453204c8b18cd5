"""The textbook gradient of a step in one piece: what streaming has to equal.

Shares nothing with the streamed path but the model and the arithmetic of the terms: each sequence whole, through the
model's ordinary forward, one loss, one ordinary backward; no blocks, no parts, no hooks, no shared prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from thundersync.learn.blocks import ATTENTION, NO_LABEL
from thundersync.learn.flat import FlatParameters
from thundersync.learn.frozen import FrozenModels
from thundersync.learn.head import Head
from thundersync.learn.messages import ReferencePiece, Row, Terms
from thundersync.learn.terms import batch, weigh

SLAB = 1 << 24
"""Elements that are compared at once: their float64 copies are small beside the gradients."""


def one_piece_gradient(
    policy: Any,
    flat: FlatParameters,
    terms: Terms,
    frozen: FrozenModels,
    pieces: Sequence[ReferencePiece],
    scales: Sequence[float],
) -> Tensor:
    """Gradient [P] float32 of the minimised loss over `pieces`; the rows' weights are final, advantages included."""
    carried = policy.config._attn_implementation
    if carried == ATTENTION:
        policy.config._attn_implementation = "sdpa"
    try:
        gradient = flat.zeros()
        for piece in pieces:
            for row in piece.rows:
                loss = _loss(policy, terms, frozen, row, scales)
                grads = torch.autograd.grad(loss, [p for _, p in flat.named], allow_unused=True)
                for view, grad in zip(flat.views(gradient), grads, strict=True):
                    if grad is not None:
                        view.add_(grad.to(view.dtype))
        return gradient
    finally:
        policy.config._attn_implementation = carried


def _loss(policy: Any, terms: Terms, frozen: FrozenModels, row: Row, scales: Sequence[float]) -> Tensor:
    device = next(policy.parameters()).device
    laid = batch([row], 0, device)
    reference = frozen.reference_logprobs([row], terms.temperature) if terms.kl in ("k2", "k3") else None
    divergence, targets = frozen.divergence(terms, laid, [row])
    head = Head(policy, temperature=terms.temperature, entropy=terms.entropy, divergence=divergence, targets=targets)
    hidden = policy.model(input_ids=laid.tokens, use_cache=False).last_hidden_state
    at = laid.labels != NO_LABEL
    values = head(hidden[at], laid.labels[at])
    weighed = weigh(terms, laid, values, reference)
    loss = torch.zeros((), device=device)
    for index, weights in [(0, weighed.policy), *weighed.known.items()]:
        for value, weight in zip(values, weights, strict=True):
            if weight is not None:
                loss = loss - scales[index] * (weight.to(value) * value).sum()
    return loss


def relative_l2(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected|, in float64; infinite where only one of them is zero."""
    distance = norm = 0.0
    for one, other in zip(torch.split(got, SLAB), torch.split(expected, SLAB), strict=True):
        wide = other.double()
        norm += float(wide.square().sum())
        distance += float((one.double() - wide).square_().sum())
    if norm == 0.0:
        return 0.0 if distance == 0.0 else float("inf")
    return sqrt(distance / norm)


def worst_tensor(flat: FlatParameters, got: Tensor, expected: Tensor) -> tuple[float, str]:
    """The largest max |difference| / max |expected| over the parameters' tensors, and whose it is."""
    worst, name = 0.0, ""
    for (each, _), a, b in zip(flat.named, flat.views(got), flat.views(expected), strict=True):
        largest = float(b.abs().max())
        if largest > 0.0 and (ratio := float((a - b).abs().max()) / largest) >= worst:
            worst, name = ratio, each
    return worst, name
