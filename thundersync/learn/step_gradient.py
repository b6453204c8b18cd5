"""The gradient of one step, as it grows: the step's sums, the parts of open cohorts, and the shared prompts.

step prefix (root of all) -> group prompt -> rows of a pass, or turns of a rollout. Children are pulled first: rows in
their passes, a group's prompt at its close, the step's prefix at commit; each once. Knows nothing of rewards beyond
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
from thundersync.learn.blocks import NO_LABEL, Block
from thundersync.learn.branch import Branch
from thundersync.learn.flat import FlatParameters, GradientSink
from thundersync.learn.frozen import FrozenModels
from thundersync.learn.head import Head
from thundersync.learn.messages import PassReport, Row, RunHeld, RunPass, RunTurns, SettleHeld, Terms
from thundersync.learn.parts import Adjoint, CohortParts, PartPool, add_scaled
from thundersync.learn.terms import Batch, Piece, Weighed, Weighted, batch, cut_row, weigh


class StepSum:
    """A sum of the step [P], in ascent direction, and what its passes owe the step's prefix."""

    def __init__(self, total: Tensor) -> None:
        self.total = total
        self.prefix_adjoint: Adjoint = []

    def reset(self) -> None:
        self.total.zero_()
        self.prefix_adjoint = []


class OpenGroup:
    """A group's prompt blocks, and what is owed to them under weights that are known, per step sum."""

    def __init__(self, prompt: list[int], ancestors: list[Block]) -> None:
        self.ancestors = ancestors
        """Blocks whose K/V the rows attend to: the step's prefix, the rest of the prompt; either may be missing."""
        self.owed: dict[int, Adjoint] = {}
        self.shared_tokens = sum(block.tokens.shape[1] for block in ancestors)
        self.shared = prompt[: self.shared_tokens]

    def take_adjoint(self) -> Adjoint:
        """What the last backward left on the prompt's keys and values, the step's prefix first; empty for nothing."""
        if not any(proxy.grad is not None for block in self.ancestors for proxy in block.leaves()):
            return []
        return [tensor for block in self.ancestors for tensor in block.take_adjoint()]


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
        self._policy, self._flat, self._terms = policy, flat, terms
        self._frozen = frozen
        self._sink = GradientSink(flat)
        self._pool = PartPool(flat.size, flat.device, resident=resident_parts, dtype=flat.sum_dtype)
        self._shares_prompts = shares_prompts
        # A sequence's whole ratio is not known block by block.
        self._may_cut = shares_prompts and terms.mismatch != "seq_mask"
        self._block_tokens = block_tokens if self._may_cut else 1_000_000
        self._set_up = (resident_parts, self._block_tokens)
        self._sums = [StepSum(flat.zeros()) for _ in range(terms.sums.count)]
        self._prefix: Block | None = None
        self._groups: dict[str, OpenGroup] = {}
        self._parts: dict[str, CohortParts] = {}
        self._held: dict[str, CohortParts] = {}
        self._branches: dict[str, Branch] = {}
        self._finished = False

    def limit(self, resident_parts: int | None, block_tokens: int | None) -> None:
        """Keep parts and cut rows like this from now on; None: as it was set up. Between two steps."""
        resident, block = self._set_up
        self._pool.keep(resident if resident_parts is None else resident_parts)
        self._block_tokens = block_tokens if block_tokens is not None and self._may_cut else block

    def open(self, prefix: Sequence[int]) -> None:
        """Begin a step whose prompts all start with `prefix`."""
        self.discard()
        if prefix and self._shares_prompts:
            self._prefix = self._unlabelled(prefix, None)
            self._prefix.open()

    def run(self, request: RunPass) -> PassReport:
        """One forward over the rows of a pass, and one backward for each destination of their terms."""
        began = time.monotonic()
        group = self._group(request.group_id, request.prompt)
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
        laid = [batch(piece.rows, piece.start, self._flat.device) for piece in line]
        blocks: list[Block] = []
        for rows in laid:
            before = [*root, *blocks]
            blocks.append(Block(self._policy, rows.tokens, rows.labels, before[-1] if before else None))
            if len(blocks) < len(line):
                blocks[-1].open()
        owed: dict[int | None, list[Adjoint]] = {}
        while blocks:
            block, rows, piece = blocks.pop(), laid[len(blocks)], line[len(blocks)]
            values, weighed = self._forward(block, rows, piece.rows)
            if bad := _not_finite(values, weighed, rows):
                return report, bad
            destinations = _destinations(request, weighed)
            for left, (destination, weights) in zip(reversed(range(len(destinations))), destinations, strict=True):
                adjoints = owed.setdefault(destination, [[] for _ in line])
                pull = partial(block.backward, values, weights, adjoints[len(blocks)], keep_graph=left > 0)
                if destination is None:
                    self._into_parts(request, group, pull)
                else:
                    self._into(destination, pull)
                    self._owe(group, destination)
                for index, earlier in enumerate(blocks):
                    adjoints[index] = add_scaled(adjoints[index], earlier.take_adjoint(), 1.0)
            report = _add_measures(report, weighed, rows)
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
            adjoint = held.join(line if request.advantage else None, self._sums[0].total).get(request.group_id, [])
            group = self._groups[request.group_id]
            group.owed[0] = add_scaled(group.owed.get(0, []), adjoint, 1.0)
            return
        self._cohort_parts(request.cohort_id, request.base).take_over(held, request.reward)

    def run_turns(self, request: RunTurns) -> PassReport:
        """Take a rollout's next turns into its branch; all their coefficients are known."""
        began = time.monotonic()
        branch = self._branches.get(request.branch_id)
        if branch is None:
            group = self._group(request.group_id, request.prompt)
            shared = request.row.token_ids[: group.shared_tokens] == group.shared
            branch = self._branches[request.branch_id] = Branch(self._policy, group.ancestors if shared else [])
        rows = batch([request.row], branch.tokens, self._flat.device)
        block = branch.grow(rows.tokens, rows.labels)
        values, weighed = self._forward(block, rows, [request.row])
        if _not_finite(values, weighed, rows):
            return PassReport(busy_s=time.monotonic() - began, bad_rows=[0])
        branch.take(block, values, weighed.known[0], keep=request.schedule == "forward", into=self._into)
        self._owe(self._groups[request.group_id], 0)
        return replace(
            _add_measures(PassReport(busy_s=0.0), weighed, rows), busy_s=time.monotonic() - began, parts=self._pool.lent
        )

    def close_branch(self, branch_id: str, group_id: str) -> None:
        """A rollout has no more turns: one sweep from its last block to its first."""
        self._branches.pop(branch_id).sweep(self._into)
        self._owe(self._groups[group_id], 0)

    def close_cohort(self, cohort_id: str, groups: Sequence[str], join: JoinScalars | None) -> None:
        """Join the cohort's parts into the first sum, then pull its groups' prompts: the last thing done for them."""
        parts = self._parts.pop(cohort_id, None)
        joined = parts.join(join, self._sums[0].total) if parts is not None else {}
        for group_id in groups:
            group = self._groups.pop(group_id, None)
            if group is None:
                continue  # none of its pieces was worked here
            group.owed[0] = add_scaled(group.owed.get(0, []), joined.get(group_id, []), 1.0)
            for index, adjoint in group.owed.items():
                if adjoint:
                    self._pull_prompt(group, adjoint, index)

    def finish(self, scales: Sequence[float]) -> Tensor:
        """Pull the step's prefix and give the gradient of the minimised loss, [P] float32: minus the scaled sums.

        The sums are used up; a second call gives the same tensor again.
        """
        first = self._sums[0]
        if self._finished:
            return first.total
        if self._groups or self._branches:
            raise RuntimeError(f"still open at commit: {sorted([*self._groups, *self._branches])}")
        adjoint: Adjoint = []
        for step_sum, scale in zip(self._sums, scales, strict=True):
            adjoint = add_scaled(adjoint, step_sum.prefix_adjoint, -scale)
        first.total.mul_(-scales[0])
        for step_sum, scale in zip(self._sums[1:], scales[1:], strict=True):
            first.total.add_(step_sum.total, alpha=-scale)
        if self._prefix is not None and adjoint:
            self._pull(self._prefix, adjoint, 0)
        self._finished = True
        return first.total

    def discard(self) -> None:
        """Forget the step."""
        for parts in (*self._parts.values(), *self._held.values()):
            parts.join(None, self._sums[0].total)
        self._groups, self._parts, self._held, self._branches, self._prefix = {}, {}, {}, {}, None
        for step_sum in self._sums:
            step_sum.reset()
        self._finished = False

    @torch.no_grad()
    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs [T - 1] under the current weights and the sampling temperature."""
        tokens = torch.tensor([token_ids], device=self._flat.device)
        labels = torch.full_like(tokens, NO_LABEL)
        labels[:, :-1] = tokens[:, 1:]
        values: Tensor = Block(self._policy, tokens, labels).forward(
            Head(self._policy, temperature=self._terms.temperature)
        )[0]
        return values.tolist()

    @torch.no_grad()
    def measure_kl(self, rows: Sequence[Row]) -> list[float]:
        """Policy minus reference logprob, summed over the sampled tokens of each row."""
        sums = []
        for row in rows:
            laid = batch([row], 0, self._flat.device)
            head = Head(self._policy, temperature=self._terms.temperature)
            own = Block(self._policy, laid.tokens, laid.labels).forward(head)[0]
            sums.append(float((own - self._frozen.reference_logprobs([row], self._terms.temperature)).sum()))
        return sums

    def _forward(self, block: Block, rows: Batch, whole: Sequence[Row]) -> tuple[list[Tensor], Weighed]:
        """A block's values and what they weigh; `whole` are its rows from their first token."""
        temperature = self._terms.temperature
        reference = self._frozen.reference_logprobs(whole, temperature) if self._terms.kl in ("k2", "k3") else None
        divergence, targets = self._frozen.divergence(self._terms, rows, whole)
        head = Head(
            self._policy,
            temperature=self._terms.temperature,
            entropy=self._terms.entropy,
            divergence=divergence,
            targets=targets,
        )
        values = block.forward(head)
        return values, weigh(self._terms, rows, values, reference)

    def _into_parts(self, request: RunPass, group: OpenGroup, work: Callable[[], None]) -> None:
        """Whatever `work` differentiates is added to the cohort's parts for the pass's reward."""
        targets = self._cohort_parts(request.cohort_id, request.base).targets(request.reward)
        with self._sink.into([(part.home, weight) for part, weight in targets]):
            work()
        adjoint = group.take_adjoint()
        for part, weight in targets:
            part.add_adjoint(request.group_id, adjoint, weight)

    def _cohort_parts(self, cohort_id: str, base: float) -> CohortParts:
        return self._parts.setdefault(cohort_id, CohortParts(self._pool, base))

    def _owe(self, group: OpenGroup, sum_index: int) -> None:
        """What the last backward left on the group's prompt is owed under a weight that is known."""
        group.owed[sum_index] = add_scaled(group.owed.get(sum_index, []), group.take_adjoint(), 1.0)

    def _into(self, sum_index: int, work: Callable[[], None]) -> None:
        """Whatever `work` differentiates is added to one of the step's sums."""
        with self._sink.into([(self._sums[sum_index].total, 1.0)]):
            work()

    def _group(self, group_id: str, prompt: list[int]) -> OpenGroup:
        group = self._groups.get(group_id)
        if group is None:
            ancestors: list[Block] = []
            if self._shares_prompts:
                start = 0
                if self._prefix is not None:
                    ancestors.append(self._prefix)
                    start = self._prefix.tokens.shape[1]
                # The last prompt token predicts each row's own first token: it belongs to the rows.
                if len(prompt) - 1 > start:
                    block = self._unlabelled(prompt[start:-1], self._prefix)
                    block.open()
                    ancestors.append(block)
            group = self._groups[group_id] = OpenGroup(prompt, ancestors)
        return group

    def _pull_prompt(self, group: OpenGroup, adjoint: Adjoint, sum_index: int) -> None:
        step_sum = self._sums[sum_index]
        split = 2 * len(self._prefix.proxies) if self._prefix is not None else 0
        step_sum.prefix_adjoint = add_scaled(step_sum.prefix_adjoint, adjoint[:split], 1.0)
        own = [block for block in group.ancestors if block is not self._prefix]
        for block in own:
            self._pull(block, adjoint[split:], sum_index)
        if own and self._prefix is not None:
            step_sum.prefix_adjoint = add_scaled(step_sum.prefix_adjoint, self._prefix.take_adjoint(), 1.0)

    def _pull(self, block: Block, adjoint: Adjoint, sum_index: int) -> None:
        def work() -> None:
            block.forward()
            block.backward([], [], adjoint)

        self._into(sum_index, work)

    def _unlabelled(self, tokens: Sequence[int], parent: Block | None) -> Block:
        ids = torch.tensor([list(tokens)], device=self._flat.device)
        return Block(self._policy, ids, torch.full_like(ids, NO_LABEL), parent)


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
