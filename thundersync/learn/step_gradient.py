"""The gradient of one step, as it grows: the step's sum, the parts of open groups, and the shared prompts.

step prefix (root of all) -> group prompt -> rows of a pass. Children are pulled first: rows in their passes, a
group's prompt at its close, the step's prefix at commit; each once. Knows nothing of rewards beyond the numbers it
is given, nothing of optimizers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thundersync.core.advantage import JoinScalars
from thundersync.learn.blocks import NO_LABEL, Block
from thundersync.learn.flat import FlatParameters, GradientSink
from thundersync.learn.messages import PassReport, Row, RunPass
from thundersync.learn.parts import GroupParts, PartPool, add_scaled


class OpenGroup:
    """A group's prompt block, its parts, and the prompt adjoint whose weight is already known."""

    def __init__(self, prompt: list[int], ancestors: list[Block], parts: GroupParts) -> None:
        self.ancestors = ancestors
        """Blocks whose K/V the rows attend to: the step's prefix, the rest of the prompt; either may be missing."""
        self.parts = parts
        self.known_adjoint: list[Tensor] = []

        self.shared_tokens = sum(block.tokens.shape[1] for block in ancestors)
        self.shared = prompt[: self.shared_tokens]


class StepGradient:
    """Everything a worker has learned since the last commit."""

    def __init__(
        self,
        policy: Any,
        flat: FlatParameters,
        *,
        temperature: float,
        importance_cap: float | None,
        shares_prompts: bool,
    ) -> None:
        self._policy = policy
        self._flat = flat
        self._sink = GradientSink(flat)
        self._pool = PartPool(flat.size, flat.device)
        self._temperature = temperature
        self._importance_cap = importance_cap
        self._shares_prompts = shares_prompts
        self._total = flat.zeros()
        """The step's sum: ascent direction, advantage x gradient of logprob."""
        self._prefix: Block | None = None
        self._prefix_adjoint: list[Tensor] = []
        self._groups: dict[str, OpenGroup] = {}

    def open(self, prefix: Sequence[int]) -> None:
        """Begin a step whose prompts all start with `prefix`."""
        self.discard()
        if prefix and self._shares_prompts:
            self._prefix = self._unlabelled(prefix, None)
            self._prefix.open()

    def run(self, request: RunPass) -> PassReport:
        """One forward and backward over the rows of a pass."""
        began = time.monotonic()
        group = self._group(request)
        if request.direct:
            destinations, targets = [], [(self._total, 1.0)]
        else:
            destinations = group.parts.targets(request.reward)
            targets = [(part.buffer, weight) for part, weight in destinations]
        shared: list[Row] = []
        alone: list[Row] = []
        for row in request.rows:
            (shared if row.token_ids[: group.shared_tokens] == group.shared else alone).append(row)
        mismatch: list[Tensor] = []
        with self._sink.into(targets):
            if shared:
                mismatch.append(self._backward(shared, group.ancestors, group.shared_tokens))
            # A row whose history was rewritten does not begin with the prompt: it runs whole.
            mismatch.extend(self._backward([row], [], 0) for row in alone)
        if group.ancestors and shared:
            adjoint = [tensor for block in group.ancestors for tensor in block.take_adjoint()]
            if request.direct:
                group.known_adjoint = add_scaled(group.known_adjoint, adjoint, 1.0)
            for part, weight in destinations:
                part.add_adjoint(adjoint, weight)
        difference = torch.cat(mismatch)
        cap = self._importance_cap
        return PassReport(
            busy_s=time.monotonic() - began,
            tokens=sum(len(row.token_ids) for row in request.rows) - len(shared) * group.shared_tokens,
            sampled_tokens=difference.numel(),
            mismatch_sum=float(difference.abs().sum()),
            mismatch_max=float(difference.abs().max()) if difference.numel() else 0.0,
            importance_capped=int((difference.exp() > cap).sum()) if cap is not None else 0,
            parts=self._pool.lent,
        )

    def close_group(self, group_id: str, join: JoinScalars | None) -> None:
        """Join the group's parts into the step's sum, then pull its prompt: the last thing done for the group."""
        group = self._groups.pop(group_id, None)
        if group is None:
            return  # none of its pieces was worked here
        adjoint = add_scaled(group.parts.join(join, self._total), group.known_adjoint, 1.0)
        if not adjoint:
            return
        split = 2 * len(self._prefix.proxies) if self._prefix is not None else 0
        self._prefix_adjoint = add_scaled(self._prefix_adjoint, adjoint[:split], 1.0)
        own = [block for block in group.ancestors if block is not self._prefix]
        for block in own:
            self._pull(block, adjoint[split:])
        if own and self._prefix is not None:
            self._prefix_adjoint = add_scaled(self._prefix_adjoint, self._prefix.take_adjoint(), 1.0)

    def finish(self, scale: float) -> Tensor:
        """Pull the step's prefix and give the gradient of the minimised loss, [P] float32: -scale x the sum."""
        if self._groups:
            raise RuntimeError(f"groups are still open at commit: {sorted(self._groups)}")
        if self._prefix is not None and self._prefix_adjoint:
            self._pull(self._prefix, self._prefix_adjoint)
        return self._total.mul_(-scale)

    def discard(self) -> None:
        """Forget the step."""
        for group in self._groups.values():
            group.parts.join(None, self._total)
        self._groups, self._prefix, self._prefix_adjoint = {}, None, []
        self._total.zero_()

    @torch.no_grad()
    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs [T - 1] under the current weights and the sampling temperature."""
        tokens = torch.tensor([token_ids], device=self._flat.device)
        labels = torch.full_like(tokens, NO_LABEL)
        labels[:, :-1] = tokens[:, 1:]
        return Block(self._policy, tokens, labels).forward(temperature=self._temperature).tolist()

    def _group(self, request: RunPass) -> OpenGroup:
        group = self._groups.get(request.group_id)
        if group is None:
            ancestors: list[Block] = []
            if self._shares_prompts:
                start = 0
                if self._prefix is not None:
                    ancestors.append(self._prefix)
                    start = self._prefix.tokens.shape[1]
                # The last prompt token predicts each row's own first token: it belongs to the rows.
                if len(request.prompt) - 1 > start:
                    block = self._unlabelled(request.prompt[start:-1], self._prefix)
                    block.open()
                    ancestors.append(block)
            group = OpenGroup(request.prompt, ancestors, GroupParts(self._pool, request.base))
            self._groups[request.group_id] = group
        return group

    def _backward(self, rows: list[Row], ancestors: list[Block], skip: int) -> Tensor:
        """Rows [B] after `skip` shared tokens; gives trainer minus engine logprob of every sampled token."""
        longest = max(len(row.token_ids) for row in rows) - skip
        tokens = torch.zeros(len(rows), longest, dtype=torch.long)
        labels = torch.full((len(rows), longest), NO_LABEL)
        engine, weights = torch.zeros(len(rows), longest), torch.zeros(len(rows), longest)
        for i, row in enumerate(rows):
            end = len(row.token_ids) - skip
            own = torch.tensor(row.token_ids[skip:])
            sampled = torch.tensor(row.sampled[skip + 1 :], dtype=torch.bool)
            tokens[i, :end] = own
            labels[i, : end - 1] = torch.where(sampled, own[1:], NO_LABEL)
            engine[i, : end - 1] = torch.tensor(row.logprobs[skip + 1 :])
            weights[i, : end - 1] = row.weight
        at = labels != NO_LABEL
        device = self._flat.device
        block = Block(self._policy, tokens.to(device), labels.to(device), ancestors[-1] if ancestors else None)
        logprobs = block.forward(temperature=self._temperature)
        difference = logprobs.detach() - engine[at].to(device)
        weight = weights[at].to(device)
        if self._importance_cap is not None:
            weight = weight * difference.exp().clamp(max=self._importance_cap)
        block.backward(logprobs, weight)
        return difference

    def _pull(self, block: Block, adjoint: list[Tensor]) -> None:
        with self._sink.into([(self._total, 1.0)]):
            logprobs = block.forward(temperature=self._temperature)
            block.backward(logprobs, logprobs.new_zeros(0), adjoint)

    def _unlabelled(self, tokens: Sequence[int], parent: Block | None) -> Block:
        ids = torch.tensor([list(tokens)], device=self._flat.device)
        return Block(self._policy, ids, torch.full_like(ids, NO_LABEL), parent)
