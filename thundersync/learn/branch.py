"""The turns of one rollout as a chain of blocks, each attending to those before it and to its group's prompt.

A turn's loss reaches every earlier token through keys and values, so one sweep from the last block to the first is
owed in any case. *forward* keeps each turn's graph and does everything in that sweep; *immediate* differentiates a
turn's own loss at once and runs earlier turns again in the sweep. Both leave the same gradient.
"""

from __future__ import annotations

from typing import Any

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
        self._kept: dict[int, tuple[list[Tensor], list[Tensor | None]]] = {}

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
        block.publish()
        if keep:
            self._kept[len(self._blocks) - 1] = (values, weights)
        else:
            into(TURN_SUM, lambda: block.backward(values, weights))

    def sweep(self, into: Into) -> None:
        """Last block to first; the root's blocks are left with what the whole branch owes them."""
        for index in reversed(range(len(self._blocks))):
            block = self._blocks.pop()
            # The last block has no children, so nothing waits on its keys and values.
            last = index == len(self._blocks) and not any(pair[0].grad is not None for pair in block.proxies.values())
            adjoint = [] if last else block.take_adjoint()
            into(TURN_SUM, lambda b=block, i=index, a=adjoint: self._pull(b, i, a))  # type: ignore[misc]

    def _pull(self, block: Block, index: int, adjoint: list[Tensor]) -> None:
        kept = self._kept.pop(index, None)
        if kept is not None:
            block.backward(*kept, adjoint)
        elif adjoint:
            block.forward()
            block.backward([], [], adjoint)
