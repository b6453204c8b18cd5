"""What a step still owes: every group, every member, from the step's opening to its commit.

Pure bookkeeping. Membership is fixed before anything runs, so arrival order never decides it. The ledger says what
each member may do next; the actor that feeds the trainer does it and reports back. An impossible report raises
LedgerError: nothing is counted twice, nothing is dropped silently.
"""

import enum
from collections.abc import Mapping, Sequence

from msgspec import Struct

from thundersync.core.advantage import AdvantageRule, JoinScalars, advantages, is_flat, join_scalars
from thundersync.core.types import GroupId, RolloutId
from thundersync.errors import LedgerError


class MemberState(enum.Enum):
    """Life of one rollout in the ledger."""

    PENDING = "pending"  # its reward has not landed
    READY = "ready"  # rewarded, its backward not begun
    WORKING = "working"  # a worker has it
    WORKED = "worked"  # its gradient is in a part or in the step's sum
    SKIPPED = "skipped"  # its advantage is known to be zero
    FAILED = "failed"  # its world failed for good; it never votes


_SETTLED = {MemberState.WORKED, MemberState.SKIPPED, MemberState.FAILED}


class Member:
    """One rollout of a group."""

    def __init__(self, rollout_id: RolloutId) -> None:
        self.rollout_id = rollout_id
        self.state = MemberState.PENDING
        self.reward: float | None = None
        self.rows = 0
        self.longest = 0
        self.sampled_tokens = 0
        self.in_part = False
        """True once its gradient went (or is going) into the group's parts instead of the step's sum."""


class Group:
    """The rollouts of one task in this step."""

    def __init__(self, group_id: GroupId, rollout_ids: Sequence[RolloutId]) -> None:
        self.group_id = group_id
        self.members = {rollout_id: Member(rollout_id) for rollout_id in rollout_ids}
        self.base: float | None = None
        """The first landed reward: the centre of the reward part."""
        self.closed = False

    @property
    def rewards(self) -> list[float]:
        """Of the members that vote, in member order, never in arrival order."""
        return [m.reward for m in self.members.values() if m.reward is not None and m.state is not MemberState.FAILED]

    @property
    def missing(self) -> int:
        """Members whose reward has not landed."""
        return sum(m.state is MemberState.PENDING for m in self.members.values())

    @property
    def complete(self) -> bool:
        return self.missing == 0

    @property
    def mixed(self) -> bool:
        """Two different rewards have landed: the group can no longer turn out flat."""
        return not is_flat(self.rewards)

    @property
    def holds_part(self) -> bool:
        return not self.closed and any(m.in_part for m in self.members.values())

    @property
    def ready(self) -> list[Member]:
        return [m for m in self.members.values() if m.state is MemberState.READY]


class GroupClosing(Struct, frozen=True, kw_only=True):
    """A group is whole and nothing of it waits: its parts can be joined (`join`) or thrown away (None)."""

    group_id: GroupId
    rewards: list[float]
    join: JoinScalars | None
    flat: bool
    dropped: bool
    skipped: list[RolloutId]


