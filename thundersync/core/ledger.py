"""What a step still owes: every group, every member, from the step's opening to its commit.

Pure bookkeeping. Membership is fixed before anything runs, so arrival order never decides it. The ledger says what
each member may do next; the actor that feeds the trainer does it and reports back. An impossible report raises
LedgerError: nothing is counted twice, nothing is dropped silently.

A *cohort* is whose rewards are compared: a group, or (REINFORCE++) all groups of the step.
"""

import enum
from collections.abc import Mapping, Sequence

from msgspec import Struct

from thundersync.core.advantage import JoinScalars
from thundersync.core.objective import SeparableObjective, Tally
from thundersync.core.types import GroupId, RolloutId
from thundersync.errors import LedgerError


class MemberState(enum.Enum):
    """Life of one rollout in the ledger."""

    PENDING = "pending"  # its reward has not landed
    READY = "ready"  # rewarded, its backward not begun
    WORKING = "working"  # a worker has it
    WORKED = "worked"  # its gradient is in a part or in the step's sums
    SKIPPED = "skipped"  # its gradient is known to be zero
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
        self.worker: int | None = None
        self.in_part = False
        """True once its gradient went (or is going) into its cohort's parts instead of the step's sums."""

    @property
    def votes(self) -> bool:
        return self.reward is not None and self.state is not MemberState.FAILED


class Group:
    """The rollouts of one task in this step."""

    def __init__(self, group_id: GroupId, rollout_ids: Sequence[RolloutId], min_size: int) -> None:
        self.group_id = group_id
        self.members = {rollout_id: Member(rollout_id) for rollout_id in rollout_ids}
        self._min_size = min_size

    @property
    def rewards(self) -> list[float]:
        """Of the members that vote, in member order, never in arrival order."""
        return [m.reward for m in self.members.values() if m.votes and m.reward is not None]

    @property
    def missing(self) -> int:
        """Members whose reward has not landed."""
        return sum(m.state is MemberState.PENDING for m in self.members.values())

    @property
    def counts(self) -> bool:
        """Enough members vote already: whatever still fails, the group will not be dropped."""
        return len(self.rewards) >= self._min_size

    @property
    def dropped(self) -> bool:
        return self.missing == 0 and not self.counts

    @property
    def ready(self) -> list[Member]:
        return [m for m in self.members.values() if m.state is MemberState.READY]


class Cohort:
    """Groups whose rewards are compared with each other."""

    def __init__(self, cohort_id: str, groups: Sequence[Group]) -> None:
        self.cohort_id = cohort_id
        self.groups = list(groups)
        self.base: float | None = None
        """The first landed reward: the centre of the reward part."""
        self.closed = False

    @property
    def members(self) -> list[Member]:
        return [member for group in self.groups for member in group.members.values()]

    @property
    def rewards(self) -> list[float]:
        return [reward for group in self.groups if not group.dropped for reward in group.rewards]

    @property
    def missing(self) -> int:
        return sum(group.missing for group in self.groups)

    @property
    def complete(self) -> bool:
        return self.missing == 0

    def holders(self) -> set[int]:
        """Workers that hold a part of the cohort."""
        if self.closed:
            return set()
        return {m.worker for m in self.members if m.in_part and m.worker is not None}


class Closing(Struct, frozen=True, kw_only=True):
    """A cohort is whole and nothing of it waits: its parts can be joined (`join`) or thrown away (None)."""

    cohort_id: str
    groups: list[GroupId]
    workers: list[int]
    """Those that worked anything of it."""
    rewards: list[float]
    join: JoinScalars | None
    flat: bool
    dropped: list[GroupId]
    skipped: list[RolloutId]


