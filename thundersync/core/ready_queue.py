"""Which pieces the trainer takes next, and which of them share one backward pass. Pure: reads the ledger, decides.

Every work-conserving order gives the same step time on one worker, so the order is free to save work and memory:
1. pieces whose advantage is known and not zero go straight into the step's sums, nearest to finishing first;
2. pieces of cohorts that already hold a part here, those with differing rewards before those that may still turn out
   flat;
3. pieces that open a part, if the budget has one left: cohorts that no worker holds before those held elsewhere;
4. pieces whose checker still runs, to be held by themselves until their reward lands.
A complete flat group never appears, unless a KL or entropy term asks for it.
"""

from msgspec import Struct

from thundersync.core.advantage import is_flat
from thundersync.core.ledger import Ledger
from thundersync.core.members import Cohort, Group, Member, MemberState
from thundersync.core.types import GroupId, RolloutId, StreamMode

PARTS_PER_COHORT = 2
"""A cohort may come to need both, whatever landed first; they are reserved together, so that it never gets stuck."""


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
    ledger: Ledger, *, max_tokens: int, max_parts: int, worker: int = 0, mode: StreamMode = "stream"
) -> Pass | None:
    """The best pass for `worker` now, or None.

    `max_tokens` bounds rows x longest row (one piece always fits). `max_parts`: how many parts the
    worker's memory holds; without one, a piece waits as tokens until its cohort is complete (exact, only less
    overlap). `mode`: a piece may also have to wait for its whole cohort (`group`), or for every reward of the step
    (`lazy`); its advantage is final then.
    """
    if mode == "lazy" and not all(cohort.complete for cohort in ledger.cohorts):
        return None
    waiting = [(cohort, group) for cohort in ledger.cohorts for group in cohort.groups if group.ready]
    direct = [(cohort, group) for cohort, group in waiting if cohort.complete]
    if direct:
        cohort, group = min(direct, key=lambda each: len(each[1].ready))
        members = _fill(group.ready, max_tokens)
        return _pass(cohort, group, members, [ledger.advantage(m.rollout_id) for m in members])
    if mode != "stream":
        return None
    room = may_open(ledger, worker, max_parts)
    opened = [
        (cohort, group)
        for cohort, group in waiting
        if (worker in cohort.holders() or room) and ledger.may_stream(group)
    ]
    if not opened:
        return _held(ledger, worker, max_parts)
    cohort, group = min(opened, key=lambda each: _order(each[0], each[1], worker))
    first = group.ready[0]
    return _pass(cohort, group, _fill([m for m in group.ready if m.reward == first.reward], max_tokens), None)


def queued(ledger: Ledger) -> int:
    """Pieces that are ready and not begun."""
    return sum(len(group.ready) for group in ledger.groups.values())


def parts_in_use(ledger: Ledger, worker: int) -> int:
    """Parts that open cohorts may come to hold in a worker."""
    held = sum(hold.worker == worker for hold in ledger.holds)
    return held + PARTS_PER_COHORT * sum(worker in cohort.holders() for cohort in ledger.cohorts)


def may_open(ledger: Ledger, worker: int, max_parts: int) -> bool:
    """The worker has room for the parts of another cohort."""
    return max_parts - parts_in_use(ledger, worker) >= PARTS_PER_COHORT


def _held(ledger: Ledger, worker: int, max_parts: int) -> Pass | None:
    """A piece whose checker still runs, of the cohort that is nearest to closing: doubtful work, so the last choice."""
    if parts_in_use(ledger, worker) >= max_parts:
        return None
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


def _order(cohort: Cohort, group: Group, worker: int) -> tuple[bool, bool, bool, int]:
    holders = cohort.holders()
    return worker not in holders, bool(holders - {worker}), is_flat(cohort.rewards), group.missing


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


def _fill(ready: list[Member], max_tokens: int) -> list[Member]:
    """Pieces of similar length, longest first, within the padded budget; always at least one."""
    first, *others = sorted(ready, key=lambda m: (-m.longest, m.rollout_id))
    chosen, rows = [first], first.rows
    for member in others:
        if first.longest * (rows + member.rows) > max_tokens:
            break
        chosen.append(member)
        rows += member.rows
    return chosen
