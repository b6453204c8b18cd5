"""Scoring in the transformers engine: a given sequence that runs beside the sampling ones and keeps what they drop.

A sequence is fed in chunks, like a prompt; of each chunk the logits of the places that predict scored tokens are
turned into logprobs at once, so no matrix over all tokens and the vocabulary ever exists. Knows token ids and logits;
nothing of pipes or policy versions.
"""

import torch

from thundersync.generate.packed_attention import SequenceCache
from thundersync.generate.transformers_messages import Score

# Rows of [vocabulary] in float32 at a time.
SOFTMAX_ROWS = 128


class ScoredSequence:
    """One request being scored. All its tokens but the last are fed; the place before each scored one predicts it."""

    def __init__(self, ask: Score, cache: SequenceCache) -> None:
        self.ask = ask
        self.cache = cache
        self.prompt_ids = ask.token_ids[:-1]
        """What is fed."""
        self.cached_tokens = len(cache.token_ids)
        self.logprobs: list[float] = []
        self.top_ids: list[list[int]] = []
        self.top_logprobs: list[list[float]] = []

    @property
    def number(self) -> int:
        return self.ask.number

    @property
    def must_advance(self) -> bool:
        """False: its chunks share what sampling sequences leave of a pass."""
        return False

    @property
    def ended(self) -> bool:
        return len(self.logprobs) == len(self.ask.token_ids) - self.ask.start

    def due(self, limit: int) -> list[int]:
        """The next tokens to feed, at most `limit`."""
        done = len(self.cache.token_ids)
        return self.prompt_ids[done : done + limit]

    def rows(self, count: int) -> range:
        """Which of the next `count` tokens' logits are needed."""
        done = len(self.cache.token_ids)
        return range(min(max(self.ask.start - 1 - done, 0), count), count)

    def take(self, logits: torch.Tensor) -> None:
        """`logits` [n, V] of the rows asked for, in order."""
        for begin in range(0, len(logits), SOFTMAX_ROWS):
            table = torch.log_softmax(logits[begin : begin + SOFTMAX_ROWS].float(), dim=-1)
            first = self.ask.start + len(self.logprobs)
            wanted = torch.tensor(self.ask.token_ids[first : first + len(table)], device=table.device)
            self.logprobs += table.gather(1, wanted[:, None])[:, 0].tolist()
            if self.ask.topk:
                best = table.topk(self.ask.topk, dim=-1)
                self.top_ids += best.indices.tolist()
                self.top_logprobs += best.values.tolist()
