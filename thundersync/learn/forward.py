"""A block's forward and what each of its tokens then weighs: policy, reference, teacher and terms brought together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thundersync.learn.blocks import NO_LABEL, Block
from thundersync.learn.frozen import FrozenModels
from thundersync.learn.head import Head
from thundersync.learn.messages import Row, Terms
from thundersync.learn.terms import Batch, Weighed, batch, weigh


class Forward:
    """The step's terms over one policy; holds no state of any step."""

    def __init__(self, policy: Any, device: torch.device, terms: Terms, frozen: FrozenModels) -> None:
        self._policy, self._device, self._terms, self._frozen = policy, device, terms, frozen

    def run(self, block: Block, rows: Batch, whole: Sequence[Row]) -> tuple[list[Tensor], Weighed]:
        """A block's values, with their graph, and their weights; `whole` are its rows from their first token."""
        terms = self._terms
        reference = self._frozen.reference_logprobs(whole, terms.temperature) if terms.kl in ("k2", "k3") else None
        divergence, targets = self._frozen.divergence(terms, rows, whole)
        head = Head(
            self._policy,
            temperature=terms.temperature,
            entropy=terms.entropy,
            divergence=divergence,
            targets=targets,
        )
        values = block.forward(head)
        return values, weigh(terms, rows, values, reference)

    @torch.no_grad()
    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs [T - 1] under the current weights and the sampling temperature."""
        tokens = torch.tensor([token_ids], device=self._device)
        labels = torch.full_like(tokens, NO_LABEL)
        labels[:, :-1] = tokens[:, 1:]
        head = Head(self._policy, temperature=self._terms.temperature)
        logprobs: list[float] = Block(self._policy, tokens, labels).forward(head)[0].tolist()
        return logprobs

    @torch.no_grad()
    def measure_kl(self, rows: Sequence[Row]) -> list[float]:
        """Policy minus reference logprob, summed over the sampled tokens of each row: k1."""
        head = Head(self._policy, temperature=self._terms.temperature)
        sums = []
        for row in rows:
            laid = batch([row], 0, self._device)
            own = Block(self._policy, laid.tokens, laid.labels).forward(head)[0]
            sums.append(float((own - self._frozen.reference_logprobs([row], self._terms.temperature)).sum()))
        return sums
