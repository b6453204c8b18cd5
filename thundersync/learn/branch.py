"""The turns of one rollout as a chain of blocks, each attending to those before it and to its group's prompt.

A turn's loss reaches every earlier token through keys and values, so one sweep over the whole branch is owed in any
case. *forward* keeps the turns' graphs connected, and the sweep is a single backward; *immediate* differentiates a
turn's own loss at once, cut off from the turns before it, and runs those again in a sweep from the last to the first.
Both leave the same gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thundersync.learn.blocks import Block
from thundersync.learn.prompts import Into

TURN_SUM = 0


class Branch:
    """One token sequence, growing turn by turn. `root` are the blocks before its first own token."""

    def __init__(self, policy: Any, root: list[Block]) -> None:
        self._policy = policy
        self._root = root
        self._blocks: list[Block] = []
        self._kept: list[tuple[Tensor, Tensor]] = []
        """Values whose backward waits for the sweep, and their weights."""

    @property
    def tokens(self) -> int:
        """Leading tokens of the sequence that lie in blocks already."""
        return sum(block.tokens.shape[1] for block in [*self._root, *self._blocks])

    def grow(self, tokens: Tensor, labels: Tensor) -> Block:
        """A block for the next `tokens` [1, T], not yet run."""
        before = [*self._root, *self._blocks]
        block = Block(self._policy, tokens, labels, before[-1] if before else None)
        self._blocks.append(block)
        return block

    def take(self, block: Block, values: list[Tensor], weights: list[Tensor | None], *, keep: bool, into: Into) -> None:
        """The newest block has run: differentiate its own loss now, or `keep` its graph for the sweep."""
        block.publish(connected=keep)
        if keep:
            block.fresh = {}
            self._kept += [(v, w.to(v)) for v, w in zip(values, weights, strict=True) if w is not None]
        else:
            into(TURN_SUM, lambda: block.backward(values, weights))

    def sweep(self, into: Into) -> None:
        """What is left of the branch; the root's blocks are then left with what the whole branch owes them."""
        if self._kept:
            values, weights = zip(*self._kept, strict=True)
            self._kept, self._blocks = [], []
            into(TURN_SUM, lambda: torch.autograd.backward(values, weights))
            return
        self._blocks.pop()  # it has no children, so nothing waits on its keys and values
        while self._blocks:
            block = self._blocks.pop()
            adjoint = block.take_adjoint()
            into(TURN_SUM, lambda b=block, a=adjoint: b.pull(a))  # type: ignore[misc]
