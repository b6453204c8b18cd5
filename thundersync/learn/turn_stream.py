"""Feeds a distillation step's turns to the trainer workers: each is scored by its teacher while its tool call runs,
and its backward may start at that score.

The counterpart of `stream` where no reward is learned from. What to work and in which order is decided by `core`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from msgspec import Struct

from thundersync.core.objective import SeparableObjective, Tally
from thundersync.core.turn_ledger import TurnKey, TurnLedger, TurnWork
from thundersync.core.turn_queue import next_work
from thundersync.core.types import GroupId, Rollout, RolloutId, SampledTurn, Scored, StreamMode
from thundersync.errors import StaleRollout
from thundersync.generate.base import TokenScores
from thundersync.learn import messages as m
from thundersync.learn.link import WorkerLink
from thundersync.learn.measures import PassSums
from thundersync.learn.news import News
from thundersync.monitor.events import AnyEvent, GroupClosed, PassDone, PassStarted, TurnScored


class Scorer(Protocol):
    """Asks the right teacher about a turn's tokens; None where the teacher is held in the trainer workers."""

    async def __call__(self, turn: SampledTurn) -> TokenScores | None: ...


class ScoredTurn(Struct, frozen=True, kw_only=True):
    """A turn and what its teacher says of it."""

    sampled: SampledTurn
    scores: TokenScores | None


