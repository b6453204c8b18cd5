"""The books of one simulated step: the run's own ledger and queue, with seconds instead of gradients.

`simulate` holds the clock and the workers; a book says what a free worker does next and what that costs. What is
worked, in which order and in which pass is decided by `core`, exactly as in a run (`learn.stream`,
`learn.turn_stream`), so a forecast and a run agree by construction.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Literal, Protocol, TypeAlias

from msgspec import Struct

from thundersync.core import ready_queue, turn_queue
from thundersync.core.holds import settlements
from thundersync.core.ledger import Ledger
from thundersync.core.members import Hold
from thundersync.core.turn_ledger import TurnKey, TurnLedger, TurnWork
from thundersync.core.types import StreamMode
from thundersync.forecast.trace import RolloutTrace, StepTrace

JobKind: TypeAlias = Literal["pass", "sweep", "close"]


class Job(Struct, frozen=True, kw_only=True):
    """What occupies a worker without a break. `done` is told to the book when it ends."""

    what: JobKind
    rollout_ids: list[str]
    seconds: float
    done: Callable[[], None]


class Arrival(Struct, frozen=True, kw_only=True):
    """A reward, a teacher's score, an end: `land` tells the book."""

    at_s: float
    land: Callable[[], None]


class Book(Protocol):
    """What a step still owes, and who does what next."""

    @property
    def arrivals(self) -> list[Arrival]: ...

    @property
    def settled(self) -> bool: ...

    def next(self, worker: int) -> Job | None:
        """What a free worker does now; it counts as begun."""

    def wasted(self) -> list[str]:
        """Rollouts that were worked and turned out to weigh nothing."""

    def owes(self) -> str: ...


class RewardBook:
    """Rollouts that wait for rewards."""

    def __init__(self, trace: StepTrace, *, mode: StreamMode, workers: int = 1) -> None:
        self._trace, self._mode, self._workers = trace, mode, workers
        self._rollouts = {rollout.rollout_id: rollout for rollout in trace.rollouts}
        self._ledger = Ledger(
            {group_id: [r.rollout_id for r in members] for group_id, members in trace.groups().items()},
            objective=trace.objective,
            min_group_size=trace.min_group_size,
            skip_flat=trace.skip_flat,
        )
        self._closings: dict[int, deque[list[str]]] = defaultdict(deque)
        self._worked: list[str] = []
        self._news = False
        """Something landed or was worked since the ledger was asked for closings."""

    @property
    def arrivals(self) -> list[Arrival]:
        rewards = [Arrival(at_s=r.release_s, land=self._landing(r)) for r in self._trace.rollouts]
        if not self._trace.holds:
            return rewards
        contents = [
            Arrival(at_s=r.content_s, land=self._content(r))
            for r in self._trace.rollouts
            if r.content_s is not None and r.content_s < r.release_s
        ]
        return [*contents, *rewards]

    @property
    def settled(self) -> bool:
        self._decide()
        return self._ledger.settled and not any(self._closings.values())

    def next(self, worker: int) -> Job | None:
        self._decide()
        if self._closings[worker]:
            groups = self._closings[worker].popleft()
            return Job(what="close", rollout_ids=groups, seconds=self._trace.close_s, done=_nothing)
        chosen = ready_queue.next_pass(
            self._ledger,
            max_tokens=self._trace.max_tokens,
            room=self._trace.room,
            worker=worker,
            workers=self._workers,
            mode=self._mode,
        )
        if chosen is None:
            return None
        ids = chosen.rollout_ids
        if chosen.held:
            done = self._held(self._ledger.hold(ids[0], name=ids[0], worker=worker))
        else:
            self._ledger.begin(ids, worker=worker, in_part=chosen.advantages is None)
            done = partial(self._done, ids)
        pieces = [self._rollouts[r] for r in ids]
        seconds = self._trace.pass_s + sum(piece.cost_s for piece in pieces)
        return Job(what="pass", rollout_ids=ids, seconds=seconds, done=done)

    def wasted(self) -> list[str]:
        members = {r: self._ledger.group_of(r).members[r] for r in self._worked}
        return [r for r, member in members.items() if not (member.votes and self._ledger.wanted(member))]

    def ready(self) -> set[str]:
        """Rollouts that are released and not begun."""
        return {member.rollout_id for group in self._ledger.groups.values() for member in group.ready}

    def owes(self) -> str:
        return self._ledger.owes()

    def _done(self, ids: list[str]) -> None:
        self._ledger.worked(ids)
        self._worked += ids
        self._news = True

    def _held(self, hold: Hold) -> Callable[[], None]:
        def done() -> None:
            hold.done = self._news = True
            self._worked.append(hold.rollout_id)

        return done

    def _content(self, rollout: RolloutTrace) -> Callable[[], None]:
        return lambda: self._ledger.content(rollout.rollout_id, longest=rollout.tokens)

    def _landing(self, rollout: RolloutTrace) -> Callable[[], None]:
        def land() -> None:
            self._news = True
            if rollout.reward is None:
                self._ledger.failed(rollout.rollout_id)
            else:
                self._ledger.scored(
                    rollout.rollout_id, rollout.reward, sampled_tokens=max(1, rollout.tokens), longest=rollout.tokens
                )

        return land

    def _decide(self) -> None:
        """Held gradients whose reward is known are added where they belong, which costs next to nothing; cohorts that
        became whole are closed by the workers they are in."""
        if not self._news:
            return
        self._news = False
        settlements(self._ledger)
        for closing in self._ledger.closings():
            for worker in closing.workers if self._trace.close_s else ():
                self._closings[worker].append(closing.groups)


