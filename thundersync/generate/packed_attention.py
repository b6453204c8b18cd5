"""Attention over many sequences packed into one row, each with its own keys and values: no padding anywhere.

The transformers engine feeds a model all new tokens of all live sequences as ONE sequence of length N, with each
token's true position; only attention needs to know where one sequence ends and the next begins, and it is told here.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

NAME = "thundersync_packed"


class SequenceCache:
    """Keys and values of one sequence, for every layer. `kv` has shape [layers, 2, kv heads, capacity, head size]."""

    def __init__(self, kv: torch.Tensor) -> None:
        self.kv = kv
        self.token_ids: list[int] = []
        """The tokens whose keys and values are here, in order."""

    @property
    def capacity(self) -> int:
        return self.kv.shape[3]

    @property
    def nbytes(self) -> int:
        return self.kv.numel() * self.kv.itemsize


class Segment:
    """New tokens of one sequence inside a packed row: the row's `start` to `start + count`."""

    def __init__(self, cache: SequenceCache, token_ids: list[int], start: int) -> None:
        self.cache = cache
        self.token_ids = token_ids
        self.start = start
        self.done = len(cache.token_ids)
        """Tokens of the sequence before these."""
        self._masks: dict[int | None, torch.Tensor] = {}

    @property
    def count(self) -> int:
        return len(self.token_ids)

    def mask(self, groups: int, window: int | None) -> torch.Tensor | None:
        """Which keys each query sees, [groups x count, keys]; None when a lone query sees them all.

        Query heads that share a key head are stacked as `groups` blocks of queries, so that shared heads cost no copy.
        """
        if self.count == 1 and window is None:
            return None
        if window not in self._masks:
            device = self.cache.kv.device
            keys = torch.arange(self.done + self.count, device=device)
            queries = torch.arange(self.done, self.done + self.count, device=device)[:, None]
            seen = keys <= queries
            if window is not None:
                seen &= keys > queries - window
            self._masks[window] = seen.repeat(groups, 1)
        return self._masks[window]


class PackedAttention:
    """The attention function given to transformers. `segments` must be set before each forward pass."""

    def __init__(self) -> None:
        self.segments: Sequence[Segment] = ()

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """`query` [1, heads, N, size], `key` and `value` [1, kv heads, N, size] -> [1, N, heads, size].

        Writes the new keys and values into each sequence's cache on the way. `others` (dropout, ids) change nothing.
        """
        if softcap is not None or s_aux is not None:
            raise ValueError("attention with soft caps or sinks is not supported by this engine")
        _, heads, length, size = query.shape
        kv_heads = key.shape[1]
        groups = heads // kv_heads
        new = torch.stack((key[0], value[0]))  # [2, kv heads, N, size]
        # [kv heads, groups, N, size]: query heads are ordered so that those sharing a key head are neighbours.
        grouped = query[0].view(kv_heads, groups, length, size)
        output = query.new_empty(length, kv_heads, groups, size)
        for segment in self.segments:
            begin, end, seen = segment.start, segment.start + segment.count, segment.done + segment.count
            kv = segment.cache.kv[module.layer_idx]
            kv[:, :, segment.done : seen] = new[:, :, begin:end]
            answer = scaled_dot_product_attention(
                grouped[:, :, begin:end].reshape(1, kv_heads, groups * segment.count, size),
                kv[0, None, :, :seen],
                kv[1, None, :, :seen],
                attn_mask=segment.mask(groups, sliding_window),
                scale=scaling,
            )
            output[begin:end] = answer.view(kv_heads, groups, segment.count, size).permute(2, 0, 1, 3)
        return output.view(1, length, heads, size), None
