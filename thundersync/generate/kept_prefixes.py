"""Memory of the transformers engine: caches of live sequences, and kept ones for the next turn to go on from.

Decides who gets memory and whose prefix is reused. Knows token ids and bytes; nothing of models or sampling.
"""

from collections.abc import Iterable, Sequence

import torch

from thundersync.generate.packed_attention import SequenceCache

# Below this many tokens a copied prefix saves less than it costs.
WORTHWHILE_TOKENS = 8
# Capacity is rounded up, so that a next turn often fits where the last one lay.
ROUND_TOKENS = 64


class CacheMemory:
    """Hands out sequence caches within `budget_bytes`; keeps ended ones, the least recently used leaves first."""

    def __init__(
        self, *, layers: int, kv_heads: int, head_size: int, dtype: torch.dtype, device: torch.device, budget_bytes: int
    ) -> None:
        self._layers = layers
        self._kv_heads = kv_heads
        self._head_size = head_size
        self._dtype = dtype
        self._device = device
        self._budget_bytes = budget_bytes
        self._live: list[SequenceCache] = []
        self._kept: list[SequenceCache] = []
        """Least recently used first."""

    @property
    def token_bytes(self) -> int:
        return self._layers * 2 * self._kv_heads * self._head_size * self._dtype.itemsize

    @property
    def capacity_tokens(self) -> int:
        return self._budget_bytes // self.token_bytes

    def open(self, prompt_ids: Sequence[int], length: int) -> SequenceCache | None:
        """A cache for a sequence that may grow to `length` tokens, holding the longest known prefix of `prompt_ids`.

        The prompt's last token is never taken as known: its logits are needed. None when the memory is taken by live
        sequences; a lone sequence always gets its memory.
        """
        source, known = self._longest([*self._kept, *self._live], prompt_ids)
        capacity = -(-length // ROUND_TOKENS) * ROUND_TOKENS
        continues = source is not None and source in self._kept and known == len(source.token_ids)
        if source is not None and continues and source.capacity >= length:
            # The same conversation, one turn on, and room for it: its memory changes hands as it is.
            self._kept.remove(source)
            self._live.append(source)
            return source
        if not self._make_room(capacity, spare=source):
            return None
        cache = SequenceCache(
            torch.empty(
                (self._layers, 2, self._kv_heads, capacity, self._head_size), dtype=self._dtype, device=self._device
            )
        )
        if source is not None:
            cache.kv[:, :, :, :known] = source.kv[:, :, :, :known]
            cache.token_ids = source.token_ids[:known]
            if continues:
                self._kept.remove(source)
            elif source in self._kept:
                self._kept.remove(source)
                self._kept.append(source)
        self._live.append(cache)
        return cache

    def close(self, cache: SequenceCache) -> None:
        """The sequence has ended; its cache is kept while there is room."""
        self._live.remove(cache)
        self._kept.append(cache)

    def forget(self) -> None:
        """Drop everything kept: the weights have changed."""
        self._kept.clear()

    def _longest(self, caches: Iterable[SequenceCache], prompt_ids: Sequence[int]) -> tuple[SequenceCache | None, int]:
        best, known = None, WORTHWHILE_TOKENS - 1
        for cache in caches:
            shared = common_prefix(cache.token_ids, prompt_ids[:-1])
            if shared > known:
                best, known = cache, shared
        return best, known if best is not None else 0

    def _make_room(self, capacity: int, *, spare: SequenceCache | None) -> bool:
        needed = capacity * self.token_bytes
        free = self._budget_bytes - sum(cache.nbytes for cache in [*self._live, *self._kept])
        for cache in list(self._kept):
            if free >= needed:
                break
            if cache is not spare:
                self._kept.remove(cache)
                free += cache.nbytes
        return free >= needed or not self._live


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading tokens two sequences share."""
    limit = min(len(left), len(right))
    if left[:limit] == right[:limit]:
        return limit
    low, high = 0, limit  # equal up to low, different by high
    while high - low > 1:
        middle = (low + high) // 2
        if left[:middle] == right[:middle]:
            low = middle
        else:
            high = middle
    return low
