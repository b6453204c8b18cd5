"""The gradient of one step, as it grows: the step's sums, the parts of open cohorts, gradients that are held.

Rows are differentiated in their passes, turns in their branches, prompts after both. Knows nothing of rewards beyond
the numbers it is given, nothing of optimizers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from thundersync.core.advantage import JoinScalars
from thundersync.learn.blocks import Block
from thundersync.learn.branch import Branch
from thundersync.learn.flat import FlatParameters, GradientSink
from thundersync.learn.forward import Forward
from thundersync.learn.frozen import FrozenModels
from thundersync.learn.messages import PassReport, RunHeld, RunPass, RunTurns, SettleHeld, Terms
from thundersync.learn.parts import CohortParts
from thundersync.learn.pool import Adjoint, PartPool, add_scaled
from thundersync.learn.prompts import OpenGroup, SharedPrompts
from thundersync.learn.terms import Batch, Piece, Weighed, Weighted, batch, cut_row


class StepGradient:
    """Everything a worker has learned since the last commit."""

    def __init__(
        self,
        policy: Any,
        flat: FlatParameters,
        terms: Terms,
        *,
        shares_prompts: bool,
        frozen: FrozenModels,
        resident_parts: int = 1_000_000,
        block_tokens: int = 1_000_000,
    ) -> None:
        self._policy, self._flat = policy, flat
        self._forward = Forward(policy, flat.device, terms, frozen)
        self._prompts = SharedPrompts(policy, flat.device, shares=shares_prompts)
        self._sink = GradientSink(flat)
        self._pool = PartPool(flat.size, flat.device, resident=resident_parts, dtype=flat.sum_dtype)
        # A sequence's whole ratio is not known block by block.
        self._may_cut = shares_prompts and terms.mismatch != "seq_mask"
        self._block_tokens = block_tokens if self._may_cut else 1_000_000
        self._set_up = (resident_parts, self._block_tokens)
        self._sums = [flat.zeros() for _ in range(terms.sums.count)]
        """In ascent direction: what the step wants more of has a positive weight."""
        self._parts: dict[str, CohortParts] = {}
        self._held: dict[str, CohortParts] = {}
        self._branches: dict[str, Branch] = {}
        self._finished = False
        self.spoilt = False
        """A pass met a value that is not finite: the step can only be discarded."""

    def limit(self, resident_parts: int | None, block_tokens: int | None) -> None:
        """Keep parts and cut rows like this from now on; None: as it was set up. Between two steps."""
        resident, block = self._set_up
        self._pool.keep(resident if resident_parts is None else resident_parts)
        self._block_tokens = block_tokens if block_tokens is not None and self._may_cut else block

    def open(self, prefix: Sequence[int]) -> None:
        """Begin a step whose prompts all start with `prefix`."""
        self.discard()
        self._prompts.open(prefix)

    def run(self, request: RunPass) -> PassReport:
        """One forward over the rows of a pass, and one backward for each destination of their terms."""
        began = time.monotonic()
        group = self._prompts.group(request.group_id, request.prompt)
        shared = [i for i, row in enumerate(request.rows) if row.token_ids[: group.shared_tokens] == group.shared]
        # A row whose history was rewritten does not begin with the prompt: it runs whole.
        batches = [*([shared] if shared else []), *([i] for i in range(len(request.rows)) if i not in shared)]
        report = PassReport(busy_s=0.0)
        for chosen in batches:
            root, skip = (group.ancestors, group.shared_tokens) if chosen is shared else ([], 0)
            rows = [request.rows[i] for i in chosen]
            if any(len(row.token_ids) - skip > self._block_tokens for row in rows):
                lines = [(cut_row(row, skip, self._block_tokens), [i]) for row, i in zip(rows, chosen, strict=True)]
            else:
                lines = [([Piece(rows=rows, start=skip)], chosen)]
            for line, whose in lines:
                report, bad = self._run_line(line, root, request, group, report)
                if bad:
                    return replace(report, busy_s=time.monotonic() - began, bad_rows=[whose[i] for i in bad])
        return replace(report, busy_s=time.monotonic() - began, parts=self._pool.lent)

    def _run_line(
        self, line: Sequence[Piece], root: Sequence[Block], request: RunPass, group: OpenGroup, report: PassReport
    ) -> tuple[PassReport, list[int]]:
        """Blocks that follow each other, the last first: a forward of each, then a backward for each destination.

        Gives the report with their measures, and the rows that were not finite, which end it.
        """
        packed = self._prompts.shares  # a model that cannot be cut has attention of its own
        laid = [batch(piece.rows, piece.start, self._flat.device, packed=packed) for piece in line]
        blocks: list[Block] = []
        for rows in laid:
            before = [*root, *blocks]
            parent = before[-1] if before else None
            blocks.append(Block(self._policy, rows.tokens, rows.labels, parent, lengths=rows.lengths))
            if len(blocks) < len(line):
                blocks[-1].open()
        owed: dict[int | None, list[Adjoint]] = {}
        while blocks:
            block, rows, piece = blocks.pop(), laid[len(blocks)], line[len(blocks)]
            values, weighed = self._forward.run(block, rows, piece.rows)
            if bad := _not_finite(values, weighed, rows):
                self.spoilt = True
                return report, bad
            destinations = _destinations(request, weighed)
            for left, (destination, weights) in zip(reversed(range(len(destinations))), destinations, strict=True):
                adjoints = owed.setdefault(destination, [[] for _ in line])
                pull = partial(block.backward, values, weights, adjoints[len(blocks)], keep_graph=left > 0)
                if destination is None:
                    self._into_parts(request, group, pull)
                else:
                    self._into(destination, pull)
                    group.owe(destination, group.take_adjoint())
                for index, earlier in enumerate(blocks):
                    adjoints[index] = add_scaled(adjoints[index], earlier.take_adjoint(), 1.0)
            report = _add_measures(report, weighed, rows)
            if self.spoilt:
                return report, list(range(len(line[0].rows)))
        return report, []

    def run_held(self, request: RunHeld) -> PassReport:
        """As `run`, into a part of its own: the rollout's reward is not known yet."""
        held = self._held[request.hold] = CohortParts(self._pool, base=0.0)
        passed = RunPass(
            group_id=request.group_id,
            cohort_id=request.hold,
            prompt=request.prompt,
            rows=request.rows,
            direct=False,
        )
        self._parts[request.hold] = held
        try:
            return self.run(passed)
        finally:
            del self._parts[request.hold]

    def settle_held(self, request: SettleHeld) -> None:
        """A held gradient goes where its reward says: under its advantage, or into its cohort's parts."""
        held = self._held.pop(request.hold)
        if request.advantage is not None:
            line = JoinScalars(base=0.0, slope=0.0, offset=request.advantage)
            adjoint = held.join(line if request.advantage else None, self._sums[0]).get(request.group_id, [])
            self._prompts.groups[request.group_id].owe(0, adjoint)
            return
        self._cohort_parts(request.cohort_id, request.base).take_over(held, request.reward)

    def run_turns(self, request: RunTurns) -> PassReport:
        """Take a rollout's next turns into its branch; all their coefficients are known."""
        began = time.monotonic()
        branch = self._branches.get(request.branch_id)
        if branch is None:
            group = self._prompts.group(request.group_id, request.prompt)
            shared = request.row.token_ids[: group.shared_tokens] == group.shared
            branch = self._branches[request.branch_id] = Branch(self._policy, group.ancestors if shared else [])
        rows = batch([request.row], branch.tokens, self._flat.device)
        block = branch.grow(rows.tokens, rows.labels)
        values, weighed = self._forward.run(block, rows, [request.row])
        if _not_finite(values, weighed, rows):
            self.spoilt = True
            return PassReport(busy_s=time.monotonic() - began, bad_rows=[0])
        branch.take(block, values, weighed.known[0], keep=request.schedule == "forward", into=self._into)
        group = self._prompts.groups[request.group_id]
        group.owe(0, group.take_adjoint())
        report = _add_measures(PassReport(busy_s=0.0), weighed, rows)
        bad = [0] if self.spoilt else []
        return replace(report, busy_s=time.monotonic() - began, parts=self._pool.lent, bad_rows=bad)

    def close_branch(self, branch_id: str, group_id: str) -> None:
        """A rollout has no more turns: one sweep from its last block to its first."""
        self._branches.pop(branch_id).sweep(self._into)
        group = self._prompts.groups[group_id]
        group.owe(0, group.take_adjoint())

    def close_cohort(self, cohort_id: str, groups: Sequence[str], join: JoinScalars | None) -> None:
        """Join the cohort's parts into the first sum, then pull its groups' prompts: the last thing done for them."""
        parts = self._parts.pop(cohort_id, None)
        joined = parts.join(join, self._sums[0]) if parts is not None else {}
        for group_id in groups:
            if group_id in self._prompts.groups:  # some of its pieces were worked here
                self._prompts.groups[group_id].owe(0, joined.get(group_id, []))
                self._prompts.close(group_id, self._into)

    def finish(self, scales: Sequence[float]) -> Tensor:
        """Pull the step's prefix and give the gradient of the minimised loss, [P] float32: minus the scaled sums.

        The sums are used up; a second call gives the same tensor again.
        """
        first, *others = self._sums
        if self._finished:
            return first
        if still_open := [*self._prompts.groups, *self._branches]:
            raise RuntimeError(f"still open at commit: {sorted(still_open)}")
        first.mul_(-scales[0])
        for other, scale in zip(others, scales[1:], strict=True):
            first.add_(other, alpha=-scale)
        self._prompts.finish([-scale for scale in scales], self._into)
        self._finished = True
        return first

    @property
    def forward(self) -> Forward:
        """Looks at tokens without learning from them."""
        return self._forward

    def discard(self) -> None:
        """Forget the step."""
        for parts in (*self._parts.values(), *self._held.values()):
            parts.join(None, self._sums[0])
        self._parts, self._held, self._branches = {}, {}, {}
        self._prompts.open([])
        for step_sum in self._sums:
            step_sum.zero_()
        self._finished = self.spoilt = False

    def _into_parts(self, request: RunPass, group: OpenGroup, work: Callable[[], None]) -> None:
        """Whatever `work` differentiates is added to the cohort's parts for the pass's reward."""
        targets = self._cohort_parts(request.cohort_id, request.base).targets(request.reward)
        with self._sink.into([(part.home, weight) for part, weight in targets]):
            work()
        if any(part.spilled for part, _ in targets):
            self._pool.settle()
        self.spoilt |= not all(self._sink.finite(part.home) for part, _ in targets)
        adjoint = group.take_adjoint()
        for part, weight in targets:
            part.add_adjoint(request.group_id, adjoint, weight)

    def _cohort_parts(self, cohort_id: str, base: float) -> CohortParts:
        return self._parts.setdefault(cohort_id, CohortParts(self._pool, base))

    def _into(self, sum_index: int, work: Callable[[], None]) -> None:
        """Whatever `work` differentiates is added to one of the step's sums."""
        with self._sink.into([(self._sums[sum_index], 1.0)]):
            work()
        self.spoilt |= not self._sink.finite(self._sums[sum_index])


