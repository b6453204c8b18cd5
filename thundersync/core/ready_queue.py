"""Which pieces the trainer takes next, and which of them share one backward pass. Pure: reads the ledger, decides.

Every work-conserving order gives the same step time on one worker, so the order is free to save work and memory:
1. pieces whose advantage is known and not zero go straight into the step's sums, nearest to finishing first;
2. pieces that go into a part which is there: of cohorts with differing rewards before those that may turn out flat;
3. pieces that open a part, if the budget has one left: the second of a cohort before the first of another, and cohorts
   that no worker holds before those held elsewhere;
4. pieces whose checker still runs, to be held by themselves until their reward lands.
What finds no room waits as tokens until its cohort is complete, and goes direct then.
A complete flat group never appears, unless a KL or entropy term asks for it.
"""

import math

from msgspec import Struct

from thundersync.core.advantage import is_flat
from thundersync.core.ledger import Ledger
from thundersync.core.members import Cohort, Group, Member, MemberState
from thundersync.core.types import GroupId, RolloutId, StreamMode

PARTS_PER_COHORT = 2
"""The most that a cohort holds in a worker: one for each of two rewards, folded for more."""


class PartRoom(Struct, frozen=True, kw_only=True):
    """How many parts of open cohorts a worker's memory holds."""

    most: int
    tokens: float = 0.0
    """Where parts and passes lie in one memory: a pass has so many tokens less for each part beside it, counted from
    the largest pass that a lazy step would make. 0: parts have memory of their own."""
    spare: float = 0.0
    """So many tokens more than a lazy step's largest pass."""


class Pass(Struct, frozen=True, kw_only=True):
    """One backward: pieces of one group that share its prompt, each with its own weight or all with one reward."""

    group_id: GroupId
    cohort_id: str
    rollout_ids: list[RolloutId]
    advantages: list[float] | None
    """[B], straight into the step's sums; None: into the cohort's parts, all pieces have `reward`."""
    reward: float
    base: float
    held: bool = False
    """One piece without a reward yet: its gradient waits by itself."""


def next_pass(
    ledger: Ledger,
    *,
    max_tokens: int,
    room: PartRoom,
    worker: int = 0,
    workers: int = 1,
    mode: StreamMode = "stream",
) -> Pass | None:
    """The best pass for `worker` now, or None.

    `max_tokens` bounds rows x longest row (one piece always fits). Of several `workers` none takes more than its share
    of what is ready: at a step's end none has much left while others have nothing. Without `room` for a part, a piece
    waits as tokens until its cohort is complete (exact, only less overlap). `mode`: a piece may also have to wait for
    its whole cohort (`group`), or for every reward of the step (`lazy`); its advantage is final then.
    """
    if mode == "lazy" and not all(cohort.complete for cohort in ledger.cohorts):
        return None
    space, held = _Space(ledger, max_tokens, room), parts_in_use(ledger, worker)
    waiting = [(cohort, group) for cohort in ledger.cohorts for group in cohort.groups if group.ready]
    share = sum(member.tokens for _, group in waiting for member in group.ready) / workers
    direct = [(cohort, group) for cohort, group in waiting if cohort.complete]
    if direct:
        cohort, group = min(direct, key=lambda each: len(each[1].ready))
        members = _fill(group.ready, space.tokens(held), share)
        return _pass(cohort, group, members, [ledger.advantage(m.rollout_id) for m in members])
    if mode != "stream":
        return None

    def fits(cohort: Cohort, member: Member) -> bool:
        opens = _opens_part(cohort, member.reward, worker)
        return space.fits(held + 1) if opens else space.fits(held, beside=member)

    streamed = [
        (cohort, group, reward)
        for cohort, group in waiting
        if ledger.may_stream(group)
        for reward in dict.fromkeys(member.reward for member in group.ready if fits(cohort, member))
    ]
    if not streamed:
        return _held(ledger, worker) if space.fits(held + 1) else None
    cohort, group, reward = min(streamed, key=lambda each: _order(each[0], each[1], each[2], worker))
    tokens = space.tokens(held + _opens_part(cohort, reward, worker))
    members = [member for member in group.ready if member.reward == reward and fits(cohort, member)]
    return _pass(cohort, group, _fill(members, tokens, share), None)