class Ledger:
    """The books of one step."""

    def __init__(
        self,
        groups: Mapping[GroupId, Sequence[RolloutId]],
        *,
        objective: SeparableObjective,
        min_group_size: int,
        skip_flat: bool = False,
    ) -> None:
        """`skip_flat`: a flat group gives no KL or entropy gradient either (it never gives any other)."""
        self.objective = objective
        self.groups = {group_id: Group(group_id, ids, min_group_size) for group_id, ids in groups.items()}
        whole = [Cohort("step", list(self.groups.values()))]
        by_group = [Cohort(group_id, [group]) for group_id, group in self.groups.items()]
        self.cohorts = whole if objective.cohort == "step" else by_group
        self._cohort_of = {group.group_id: cohort for cohort in self.cohorts for group in cohort.groups}
        self._group_of = {r: g for g, rollout_ids in groups.items() for r in rollout_ids}
        self._skip_flat = skip_flat
        if len(self._group_of) != sum(len(r) for r in groups.values()):
            raise LedgerError("a rollout id stands in the step twice", remedy="Report it with the run folder.")

    def group_of(self, rollout_id: RolloutId) -> Group:
        try:
            return self.groups[self._group_of[rollout_id]]
        except KeyError:
            raise LedgerError(
                f"rollout {rollout_id} does not belong to this step", remedy="Report it with the run folder."
            ) from None

    def cohort_of(self, rollout_id: RolloutId) -> Cohort:
        return self._cohort_of[self.group_of(rollout_id).group_id]

    def scored(self, rollout_id: RolloutId, reward: float, *, sampled_tokens: int, longest: int, rows: int = 1) -> None:
        """A reward has landed. The piece has `rows` token sequences, `longest` tokens beyond what its group shares."""
        cohort, member = self.cohort_of(rollout_id), self._member(rollout_id, MemberState.PENDING)
        member.reward, member.rows, member.longest, member.sampled_tokens = reward, rows, longest, sampled_tokens
        member.state = MemberState.READY
        if cohort.base is None:
            cohort.base = reward
        self._skip_zeros(cohort)

    def failed(self, rollout_id: RolloutId) -> None:
        """No attempt is left: the group goes on with the others."""
        self._member(rollout_id, MemberState.PENDING).state = MemberState.FAILED
        self._skip_zeros(self.cohort_of(rollout_id))

    def signal(self, cohort: Cohort) -> bool | None:
        """Of a complete cohort: do its rewards differ? None: not complete yet."""
        return self.objective.signal(cohort.rewards) if cohort.complete else None

    def known(self, member: Member) -> bool:
        """The piece has a KL, entropy or teacher term, which does not wait for rewards."""
        return self.objective.weights(member.sampled_tokens).known

    def wanted(self, member: Member) -> bool:
        """Of a complete cohort: the piece has a gradient that is not exactly zero."""
        group, cohort = self.group_of(member.rollout_id), self.cohort_of(member.rollout_id)
        if group.dropped:
            return False
        if self.known(member) and not (self._skip_flat and not self.objective.signal(group.rewards)):
            return True
        return bool(self.signal(cohort)) and self.advantage(member.rollout_id) != 0.0

    def may_stream(self, group: Group) -> bool:
        """Pieces of this open group may be worked before its rewards are complete.

        A group's own parts can be thrown away at close. What goes into the step's sums (KL, entropy) or into parts of
        the whole step cannot: the group must be certain to count first (and, under `skip_flat`, not to be flat).
        """
        known = any(self.known(member) for member in group.ready)
        if not known and self.objective.cohort == "group":
            return True
        return group.counts and not (known and self._skip_flat and not self.objective.signal(group.rewards))

    def advantage(self, rollout_id: RolloutId) -> float:
        """The textbook advantage; only a complete cohort has one."""
        cohort = self.cohort_of(rollout_id)
        if not cohort.complete:
            raise LedgerError(f"cohort {cohort.cohort_id} is not complete: {rollout_id} has no advantage yet")
        voters = [m.rollout_id for g in cohort.groups if not g.dropped for m in g.members.values() if m.votes]
        return dict(zip(voters, self.objective.advantages(cohort.rewards), strict=True))[rollout_id]

    def begin(self, rollout_ids: Sequence[RolloutId], *, worker: int, in_part: bool) -> None:
        """A pass over these pieces was given to a worker."""
        for rollout_id in rollout_ids:
            member = self._member(rollout_id, MemberState.READY)
            member.state, member.worker, member.in_part = MemberState.WORKING, worker, in_part

    def worked(self, rollout_ids: Sequence[RolloutId]) -> None:
        for rollout_id in rollout_ids:
            self._member(rollout_id, MemberState.WORKING).state = MemberState.WORKED

    def closings(self) -> list[Closing]:
        """Cohorts that became whole since the last call, each returned once; their zero pieces become skipped."""
        return [self._close(cohort) for cohort in self.cohorts if self._may_close(cohort)]

    @property
    def settled(self) -> bool:
        """The step owes nothing: every member is settled and every cohort closed."""
        return all(c.closed and all(m.state in _SETTLED for m in c.members) for c in self.cohorts)

    def counted_groups(self) -> list[Group]:
        """Groups whose members vote in the denominators: complete and not dropped."""
        return [group for group in self.groups.values() if group.missing == 0 and not group.dropped]

    def tally(self) -> Tally:
        """Of the step: flat groups count, failed members and dropped groups do not."""
        voters = [m for group in self.counted_groups() for m in group.members.values() if m.votes]
        return Tally(
            tokens=sum(m.sampled_tokens for m in voters),
            rollouts=len(voters),
            rewards=[m.reward for m in voters if m.reward is not None],
        )

    @property
    def empty(self) -> bool:
        """Nothing of the complete step has a gradient: no optimizer step is to be made."""
        return not any(self.wanted(m) for group in self.counted_groups() for m in group.members.values() if m.votes)

    def owes(self) -> str:
        """For the watchdog: what the step is still waiting for, in one line."""
        waiting = [
            f"{m.rollout_id} {m.state.value}" for c in self.cohorts for m in c.members if m.state not in _SETTLED
        ]
        more = f" and {len(waiting) - 8} more" if len(waiting) > 8 else ""
        return ", ".join(waiting[:8]) + more if waiting else "nothing"

    def _skip_zeros(self, cohort: Cohort) -> None:
        """Once the cohort is complete, a waiting piece whose gradient is exactly zero is never worked."""
        if cohort.complete:
            for member in (m for group in cohort.groups for m in group.ready):
                if not self.wanted(member):
                    member.state = MemberState.SKIPPED

    def _may_close(self, cohort: Cohort) -> bool:
        if cohort.closed or not cohort.complete:
            return False
        return not any(m.state in (MemberState.WORKING, MemberState.READY) for m in cohort.members)

    def _close(self, cohort: Cohort) -> Closing:
        rewards, signal = cohort.rewards, bool(self.signal(cohort))
        workers = sorted({m.worker for m in cohort.members if m.worker is not None})
        cohort.closed = True
        join = self.objective.join(rewards, base=cohort.base) if signal and cohort.base is not None else None
        return Closing(
            cohort_id=cohort.cohort_id,
            groups=[group.group_id for group in cohort.groups],
            workers=workers,
            rewards=rewards,
            join=join,
            flat=not signal,
            dropped=[group.group_id for group in cohort.groups if group.dropped],
            skipped=[m.rollout_id for m in cohort.members if m.state is MemberState.SKIPPED],
        )

    def _member(self, rollout_id: RolloutId, expected: MemberState) -> Member:
        member = self.group_of(rollout_id).members[rollout_id]
        if member.state is not expected:
            raise LedgerError(
                f"rollout {rollout_id} is {member.state.value}, expected {expected.value}",
                remedy="Something was reported twice or too late; report it with the run folder.",
            )
        return member
