"""The models beside the policy that never learn: the reference of a KL term, a teacher of which every token counts.

With LoRA the reference costs nothing: it is the policy without its adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from thundersync.learn.blocks import NO_LABEL, Block
from thundersync.learn.divergence import held_teacher, told_teacher
from thundersync.learn.head import Divergence, Head
from thundersync.learn.messages import Row, Terms
from thundersync.learn.terms import Batch, batch


class FrozenModels:
    """`reference` and `teacher` are models or None; `as_reference` makes the policy itself the reference inside."""

    def __init__(
        self,
        *,
        reference: Any = None,
        teacher: Any = None,
        as_reference: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._reference, self._teacher = reference, teacher
        self._as_reference = as_reference

    @torch.no_grad()
    def reference_logprobs(self, rows: Sequence[Row], temperature: float) -> Tensor:
        """Of the sampled tokens of whole `rows`, [N] in row-major order."""
        laid = batch(rows, 0, self._reference.device)
        with self._as_reference():
            head = Head(self._reference, temperature=temperature)
            values: Tensor = Block(self._reference, laid.tokens, laid.labels).forward(head)[0]
        return values

    def divergence(
        self, terms: Terms, laid: Batch, rows: Sequence[Row]
    ) -> tuple[Divergence | None, tuple[Tensor, ...]]:
        """What the head compares the policy with at each label of `laid`; `rows` are the same from their start."""
        if not terms.divergence:
            return None, ()
        if self._teacher is None:
            nobody = torch.zeros(0, 1, dtype=torch.long, device=laid.tokens.device)
            # A block of a long row may hold no sampled token, of which a teacher would have spoken.
            assert laid.best is not None or not laid.row.numel()
            return told_teacher(kind=terms.divergence, mix=terms.mix), laid.best or (nobody, nobody.float())
        divergence = held_teacher(self._teacher, temperature=terms.temperature, kind=terms.divergence, mix=terms.mix)
        return divergence, (self._teacher_hidden(rows),)

    @torch.no_grad()
    def _teacher_hidden(self, rows: Sequence[Row]) -> Tensor:
        """The teacher's final hidden states [N, H] where the policy predicted the sampled tokens."""
        laid = batch(rows, 0, self._teacher.device)
        hidden: Tensor = self._teacher.model(input_ids=laid.tokens, use_cache=False).last_hidden_state
        return hidden[laid.labels != NO_LABEL]
