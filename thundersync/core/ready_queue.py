"""Which pieces the trainer takes next, and which of them share one backward pass. Pure: reads the ledger, decides.

Every work-conserving order gives the same step time on one worker, so the order is free to save work and memory:
1. pieces whose advantage is known and not zero go straight into the step's sum, nearest to finishing first;
2. pieces of groups that already hold a part, mixed groups before those that may still turn out flat;
3. pieces that open a part, if the budget has one left.
A complete flat group never appears: its pieces are skipped at close.
"""

from msgspec import Struct

from thundersync.core.ledger import Ledger, Member
from thundersync.core.types import GroupId, RolloutId

PARTS_PER_GROUP = 2
"""A group may come to need both, whatever landed first; they are reserved together, so that it never gets stuck."""


class Pass(Struct, frozen=True, kw_only=True):
    """One backward: pieces of one group that share its prompt, each with its own weight or all with one reward."""

    group_id: GroupId
    rollout_ids: list[RolloutId]
    weights: list[float] | None
    """Advantages [B], straight into the step's sum; None: into the group's parts, all pieces have `reward`."""
    reward: float
    base: float


def next_pass(ledger: Ledger, *, max_tokens: int, parts_left: int, known_only: bool = False) -> Pass | None:
    """The best pass now, or None. `max_tokens` bounds rows x longest row (padding included; one piece always fits).

    `parts_left`: how many more parts the worker's memory holds; without one, a piece waits as tokens until its group
    is complete (exact, only less overlap). `known_only`: the lazy arm, which waits for every reward of the step.
    """
    if known_only and not all(group.complete for group in ledger.groups.values()):
        return None
    candidates = [group for group in ledger.groups.values() if group.ready and not group.closed]
    direct = [group for group in candidates if ledger.verdict(group)]
    if direct:
        group = min(direct, key=lambda g: len(g.ready))
        rows = _fill(group.ready, max_tokens)
        ids = [m.rollout_id for m in rows]
        return Pass(
            group_id=group.group_id, rollout_ids=ids, weights=[ledger.advantage(i) for i in ids], reward=0.0, base=0.0
        )
    opened = [g for g in candidates if not g.complete and (g.holds_part or parts_left >= PARTS_PER_GROUP)]
    if not opened:
        return None
    group = min(opened, key=lambda g: (not g.holds_part, not g.mixed, g.missing))
    first = group.ready[0]
    rows = _fill([m for m in group.ready if m.reward == first.reward], max_tokens)
    assert first.reward is not None and group.base is not None
    return Pass(
        group_id=group.group_id,
        rollout_ids=[m.rollout_id for m in rows],
        weights=None,
        reward=first.reward,
        base=group.base,
    )


def queued(ledger: Ledger) -> int:
    """Pieces that are ready and not begun."""
    return sum(len(group.ready) for group in ledger.groups.values())


def parts_in_use(ledger: Ledger) -> int:
    """Parts that open groups may come to hold."""
    return PARTS_PER_GROUP * sum(group.holds_part for group in ledger.groups.values())


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
