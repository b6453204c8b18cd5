"""Gradients that were worked before their reward was known, and what becomes of them once it is. Pure."""

from msgspec import Struct

from thundersync.core.ledger import Ledger
from thundersync.core.members import Hold, MemberState
from thundersync.core.types import GroupId, RolloutId


class Settlement(Struct, frozen=True, kw_only=True):
    """A held gradient's reward is known: add it under its advantage, or to its cohort's parts, or throw it away."""

    hold: str
    worker: int
    rollout_id: RolloutId
    group_id: GroupId
    cohort_id: str
    advantage: float | None
    """None: into the parts, for `reward`."""
    reward: float = 0.0
    base: float = 0.0


def settlements(ledger: Ledger) -> list[Settlement]:
    """What can be done now with held gradients, each returned once. Needs no room: a hold's own part can be the
    cohort's."""
    found = []
    for hold in [hold for hold in ledger.holds if hold.done]:
        settlement = _settle(ledger, hold)
        if settlement is not None:
            found.append(settlement)
            ledger.holds.remove(hold)
    return found


def _settle(ledger: Ledger, hold: Hold) -> Settlement | None:
    """Where the gradient goes; None while its reward is missing, or its group may still come to nothing."""
    group, cohort = ledger.group_of(hold.rollout_id), ledger.cohort_of(hold.rollout_id)
    member = group.members[hold.rollout_id]
    advantage: float | None = None
    if hold.doomed:
        advantage = 0.0
    elif member.reward is None:
        return None
    elif cohort.complete:
        advantage = ledger.advantage(hold.rollout_id) if ledger.wanted(member) else 0.0
    elif not ledger.may_stream(group):
        return None
    if not hold.doomed:
        member.hold, member.state, member.worker = None, MemberState.WORKED, hold.worker
        member.in_part = advantage is None
    return Settlement(
        hold=hold.name,
        worker=hold.worker,
        rollout_id=hold.rollout_id,
        group_id=group.group_id,
        cohort_id=cohort.cohort_id,
        advantage=advantage,
        reward=member.reward or 0.0,
        base=cohort.base or 0.0,
    )