def wanted(trace: StepTrace) -> set[str]:
    """Rollouts whose gradient is not exactly zero, told from all rewards of the step."""
    book = RewardBook(trace, mode="lazy")
    for arrival in book.arrivals:
        arrival.land()
    return book.ready()


class TurnBook:
    """Turns that wait for their teacher's score."""

    def __init__(self, trace: StepTrace, *, mode: StreamMode, workers: int = 1) -> None:
        self._trace, self._mode, self._workers = trace, mode, workers
        self._ledger = TurnLedger(
            {group_id: [r.rollout_id for r in members] for group_id, members in trace.groups().items()}
        )
        self._closings: dict[int, deque[str]] = defaultdict(deque)
        self._rollouts = {rollout.rollout_id: rollout for rollout in trace.rollouts}
        self._sampled: dict[str, int] = defaultdict(int)

    @property
    def arrivals(self) -> list[Arrival]:
        found = []
        for rollout in self._trace.rollouts:
            found += [
                Arrival(at_s=turn.release_s, land=self._scoring(rollout, index))
                for index, turn in enumerate(rollout.turns)
            ]
            found.append(Arrival(at_s=rollout.release_s, land=self._ending(rollout)))
        return found

    @property
    def settled(self) -> bool:
        self._close()
        return self._ledger.settled and not any(self._closings.values())

    def next(self, worker: int) -> Job | None:
        self._close()
        if self._closings[worker]:
            group_id = self._closings[worker].popleft()
            return Job(what="close", rollout_ids=[group_id], seconds=self._trace.close_s, done=_nothing)
        work = turn_queue.next_work(
            self._ledger,
            worker=worker,
            streams=self._trace.turns_stream,
            max_tokens=self._trace.max_tokens,
            longest=self._trace.longest,
            workers=self._workers,
            mode=self._mode,
        )
        if work is None:
            return None
        rollout_ids = sorted(self._ledger.rollouts_of(work))
        seconds = self._trace.pass_s + self._seconds(work, rollout_ids)
        self._ledger.begin(work, worker)
        what: JobKind = "sweep" if work.how == "sweep" else "pass"
        return Job(what=what, rollout_ids=rollout_ids, seconds=seconds, done=lambda: self._ledger.worked(work))

    def wasted(self) -> list[str]:
        return []

    def owes(self) -> str:
        return self._ledger.owes()

    def _seconds(self, work: TurnWork, rollout_ids: list[str]) -> float:
        if work.how == "sweep":
            return self._trace.sweep_share * sum(t.cost_s for r in rollout_ids for t in self._rollouts[r].turns)
        whole = sum(self._rollouts[key.rollout_id].turns[key.turn].cost_s for key in work.turns)
        if work.how == "turns":
            return (1.0 - self._trace.sweep_share) * whole
        return whole

    def _scoring(self, rollout: RolloutTrace, index: int) -> Callable[[], None]:
        def land() -> None:
            self._sample(rollout, index + 1)  # those before it were sampled earlier, wherever their scores are
            self._ledger.scored(_key(rollout, index))

        return land

    def _ending(self, rollout: RolloutTrace) -> Callable[[], None]:
        def land() -> None:
            self._sample(rollout, len(rollout.turns))
            self._ledger.ended(rollout.rollout_id, 1, final=True)

        return land

    def _sample(self, rollout: RolloutTrace, count: int) -> None:
        for index in range(self._sampled[rollout.rollout_id], count):
            tokens = rollout.turns[index].tokens
            end = sum(turn.tokens for turn in rollout.turns[: index + 1])
            self._ledger.sampled(_key(rollout, index), end=end, tokens=tokens)
        self._sampled[rollout.rollout_id] = max(count, self._sampled[rollout.rollout_id])

    def _close(self) -> None:
        for group_id, workers in self._ledger.closings():
            for worker in workers if self._trace.close_s else ():
                self._closings[worker].append(group_id)


def _key(rollout: RolloutTrace, index: int) -> TurnKey:
    return TurnKey(rollout.rollout_id, 1, 0, index)


def _nothing() -> None:
    """A closing changes no books: the ledger knew of it first."""