def _not_finite(values: Sequence[Tensor], weighed: Weighed, rows: Batch) -> list[int]:
    """Rows of which a value or a weight is not finite, found before their backward."""
    weights = [w for each in (weighed.policy, *weighed.known.values()) for w in each if w is not None]
    wrong = torch.zeros_like(rows.row, dtype=torch.bool)
    for tensor in (*values, *weights):
        wrong |= ~torch.isfinite(tensor.detach())
    return sorted(set(rows.row[wrong].tolist()))


def _destinations(request: RunPass, weighed: Weighed) -> list[tuple[int | None, Weighted]]:
    """Each sum, and the cohort's parts (None), with what goes there; a known advantage joins the first sum's terms."""
    known = dict(weighed.known)
    if request.direct:
        known[0] = [
            _plus(a, b) for a, b in zip(known.get(0, [None] * len(weighed.policy)), weighed.policy, strict=True)
        ]
    found: list[tuple[int | None, Weighted]] = list(known.items())
    if not request.direct and any(row.policy for row in request.rows):
        found.append((None, weighed.policy))
    return found


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _add_measures(report: PassReport, weighed: Weighed, rows: Batch) -> PassReport:
    mismatch = weighed.ratio_log.abs()
    return replace(
        report,
        tokens=report.tokens + rows.real_tokens,
        sampled_tokens=report.sampled_tokens + mismatch.numel(),
        mismatch_sum=report.mismatch_sum + float(mismatch.sum()),
        mismatch_max=max(report.mismatch_max, float(mismatch.max()) if mismatch.numel() else 0.0),
        corrected=report.corrected + weighed.corrected,
        kl_sum=report.kl_sum + weighed.kl,
        entropy_sum=report.entropy_sum + weighed.entropy,
        divergence_sum=report.divergence_sum + weighed.divergence,
    )