class Ledger:
    """The books of one step."""

    def __init__(
        self, groups: Mapping[GroupId, Sequence[RolloutId]], *, rule: AdvantageRule, min_group_size: int
    ) -> None:
        self._rule = rule
        self._min_group_size = min_group_size
        self.groups = {group_id: Group(group_id, rollout_ids) for group_id, rollout_ids in groups.items()}
        self._group_of = {r: g for g, rollout_ids in groups.items() for r in rollout_ids}
        if len(self._group_of) != sum(len(r) for r in groups.values()):
            raise LedgerError("a rollout id stands in the step twice", remedy="Report it with the run folder.")

    def group_of(self, rollout_id: RolloutId) -> Group:
        try:
            return self.groups[self._group_of[rollout_id]]
        except KeyError:
            raise LedgerError(
                f"rollout {rollout_id} does not belong to this step", remedy="Report it with the run folder."
            ) from None

    def scored(self, rollout_id: RolloutId, reward: float, *, sampled_tokens: int, longest: int, rows: int = 1) -> None:
        """A reward has landed. The piece has `rows` token sequences, `longest` tokens beyond what its group shares."""
        group, member = self.group_of(rollout_id), self._member(rollout_id, MemberState.PENDING)
        member.reward, member.rows, member.longest, member.sampled_tokens = reward, rows, longest, sampled_tokens
        member.state = MemberState.READY
        if group.base is None:
            group.base = reward
        self._skip_zeros(group)

    def failed(self, rollout_id: RolloutId) -> None:
        """No attempt is left: the group goes on with the others."""
        self._member(rollout_id, MemberState.PENDING).state = MemberState.FAILED
        self._skip_zeros(self.group_of(rollout_id))

    def verdict(self, group: Group) -> bool | None:
        """True: the complete group has signal. False: flat or too small, never worked. None: not complete yet."""
        if not group.complete:
            return None
        return len(group.rewards) >= self._min_group_size and group.mixed

    def advantage(self, rollout_id: RolloutId) -> float:
        """The textbook advantage; only a complete group has one."""
        group = self.group_of(rollout_id)
        if not group.complete:
            raise LedgerError(f"group {group.group_id} is not complete: {rollout_id} has no advantage yet")
        voters = [m.rollout_id for m in group.members.values() if m.state is not MemberState.FAILED]
        return dict(zip(voters, advantages(group.rewards, self._rule), strict=True))[rollout_id]

    def begin(self, rollout_ids: Sequence[RolloutId], *, in_part: bool) -> None:
        """A pass over these pieces was given to a worker."""
        for rollout_id in rollout_ids:
            member = self._member(rollout_id, MemberState.READY)
            member.state, member.in_part = MemberState.WORKING, in_part

    def worked(self, rollout_ids: Sequence[RolloutId]) -> None:
        for rollout_id in rollout_ids:
            self._member(rollout_id, MemberState.WORKING).state = MemberState.WORKED

    def closings(self) -> list[GroupClosing]:
        """Groups that became whole since the last call, each returned once; their zero pieces become skipped."""
        return [self._close(group) for group in self.groups.values() if self._may_close(group)]

    @property
    def settled(self) -> bool:
        """The step owes nothing: every member is settled and every group closed."""
        return all(
            group.closed and all(m.state in _SETTLED for m in group.members.values()) for group in self.groups.values()
        )

    def counted_groups(self) -> list[Group]:
        """Groups whose members vote in the denominators: complete and not dropped."""
        return [g for g in self.groups.values() if g.complete and len(g.rewards) >= self._min_group_size]

    def denominators(self) -> tuple[int, int]:
        """(sampled tokens, rollouts) of the step: flat groups count, failed members and dropped groups do not."""
        voters = [m for g in self.counted_groups() for m in g.members.values() if m.state is not MemberState.FAILED]
        return sum(m.sampled_tokens for m in voters), len(voters)

    def owes(self) -> str:
        """For the watchdog: what the step is still waiting for, in one line."""
        waiting = [
            f"{m.rollout_id} {m.state.value}"
            for group in self.groups.values()
            for m in group.members.values()
            if m.state not in _SETTLED
        ]
        more = f" and {len(waiting) - 8} more" if len(waiting) > 8 else ""
        return ", ".join(waiting[:8]) + more if waiting else "nothing"

    def _skip_zeros(self, group: Group) -> None:
        """Once the group is complete, a waiting piece whose advantage is exactly zero is never worked."""
        if self.verdict(group):
            for member in group.ready:
                if self.advantage(member.rollout_id) == 0.0:
                    member.state = MemberState.SKIPPED

    def _may_close(self, group: Group) -> bool:
        if group.closed:
            return False
        verdict = self.verdict(group)
        if verdict is None or any(m.state is MemberState.WORKING for m in group.members.values()):
            return False
        return not verdict or not group.ready

    def _close(self, group: Group) -> GroupClosing:
        dropped, flat = len(group.rewards) < self._min_group_size, not group.mixed
        for member in group.ready:
            member.state = MemberState.SKIPPED
        skipped = [m.rollout_id for m in group.members.values() if m.state is MemberState.SKIPPED]
        group.closed = True
        join = None
        if not dropped and not flat and group.base is not None:
            join = join_scalars(group.rewards, base=group.base, rule=self._rule)
        return GroupClosing(
            group_id=group.group_id, rewards=group.rewards, join=join, flat=flat, dropped=dropped, skipped=skipped
        )

    def _member(self, rollout_id: RolloutId, expected: MemberState) -> Member:
        member = self.group_of(rollout_id).members[rollout_id]
        if member.state is not expected:
            raise LedgerError(
                f"rollout {rollout_id} is {member.state.value}, expected {expected.value}",
                remedy="Something was reported twice or too late; report it with the run folder.",
            )
        return member
