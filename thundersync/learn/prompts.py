"""The prompts that a step's rollouts share: step prefix (root of all) -> group prompt -> rows, or turns of a rollout.

Each is run once when it is first needed and differentiated once, after everything below it: a group's prompt at its
close, the step's prefix at commit. Until then they collect, per sum of the step, what is owed to their keys and
values. Knows nothing of what is below but that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from thundersync.learn.blocks import NO_LABEL, Block
from thundersync.learn.pool import Adjoint, add_scaled

Into = Callable[[int, Callable[[], None]], None]
"""Runs a backward whose gradient goes into the step's sum of that index."""


class OpenGroup:
    """A group's prompt blocks, and what is owed to them under weights that are known, per sum of the step."""

    def __init__(self, prompt: list[int], ancestors: list[Block]) -> None:
        self.ancestors = ancestors
        """Blocks whose K/V the rows attend to: the step's prefix, the rest of the prompt; either may be missing."""
        self.owed: dict[int, Adjoint] = {}
        self.shared_tokens = sum(block.tokens.shape[1] for block in ancestors)
        self.shared = prompt[: self.shared_tokens]

    def take_adjoint(self) -> Adjoint:
        """What the last backward left on the prompt's keys and values, the step's prefix first; empty for nothing."""
        if not any(leaf.grad is not None for block in self.ancestors for leaf in block.leaves()):
            return []
        return [tensor for block in self.ancestors for tensor in block.take_adjoint()]

    def owe(self, sum_index: int, adjoint: Adjoint) -> None:
        self.owed[sum_index] = add_scaled(self.owed.get(sum_index, []), adjoint, 1.0)


class SharedPrompts:
    """The prompts of one step at a time. Without `shares`, sequences run whole and there is nothing to share."""

    def __init__(self, policy: Any, device: torch.device, *, shares: bool) -> None:
        self._policy, self._device, self.shares = policy, device, shares
        self._prefix: Block | None = None
        self._owed: dict[int, Adjoint] = {}
        self.groups: dict[str, OpenGroup] = {}

    def open(self, prefix: Sequence[int]) -> None:
        """Forget the last step; the prompts of the next one all start with `prefix`, which may be empty."""
        self.groups, self._owed, self._prefix = {}, {}, None
        if prefix and self.shares:
            self._prefix = self._unlabelled(prefix, None)
            self._prefix.open()

    def group(self, group_id: str, prompt: list[int]) -> OpenGroup:
        """The open group of that name, its prompt run if this is the first time."""
        group = self.groups.get(group_id)
        if group is None:
            ancestors = [self._prefix] if self._prefix is not None else []
            start = sum(block.tokens.shape[1] for block in ancestors)
            # The last prompt token predicts each row's own first token: it belongs to the rows.
            if self.shares and len(prompt) - 1 > start:
                block = self._unlabelled(prompt[start:-1], self._prefix)
                block.open()
                ancestors.append(block)
            group = self.groups[group_id] = OpenGroup(prompt, ancestors)
        return group

    def close(self, group_id: str, into: Into) -> None:
        """Pull a group's prompt: once for each sum of the step that owes it anything."""
        group = self.groups.pop(group_id)
        split = 2 * len(self._prefix.proxies) if self._prefix is not None else 0
        own = [block for block in group.ancestors if block is not self._prefix]
        for index, adjoint in group.owed.items():
            if not adjoint:
                continue
            self._owe(index, adjoint[:split])
            for block in own:
                into(index, lambda b=block, a=adjoint[split:]: b.pull(a))  # type: ignore[misc]
            if own and self._prefix is not None:
                self._owe(index, self._prefix.take_adjoint())

    def finish(self, weights: Sequence[float], into: Into) -> None:
        """Pull the step's prefix into the first sum, with what each sum owes it under that sum's weight."""
        adjoint: Adjoint = []
        for index, weight in enumerate(weights):
            adjoint = add_scaled(adjoint, self._owed.get(index, []), weight)
        prefix = self._prefix
        if prefix is not None and adjoint:
            into(0, lambda: prefix.pull(adjoint))

    def _owe(self, sum_index: int, adjoint: Adjoint) -> None:
        self._owed[sum_index] = add_scaled(self._owed.get(sum_index, []), adjoint, 1.0)

    def _unlabelled(self, tokens: Sequence[int], parent: Block | None) -> Block:
        ids = torch.tensor([list(tokens)], device=self._device)
        return Block(self._policy, ids, torch.full_like(ids, NO_LABEL), parent)
