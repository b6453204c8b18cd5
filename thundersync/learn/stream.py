"""Feeds one step's ready pieces to the trainer workers until the step owes nothing: gradient streaming itself.

Rollouts land here the moment their reward is known; each worker is given the best pass as soon as it is free. What to
work and in which order is decided by `core`; here it is only carried out and reported.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from thundersync.core import ready_queue
from thundersync.core.ledger import GroupClosing, Ledger
from thundersync.core.types import Failed, GroupId, Rollout, RolloutId
from thundersync.errors import StaleRollout, StepStalled
from thundersync.learn import messages as m
from thundersync.learn.link import WorkerLink
from thundersync.monitor.events import AnyEvent, GroupClosed, PassDone, PassStarted, RolloutSkipped

LossAggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]


class StreamSums(Struct, kw_only=True):
    """What the step's passes measured, added up."""

    passes: int = 0
    pass_busy_s: float = 0.0
    tokens: int = 0
    sampled_tokens: int = 0
    mismatch_sum: float = 0.0
    mismatch_max: float = 0.0
    importance_capped: int = 0
    queue_wait_s: float = 0.0
    """Sum over pieces, from reward to the start of their pass."""
    pieces: int = 0
    parts_peak: int = 0


class GradientStream:
    """One step's pieces, from reward to the last backward."""

    def __init__(
        self,
        ledger: Ledger,
        workers: Sequence[WorkerLink],
        *,
        policy_version: int,
        prompts: Mapping[GroupId, list[int]],
        prefix: list[int],
        shares_prompts: bool,
        loss_agg: LossAggregation,
        lazy: bool,
        max_tokens: int,
        max_parts: int,
        stall_timeout_s: float,
        emit: Callable[[AnyEvent], None],
    ) -> None:
        self._ledger = ledger
        self._workers = workers
        self._policy_version = policy_version
        self._prompts = prompts
        self._prefix = prefix
        self._shares_prompts = shares_prompts
        self._loss_agg = loss_agg
        self._lazy = lazy
        self._max_tokens = max_tokens
        self._max_parts = max_parts
        self._stall_timeout_s = stall_timeout_s
        self._emit = emit
        self._rollouts: dict[RolloutId, Rollout] = {}
        self._landed_s: dict[RolloutId, float] = {}
        self._news = asyncio.Condition()
        self._pass_id = 0
        self._last_news_s = time.monotonic()
        self.sums = StreamSums()

    @property
    def rollouts(self) -> list[Rollout]:
        """Landed so far, in membership order."""
        return [self._rollouts[r] for g in self._ledger.groups.values() for r in g.members if r in self._rollouts]

    @property
    def queued(self) -> int:
        return ready_queue.queued(self._ledger)

    @property
    def parts_in_use(self) -> int:
        return ready_queue.parts_in_use(self._ledger)

    async def land(self, rollout: Rollout) -> None:
        """A rollout is finished: its piece is ready, or its group goes on without it. Raises StaleRollout."""
        for version in {rollout.policy_version, *(turn.policy_version for turn in rollout.turns)}:
            if version != self._policy_version:
                raise StaleRollout(rollout.rollout_id, made_by=version, bound_to=self._policy_version)
        self._rollouts[rollout.rollout_id] = rollout
        if isinstance(rollout.outcome, Failed):
            self._ledger.failed(rollout.rollout_id)
        else:
            prompt = self._prompts[rollout.group_id] if self._shares_prompts else []
            self._ledger.scored(
                rollout.rollout_id,
                rollout.outcome.reward,
                sampled_tokens=rollout.sampled_tokens,
                rows=len(rollout.sequences),
                longest=max(_own_tokens(sequence.token_ids, prompt) for sequence in rollout.sequences),
            )
            self._landed_s[rollout.rollout_id] = time.monotonic()
        await self._tell()

    def heartbeat(self) -> None:
        """Something moved elsewhere (a turn, a tool): the step is not stalled."""
        self._last_news_s = time.monotonic()

    async def run(self) -> None:
        """Work until the step owes nothing. Raises StepStalled, WorkerLost."""
        async with asyncio.TaskGroup() as feeders:
            for worker in self._workers:
                feeders.create_task(self._feed(worker), name=f"feed-worker-{worker.index}")

    async def _feed(self, worker: WorkerLink) -> None:
        await worker.call(m.OpenStep(prefix=self._prefix), m.Done, limit_s=self._stall_timeout_s)
        while not self._ledger.settled:
            await self._close_groups()
            chosen = ready_queue.next_pass(
                self._ledger,
                max_tokens=self._max_tokens,
                parts_left=self._max_parts - self.parts_in_use,
                known_only=self._lazy,
            )
            if chosen is not None:
                await self._work(worker, chosen)
            elif not self._ledger.settled:
                await self._wait()

    async def _work(self, worker: WorkerLink, chosen: ready_queue.Pass) -> None:
        ids = chosen.rollout_ids
        self._ledger.begin(ids, in_part=chosen.weights is None)
        self._pass_id += 1
        pass_id, now_s = self._pass_id, time.monotonic()
        self.sums.queue_wait_s += sum(now_s - self._landed_s[i] for i in ids)
        self.sums.pieces += len(ids)
        request = m.RunPass(
            group_id=chosen.group_id,
            prompt=self._prompts[chosen.group_id],
            rows=[row for i, weight in zip(ids, chosen.weights or [1.0] * len(ids), strict=True)
                  for row in self._rows(self._rollouts[i], weight)],
            direct=chosen.weights is not None,
            reward=chosen.reward,
            base=chosen.base,
        )  # fmt: skip
        self._emit(
            PassStarted(
                at_s=time.time(),
                worker=worker.index,
                pass_id=pass_id,
                rollout_ids=ids,
                tokens=sum(len(row.token_ids) for row in request.rows),
                queued=self.queued,
            )
        )
        report = await worker.call(request, m.PassReport, limit_s=self._stall_timeout_s)
        self._ledger.worked(ids)
        self._add(report)
        self._emit(
            PassDone(at_s=time.time(), worker=worker.index, pass_id=pass_id, rollout_ids=ids, busy_s=report.busy_s)
        )
        await self._tell()

    async def _close_groups(self) -> None:
        for closing in self._ledger.closings():
            for rollout_id in closing.skipped:
                self._emit(RolloutSkipped(at_s=time.time(), rollout_id=rollout_id))
            async with asyncio.TaskGroup() as closes:
                for worker in self._workers:
                    closes.create_task(self._close(worker, closing))
            self._emit(
                GroupClosed(
                    at_s=time.time(),
                    group_id=closing.group_id,
                    rewards=closing.rewards,
                    flat=closing.flat,
                    dropped=closing.dropped,
                )
            )
            await self._tell()

    async def _close(self, worker: WorkerLink, closing: GroupClosing) -> None:
        request = m.CloseGroup(group_id=closing.group_id, join=closing.join)
        self.sums.pass_busy_s += (await worker.call(request, m.Done, limit_s=self._stall_timeout_s)).busy_s

    def _rows(self, rollout: Rollout, weight: float) -> list[m.Row]:
        """The piece's rows; `seq_mean_token_mean` divides by the rollout's sampled tokens, the others do not."""
        scale = weight
        if self._loss_agg == "seq_mean_token_mean":
            scale = weight / max(1, rollout.sampled_tokens)
        return [
            m.Row(token_ids=s.token_ids, sampled=s.sampled, logprobs=s.logprobs, weight=scale)
            for s in rollout.sequences
        ]

    async def _wait(self) -> None:
        """Until something lands or a pass ends; the watchdog names what is missing."""
        async with self._news:
            try:
                async with asyncio.timeout(min(5.0, self._stall_timeout_s)):
                    await self._news.wait()
            except TimeoutError:
                silent_s = time.monotonic() - self._last_news_s
                if silent_s > self._stall_timeout_s:
                    raise StepStalled(
                        f"nothing moved for {silent_s:.0f} s; the step still owes: {self._ledger.owes()}",
                        remedy="See the logs in the run folder; raise stall_timeout_s if this is just slow work.",
                    ) from None

    async def _tell(self) -> None:
        self.heartbeat()
        async with self._news:
            self._news.notify_all()

    def _add(self, report: m.PassReport) -> None:
        sums = self.sums
        sums.passes += 1
        sums.pass_busy_s += report.busy_s
        sums.tokens += report.tokens
        sums.sampled_tokens += report.sampled_tokens
        sums.mismatch_sum += report.mismatch_sum
        sums.mismatch_max = max(sums.mismatch_max, report.mismatch_max)
        sums.importance_capped += report.importance_capped
        sums.parts_peak = max(sums.parts_peak, report.parts)


def _own_tokens(token_ids: Sequence[int], prompt: Sequence[int]) -> int:
    """Tokens of a row that its group's prompt block does not cover; the prompt's last token is the row's own."""
    shared = len(prompt) - 1
    return len(token_ids) - shared if shared > 0 and token_ids[:shared] == prompt[:shared] else len(token_ids)
