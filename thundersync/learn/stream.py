"""Feeds one step's ready pieces to the trainer workers until the step owes nothing: gradient streaming itself.

Rollouts land here the moment their reward is known; each worker is given the best pass as soon as it is free. What to
work and in which order is decided by `core`; here it is only carried out and reported.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from thundersync.core import ready_queue
from thundersync.core.advantage import is_flat
from thundersync.core.holds import Settlement, settlements
from thundersync.core.ledger import Closing, Ledger
from thundersync.core.types import Failed, FinalContent, GroupId, Rollout, RolloutId, StreamMode
from thundersync.errors import StaleRollout
from thundersync.learn import messages as m
from thundersync.learn.link import WorkerLink
from thundersync.learn.measures import PassSums
from thundersync.learn.news import News
from thundersync.learn.rows import piece_rows
from thundersync.monitor.events import AnyEvent, GroupClosed, PassDone, PassStarted, RolloutSkipped


class GradientStream:
    """One step's rollouts, from reward to the last backward."""

    def __init__(
        self,
        ledger: Ledger,
        workers: Sequence[WorkerLink],
        *,
        policy_version: int,
        prompts: Mapping[GroupId, list[int]],
        prefix: list[int],
        shares_prompts: bool,
        mode: StreamMode = "stream",
        max_tokens: int,
        room: ready_queue.PartRoom,
        stall_timeout_s: float,
        emit: Callable[[AnyEvent], None],
        kl_in_reward: float = 0.0,
        missing: Callable[[], str] = lambda: "",
    ) -> None:
        """`room`: for parts, in each worker. `kl_in_reward` takes that much of a rollout's k1 off its reward
        before it lands. `missing` says who is waited for outside the run."""
        self.ledger = ledger
        self._workers = workers
        self._policy_version = policy_version
        self._prompts = prompts
        self._prefix = prefix
        self._shares_prompts = shares_prompts
        self._mode = mode
        self._max_tokens = max_tokens
        self._room = room
        self._stall_timeout_s = stall_timeout_s
        self._emit = emit
        self._kl_in_reward = kl_in_reward
        self._rollouts: dict[RolloutId, Rollout] = {}
        self._landed_s: dict[RolloutId, float] = {}
        self._contents: dict[RolloutId, FinalContent] = {}
        self._settlements: dict[int, deque[Settlement]] = {worker.index: deque() for worker in workers}
        self._closings: dict[int, deque[Closing]] = {worker.index: deque() for worker in workers}
        self._news = News(stall_timeout_s, missing)
        self._pass_id = 0
        self.sums = PassSums()
        self.bad: list[RolloutId] = []
        """Pieces whose pass had a value that is not finite: the step cannot be committed."""

    @property
    def rollouts(self) -> list[Rollout]:
        """Landed so far, in membership order."""
        return [self._rollouts[r] for g in self.ledger.groups.values() for r in g.members if r in self._rollouts]

    @property
    def landed(self) -> list[Rollout]:
        """The same in the order they landed."""
        return list(self._rollouts.values())

    @property
    def queued(self) -> int:
        return ready_queue.queued(self.ledger)

    @property
    def parts_in_use(self) -> int:
        return sum(ready_queue.parts_in_use(self.ledger, worker.index) for worker in self._workers)

    @property
    def counted(self) -> list[list[float]]:
        """Rewards of the groups that count, in membership order."""
        return [group.rewards for group in self.ledger.counted_groups()]

    @property
    def empty(self) -> bool:
        """Nothing of the step has a gradient."""
        return self.ledger.empty

    def scales(self) -> list[float]:
        """The factors of the step's sums, at commit."""
        return self.ledger.objective.scales(self.ledger.tally())

    def heartbeat(self) -> None:
        """Something moved elsewhere (a turn, a tool): the step is not stalled."""
        self._news.heartbeat()

    def content(self, content: FinalContent) -> None:
        """A rollout's tokens are final: its backward may begin while its checker runs. Raises StaleRollout."""
        if content.policy_version != self._policy_version:
            raise StaleRollout(content.rollout_id, made_by=content.policy_version, bound_to=self._policy_version)
        self._contents[content.rollout_id] = content
        self.ledger.content(content.rollout_id, rows=len(content.sequences), longest=self._longest(content))
        self._news.tell_soon()

    def attempt_ended(self, rollout: Rollout) -> None:
        """An attempt failed and will be tried again: what was held of it is thrown away."""
        self.ledger.withdrawn(rollout.rollout_id)
        self._news.tell_soon()

    async def land(self, rollout: Rollout) -> None:
        """A rollout is finished: its piece is ready, or its group goes on without it. Raises StaleRollout."""
        for version in {rollout.policy_version, *(turn.policy_version for turn in rollout.turns)}:
            if version != self._policy_version:
                raise StaleRollout(rollout.rollout_id, made_by=version, bound_to=self._policy_version)
        self._rollouts[rollout.rollout_id] = rollout
        if isinstance(rollout.outcome, Failed):
            self.ledger.failed(rollout.rollout_id)
        else:
            reward = rollout.outcome.reward
            if self._kl_in_reward:
                reward -= self._kl_in_reward * await self._k1(rollout)
            if not math.isfinite(reward):
                self.bad.append(rollout.rollout_id)
                self.ledger.failed(rollout.rollout_id)
                await self._news.tell()
                return
            self.ledger.scored(
                rollout.rollout_id,
                reward,
                sampled_tokens=rollout.sampled_tokens,
                rows=len(rollout.sequences),
                longest=self._longest(rollout),
            )
            self._landed_s[rollout.rollout_id] = time.monotonic()
        await self._news.tell()

    async def run(self) -> None:
        """Work until the step owes nothing. Raises StepStalled, WorkerLost."""
        async with asyncio.TaskGroup() as feeders:
            for worker in self._workers:
                feeders.create_task(self._feed(worker), name=f"feed-worker-{worker.index}")

    async def _feed(self, worker: WorkerLink) -> None:
        await worker.call(m.OpenStep(prefix=self._prefix), m.Done, limit_s=self._stall_timeout_s)
        settled, closings = self._settlements[worker.index], self._closings[worker.index]
        while True:
            await self._take_decisions()
            chosen = ready_queue.next_pass(
                self.ledger,
                max_tokens=self._max_tokens,
                room=self._room,
                worker=worker.index,
                workers=len(self._workers),
                mode=self._mode,
            )
            if settled:
                await self._settle(worker, settled.popleft())
            elif closings:
                await self._close(worker, closings.popleft())
            elif chosen is not None and chosen.held:
                await self._hold(worker, chosen)
            elif chosen is not None:
                await self._work(worker, chosen)
            elif self.ledger.settled:
                return
            else:
                await self._news.wait(self.ledger.owes)

    async def _work(self, worker: WorkerLink, chosen: ready_queue.Pass) -> None:
        ids, direct = chosen.rollout_ids, chosen.advantages is not None
        self.ledger.begin(ids, worker=worker.index, in_part=not direct)
        now_s = time.monotonic()
        self.sums.queue_wait_s += sum(now_s - self._landed_s[i] for i in ids)
        self.sums.pieces += len(ids)
        rows: list[m.Row] = []
        owner: list[RolloutId] = []
        for rollout_id, advantage in zip(ids, chosen.advantages or [1.0] * len(ids), strict=True):
            rollout = self._rollouts[rollout_id]
            own = piece_rows(rollout, self.ledger.objective.weights(rollout.sampled_tokens), advantage)
            rows += own
            owner += [rollout_id] * len(own)
        request = m.RunPass(
            group_id=chosen.group_id,
            cohort_id=chosen.cohort_id,
            prompt=self._prompts[chosen.group_id],
            rows=rows,
            direct=direct,
            reward=chosen.reward,
            base=chosen.base,
        )
        await self._pass(worker, request, ids, owner)
        self.ledger.worked(ids)
        await self._news.tell()

    async def _hold(self, worker: WorkerLink, chosen: ready_queue.Pass) -> None:
        """Work a rollout whose checker still runs; its gradient waits in the worker by itself."""
        (rollout_id,) = chosen.rollout_ids
        content = self._contents[rollout_id]
        hold = self.ledger.hold(rollout_id, name=f"{rollout_id}/{content.attempt}", worker=worker.index)
        rows = piece_rows(content, self.ledger.objective.weights(content.sampled_tokens), 1.0)
        prompt = self._prompts[chosen.group_id]
        request = m.RunHeld(hold=hold.name, group_id=chosen.group_id, prompt=prompt, rows=rows)
        await self._pass(worker, request, [rollout_id], [rollout_id] * len(rows))
        hold.done = True
        await self._news.tell()

    async def _pass(
        self, worker: WorkerLink, request: m.RunPass | m.RunHeld, ids: list[RolloutId], owner: list[RolloutId]
    ) -> None:
        """Let the worker run it, and tell what was measured. `owner` names the rollout of each row."""
        self._pass_id += 1
        pass_id = self._pass_id
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
        self.sums.add(report)
        self.bad += sorted({owner[i] for i in report.bad_rows})
        self._emit(
            PassDone(at_s=time.time(), worker=worker.index, pass_id=pass_id, rollout_ids=ids, busy_s=report.busy_s)
        )

    async def _take_decisions(self) -> None:
        """Held gradients whose reward is known, and cohorts that became whole: queued for the workers they are in."""
        settled = settlements(self.ledger)
        closed = self.ledger.closings()
        # All are queued before anything is awaited: a feeder that looks meanwhile finds each where it belongs.
        for settlement in settled:
            self._settlements[settlement.worker].append(settlement)
        for closing in closed:
            self._queue_closing(closing)
        if settled or closed:
            await self._news.tell()

    def _queue_closing(self, closing: Closing) -> None:
        for rollout_id in closing.skipped:
            self._emit(RolloutSkipped(at_s=time.time(), rollout_id=rollout_id))
        for index in closing.workers:
            self._closings[index].append(closing)
        for group_id in closing.groups:
            rewards = self.ledger.groups[group_id].rewards
            self._emit(
                GroupClosed(
                    at_s=time.time(),
                    group_id=group_id,
                    rewards=rewards,
                    flat=is_flat(rewards),
                    dropped=group_id in closing.dropped,
                )
            )

    async def _settle(self, worker: WorkerLink, settlement: Settlement) -> None:
        request = m.SettleHeld(
            hold=settlement.hold,
            group_id=settlement.group_id,
            cohort_id=settlement.cohort_id,
            advantage=settlement.advantage,
            reward=settlement.reward,
            base=settlement.base,
        )
        self.sums.pass_busy_s += (await worker.call(request, m.Done, limit_s=self._stall_timeout_s)).busy_s

    async def _close(self, worker: WorkerLink, closing: Closing) -> None:
        request = m.CloseCohort(cohort_id=closing.cohort_id, groups=closing.groups, join=closing.join)
        self.sums.pass_busy_s += (await worker.call(request, m.Done, limit_s=self._stall_timeout_s)).busy_s
        await self._news.tell()

    def _longest(self, rollout: Rollout | FinalContent) -> int:
        prompt = self._prompts[rollout.group_id] if self._shares_prompts else []
        return max(_own_tokens(sequence.token_ids, prompt) for sequence in rollout.sequences)

    async def _k1(self, rollout: Rollout) -> float:
        worker = min(self._workers, key=lambda each: each.waiting)
        request = m.MeasureKl(rows=piece_rows(rollout, self.ledger.objective.weights(rollout.sampled_tokens), 1.0))
        scores = await worker.call(request, m.Scores, limit_s=self._stall_timeout_s)
        return sum(scores.logprobs)


def _own_tokens(token_ids: Sequence[int], prompt: Sequence[int]) -> int:
    """Tokens of a row that its group's prompt block does not cover; the prompt's last token is the row's own."""
    shared = len(prompt) - 1
    return len(token_ids) - shared if shared > 0 and token_ids[:shared] == prompt[:shared] else len(token_ids)