class _Space:
    """Of one worker at one moment."""

    def __init__(self, ledger: Ledger, max_tokens: int, room: PartRoom) -> None:
        self._max_tokens, self._room = max_tokens, room
        self._longest = self._lazy = 0.0
        """Tokens of the longest piece so far, and of a lazy step's largest pass if others become as long."""
        if room.tokens:
            for group in ledger.groups.values():
                if sizes := [member.tokens for member in group.members.values() if member.longest]:
                    self._longest = max(self._longest, *sizes)
                    self._lazy = max(self._lazy, len(group.members) * sum(sizes) / len(sizes))
            self._lazy = max(self._longest, min(self._lazy, max_tokens))  # one piece always makes a pass

    def tokens(self, parts: int) -> int:
        """Of a pass while so many parts are held."""
        return int(min(self._max_tokens, self._beside(parts)))

    def fits(self, parts: int, *, beside: Member | None = None) -> bool:
        """So many parts can be held beside a pass over this piece; None: over any of the pieces so far."""
        longest = self._longest if beside is None else beside.tokens
        return parts <= self._room.most and longest <= self._beside(parts)

    def _beside(self, parts: int) -> float:
        if not parts or not self._room.tokens:
            return math.inf
        return self._lazy + self._room.spare - parts * self._room.tokens


def queued(ledger: Ledger) -> int:
    """Pieces that are ready and not begun."""
    return sum(len(group.ready) for group in ledger.groups.values())


def parts_in_use(ledger: Ledger, worker: int) -> int:
    """Parts that a worker holds: of open cohorts, and of pieces that wait for their reward."""
    held = sum(hold.worker == worker for hold in ledger.holds)
    return held + sum(min(PARTS_PER_COHORT, len(cohort.values_in(worker))) for cohort in ledger.cohorts)


def _opens_part(cohort: Cohort, reward: float | None, worker: int) -> bool:
    values = cohort.values_in(worker)
    return reward not in values and len(values) < PARTS_PER_COHORT


def _held(ledger: Ledger, worker: int) -> Pass | None:
    """A piece whose checker still runs, of the cohort that is nearest to closing: doubtful work, so the last choice."""
    waiting = [
        (cohort, group, member)
        for cohort in ledger.cohorts
        for group in cohort.groups
        for member in group.members.values()
        if member.state is MemberState.CONTENT
    ]
    if not waiting:
        return None
    cohort, group, member = min(waiting, key=lambda each: (is_flat(each[0].rewards), each[0].missing))
    return Pass(
        group_id=group.group_id,
        cohort_id=cohort.cohort_id,
        rollout_ids=[member.rollout_id],
        advantages=None,
        reward=0.0,
        base=0.0,
        held=True,
    )


def _order(cohort: Cohort, group: Group, reward: float | None, worker: int) -> tuple[bool, bool, bool, bool, int]:
    holders = cohort.holders()
    opens = _opens_part(cohort, reward, worker)
    return opens, worker not in holders, bool(holders - {worker}), is_flat(cohort.rewards), group.missing


def _pass(cohort: Cohort, group: Group, members: list[Member], known: list[float] | None) -> Pass:
    first = members[0]
    assert first.reward is not None and cohort.base is not None
    return Pass(
        group_id=group.group_id,
        cohort_id=cohort.cohort_id,
        rollout_ids=[m.rollout_id for m in members],
        advantages=known,
        reward=first.reward,
        base=cohort.base,
    )


def _fill(ready: list[Member], max_tokens: int, share: float) -> list[Member]:
    """Pieces of similar length, longest first, within the padded budget and the share; always at least one."""
    first, *others = sorted(ready, key=lambda m: (-m.longest, m.rollout_id))
    chosen, rows, tokens = [first], first.rows, first.tokens
    for member in others:
        rows += member.rows
        tokens += member.tokens
        if first.longest * rows > max_tokens or tokens > share:
            break
        chosen.append(member)
    return chosen