class TurnStream:
    """One distillation step, from sampled turns to the last sweep."""

    def __init__(
        self,
        ledger: TurnLedger,
        workers: Sequence[WorkerLink],
        *,
        objective: SeparableObjective,
        score: Scorer,
        policy_version: int,
        prompts: Mapping[GroupId, list[int]],
        prefix: list[int],
        schedule: Literal["deferred", "forward", "immediate"],
        mode: StreamMode = "stream",
        max_tokens: int,
        longest: int,
        stall_timeout_s: float,
        emit: Callable[[AnyEvent], None],
        missing: Callable[[], str] = lambda: "",
    ) -> None:
        """`missing` says who is waited for outside the run."""
        self.ledger = ledger
        self._workers = workers
        self._objective = objective
        self._score = score
        self._policy_version = policy_version
        self._prompts = prompts
        self._prefix = prefix
        self._schedule = schedule
        self._mode = mode
        self._max_tokens, self._longest = max_tokens, longest
        self._stall_timeout_s = stall_timeout_s
        self._emit = emit
        self._news = News(stall_timeout_s, missing)
        self._scoring: asyncio.TaskGroup | None = None
        self._pass_id = 0
        self._landed_s: dict[TurnKey, float] = {}
        self._rollouts: dict[RolloutId, Rollout] = {}
        self.turns: dict[TurnKey, ScoredTurn] = {}
        self.sums = PassSums()
        self.score_s = 0.0
        """Sum over turns, from their end to their score."""
        self.bad: list[RolloutId] = []

    @property
    def rollouts(self) -> list[Rollout]:
        """Landed so far, in membership order."""
        return [self._rollouts[r] for ids in self.ledger.groups.values() for r in ids if r in self._rollouts]

    @property
    def queued(self) -> int:
        return self.ledger.queued()

    @property
    def parts_in_use(self) -> int:
        """Coefficients are known, so there are no parts."""
        return 0

    @property
    def counted(self) -> list[list[float]]:
        """Rewards by group, of rollouts that have one: only measured here."""
        found: dict[GroupId, list[float]] = {group_id: [] for group_id in self.ledger.groups}
        for rollout in self.rollouts:
            if isinstance(rollout.outcome, Scored):
                found[rollout.group_id].append(rollout.outcome.reward)
        return [rewards for rewards in found.values() if rewards]

    @property
    def empty(self) -> bool:
        """No turn was sampled."""
        return not self.turns

    def scales(self) -> list[float]:
        """The factors of the step's sums, at commit."""
        attempts = {(key.rollout_id, key.attempt) for key in self.turns}
        return self._objective.scales(Tally(tokens=self.ledger.tokens(), rollouts=len(attempts), rewards=[]))

    def heartbeat(self) -> None:
        """Something moved elsewhere (a tool): the step is not stalled."""
        self._news.heartbeat()

    def sampled(self, turn: SampledTurn) -> None:
        """A turn has ended: its score is asked for at once. Raises StaleRollout."""
        if turn.policy_version != self._policy_version:
            raise StaleRollout(turn.rollout_id, made_by=turn.policy_version, bound_to=self._policy_version)
        self.ledger.sampled(_key(turn), end=turn.end, tokens=turn.end - turn.start)
        assert self._scoring is not None, "the stream runs before its rollouts do"
        self._scoring.create_task(self._ask(turn), name=f"score-{turn.rollout_id}-{turn.turn}")

    def attempt_ended(self, rollout: Rollout) -> None:
        """An attempt failed and will be tried again: its scored turns count, it samples no more."""
        self.ledger.ended(rollout.rollout_id, rollout.attempt, final=False)
        self._news.tell_soon()

    async def land(self, rollout: Rollout) -> None:
        """A rollout is finished, whatever became of it."""
        self._rollouts[rollout.rollout_id] = rollout
        self.ledger.ended(rollout.rollout_id, rollout.attempt, final=True)
        await self._news.tell()

    async def run(self) -> None:
        """Work until the step owes nothing. Raises StepStalled, WorkerLost, TeacherFailed."""
        async with asyncio.TaskGroup() as tasks:
            self._scoring = tasks
            for worker in self._workers:
                tasks.create_task(self._feed(worker), name=f"feed-worker-{worker.index}")

    async def _ask(self, turn: SampledTurn) -> None:
        began_s = time.monotonic()
        scores = await self._score(turn)
        took_s = time.monotonic() - began_s
        self.score_s += took_s
        key = _key(turn)
        self.turns[key] = ScoredTurn(sampled=turn, scores=scores)
        self._landed_s[key] = time.monotonic()
        self.ledger.scored(key)
        self._emit(
            TurnScored(
                at_s=time.time(),
                rollout_id=turn.rollout_id,
                turn=turn.turn,
                tokens=turn.end - turn.start,
                score_s=took_s,
                held=scores is None,
            )
        )
        await self._news.tell()

    async def _feed(self, worker: WorkerLink) -> None:
        await worker.call(m.OpenStep(prefix=self._prefix), m.Done, limit_s=self._stall_timeout_s)
        while True:
            await self._close_groups()
            work = next_work(
                self.ledger,
                worker=worker.index,
                streams=self._schedule != "deferred",
                max_tokens=self._max_tokens,
                longest=self._longest,
                workers=len(self._workers),
                mode=self._mode,
            )
            if work is not None:
                await self._work(worker, work)
            elif self.ledger.settled:
                return
            else:
                await self._news.wait(self.ledger.owes)

    async def _work(self, worker: WorkerLink, work: TurnWork) -> None:
        self.ledger.begin(work, worker.index)
        rollout_ids = sorted(self.ledger.rollouts_of(work))
        now_s = time.monotonic()
        self.sums.queue_wait_s += sum(now_s - self._landed_s[key] for key in work.turns)
        self.sums.pieces += len(work.turns)
        self._pass_id += 1
        pass_id, queued = self._pass_id, self.queued
        turns = [self.turns[key] for key in work.turns]
        self._emit(
            PassStarted(
                at_s=time.time(),
                worker=worker.index,
                pass_id=pass_id,
                rollout_ids=rollout_ids,
                tokens=sum(each.sampled.end - each.sampled.start for each in turns),
                queued=queued,
            )
        )
        if work.how == "sweep":
            sweep = m.CloseBranch(branch_id=work.branches[0], group_id=work.group_id)
            busy_s = (await worker.call(sweep, m.Done, limit_s=self._stall_timeout_s)).busy_s
            self.sums.pass_busy_s += busy_s
        else:
            report = await worker.call(self._request(work), m.PassReport, limit_s=self._stall_timeout_s)
            busy_s = report.busy_s
            self.sums.add(report)
            self.bad += rollout_ids if report.bad_rows else []
        self.ledger.worked(work)
        self._emit(
            PassDone(at_s=time.time(), worker=worker.index, pass_id=pass_id, rollout_ids=rollout_ids, busy_s=busy_s)
        )
        await self._news.tell()

    def _request(self, work: TurnWork) -> m.RunPass | m.RunTurns:
        prompt = self._prompts[work.group_id]
        if work.how == "turns":
            return m.RunTurns(
                branch_id=work.branches[0],
                group_id=work.group_id,
                prompt=prompt,
                row=self._row(work.turns),
                schedule="immediate" if self._schedule == "immediate" else "forward",
            )
        rows = [self._row([key for key in work.turns if key.branch == branch]) for branch in work.branches]
        return m.RunPass(group_id=work.group_id, cohort_id=work.group_id, prompt=prompt, rows=rows, direct=True)

    def _row(self, keys: Sequence[TurnKey]) -> m.Row:
        """One sequence up to the last of these turns, with only their tokens to be learned."""
        return turn_row([self.turns[key] for key in sorted(keys)], self._objective)

    async def _close_groups(self) -> None:
        for group_id, holders in self.ledger.closings():
            for worker in (worker for worker in self._workers if worker.index in holders):
                close = m.CloseCohort(cohort_id=group_id, groups=[group_id], join=None)
                self.sums.pass_busy_s += (await worker.call(close, m.Done, limit_s=self._stall_timeout_s)).busy_s
            members = [self._rollouts[r].outcome for r in self.ledger.groups[group_id]]
            rewards = [outcome.reward for outcome in members if isinstance(outcome, Scored)]
            self._emit(GroupClosed(at_s=time.time(), group_id=group_id, rewards=rewards, flat=False, dropped=False))
            await self._news.tell()


def turn_row(turns: Sequence[ScoredTurn], objective: SeparableObjective) -> m.Row:
    """The row of turns of one sequence, in order."""
    last = turns[-1].sampled
    sampled, logprobs = [False] * last.end, [0.0] * last.end
    teacher: list[float] = [0.0] * last.end
    top_ids: list[list[int]] = []
    top_logprobs: list[list[float]] = []
    told = False
    for turn in turns:
        own = slice(turn.sampled.start, turn.sampled.end)
        sampled[own] = [True] * (own.stop - own.start)
        logprobs[own] = turn.sampled.logprobs
        if turn.scores is not None:
            told = not turn.scores.top_ids
            teacher[own] = turn.scores.logprobs
            top_ids += turn.scores.top_ids
            top_logprobs += turn.scores.top_logprobs
    weights = objective.weights(1)  # a turn cannot be weighed by its rollout's length, which is not known yet
    return m.Row(
        token_ids=last.token_ids,
        sampled=sampled,
        logprobs=logprobs,
        kl=weights.kl,
        entropy=weights.entropy,
        teacher=weights.teacher,
        teacher_logprobs=teacher if told else [],
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def _key(turn: SampledTurn) -> TurnKey:
    return TurnKey(turn.rollout_id, turn.attempt, turn.sequence, turn.turn)
