"""Attention of a block: to its ancestors' keys and values and to its own, lower-right causal.

Plain scaled-dot-product attention over keys and values that lie in pieces (one per ancestor, and the block's own).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint


class Rows:
    """Rows that lie end to end, and side by side for attention alone: one call for all, a small part of the work."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        ends = torch.tensor(lengths).cumsum(0)
        steps = torch.arange(max(lengths))[None]
        starts = ends - torch.tensor(lengths)
        # Padding repeats a row's last token: causal attention keeps it out of every real position.
        self._at = torch.minimum(starts[:, None] + steps, ends[:, None] - 1).to(device)
        self._real = (steps < torch.tensor(lengths)[:, None]).flatten().nonzero()[:, 0].to(device)

    def apart(self, tensor: Tensor) -> Tensor:
        """[1, heads, sum of lengths, d] -> [B, heads, T, d], right-padded."""
        rows = tensor[0].index_select(1, self._at.flatten())
        return rows.view(tensor.shape[1], *self._at.shape, tensor.shape[3]).transpose(0, 1)

    def end_to_end(self, tensor: Tensor) -> Tensor:
        """[B, T, heads, d] -> [1, sum of lengths, heads, d], without the padding."""
        return tensor.flatten(0, 1).index_select(0, self._real)[None]


def attend(
    past: Sequence[tuple[Tensor, Tensor]], query: Tensor, key: Tensor, value: Tensor, scaling: float | None
) -> Tensor:
    """Attention to the ancestors' keys and values and to the block's own -> [B, heads, T, d]."""
    pieces = [*(k for k, _ in past), key, *(v for _, v in past), value]
    if past and torch.is_grad_enabled():
        # Kept for the backward are references to the pieces, not a widened copy of every prefix for every layer.
        return checkpoint(_attention, query, scaling, *pieces, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
    return _attention(query, scaling, *pieces)


def _attention(query: Tensor, scaling: float | None, *pieces: Tensor) -> Tensor:
    """`pieces` are the ancestors' keys and the block's own, then the values alike -> [B, heads, T, d]."""
    keys, values = (_joined(half, query) for half in (pieces[: len(pieces) // 2], pieces[len(pieces) // 2 :]))
    if keys.shape[2] == query.shape[2]:
        return F.scaled_dot_product_attention(query, keys, values, is_causal=query.shape[2] > 1, scale=scaling)
    # is_causal aligns upper-left when keys outnumber queries: silently wrong here.
    mask = causal_lower_right(query.shape[2], keys.shape[2])
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)


def _joined(pieces: Sequence[Tensor], query: Tensor) -> Tensor:
    """Pieces of a sequence as one tensor [B, heads, T, d] with a row for each of the query's."""
    *past, own = pieces
    whole = torch.cat([*(_rows(piece, query.shape[0], own) for piece in past), own], dim=2) if past else own
    repeat = query.shape[1] // whole.shape[1]
    return whole.repeat_interleave(repeat, 1) if repeat > 1 else whole


def _rows(proxy: Tensor, rows: int, like: Tensor) -> Tensor:
    # Widened before the cast, so that the rows' adjoints are summed in float32.
    return proxy.expand(rows, -1, -1, -1).to(like.dtype)
