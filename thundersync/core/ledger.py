"""What a step still owes: every group, every member, from the step's opening to its commit.

Pure bookkeeping. Membership is fixed before anything runs, so arrival order never decides it. The ledger says what
each member may do next; the actor that feeds the trainer does it and reports back. An impossible report raises
LedgerError: nothing is counted twice, nothing is dropped silently. Members, groups and cohorts are in `members`.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from thundersync.core.advantage import JoinScalars
from thundersync.core.members import SETTLED, Cohort, Group, Hold, Member, MemberState
from thundersync.core.objective import SeparableObjective, Tally
from thundersync.core.types import GroupId, RolloutId
from thundersync.errors import LedgerError


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
        self.holds: list[Hold] = []
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
        cohort, member = self.cohort_of(rollout_id), self._missing(rollout_id)
        member.reward, member.rows, member.longest, member.sampled_tokens = reward, rows, longest, sampled_tokens
        if member.hold is None:
            member.state = MemberState.READY
        if cohort.base is None:
            cohort.base = reward
        self._skip_zeros(cohort)

    def failed(self, rollout_id: RolloutId) -> None:
        """No attempt is left: the group goes on with the others."""
        self.withdrawn(rollout_id)
        self._member(rollout_id, MemberState.PENDING).state = MemberState.FAILED
        self._skip_zeros(self.cohort_of(rollout_id))

    def content(self, rollout_id: RolloutId, *, longest: int, rows: int = 1) -> None:
        """The tokens of a rollout are final while its checker runs: its backward may begin, to be held."""
        member = self._member(rollout_id, MemberState.PENDING)
        member.rows, member.longest, member.state = rows, longest, MemberState.CONTENT

    def withdrawn(self, rollout_id: RolloutId) -> None:
        """The attempt failed; whatever was held of it is thrown away, and the rollout has no tokens again."""
        member = self._missing(rollout_id)
        if member.hold is not None:
            member.hold.doomed, member.hold = True, None
        member.state = MemberState.PENDING

    def hold(self, rollout_id: RolloutId, *, name: str, worker: int) -> Hold:
        """A pass over a piece without a reward was given to a worker; it keeps the gradient under `name`."""
        member = self._member(rollout_id, MemberState.CONTENT)
        member.hold = Hold(rollout_id, name, worker)
        member.state = MemberState.HELD
        self.holds.append(member.hold)
        self.cohort_of(rollout_id).workers.add(worker)
        return member.hold

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
        if cohort.advantages is None:
            voters = [m.rollout_id for g in cohort.groups if not g.dropped for m in g.members.values() if m.votes]
            cohort.advantages = dict(zip(voters, self.objective.advantages(cohort.rewards), strict=True))
        return cohort.advantages[rollout_id]

    def begin(self, rollout_ids: Sequence[RolloutId], *, worker: int, in_part: bool) -> None:
        """A pass over these pieces was given to a worker."""
        for rollout_id in rollout_ids:
            member = self._member(rollout_id, MemberState.READY)
            member.state, member.worker, member.in_part = MemberState.WORKING, worker, in_part
            self.cohort_of(rollout_id).workers.add(worker)

    def worked(self, rollout_ids: Sequence[RolloutId]) -> None:
        for rollout_id in rollout_ids:
            self._member(rollout_id, MemberState.WORKING).state = MemberState.WORKED

    def closings(self) -> list[Closing]:
        """Cohorts that became whole since the last call, each returned once; their zero pieces become skipped."""
        return [self._close(cohort) for cohort in self.cohorts if self._may_close(cohort)]

    @property
    def settled(self) -> bool:
        """The step owes nothing: every member is settled and every cohort closed."""
        return not self.holds and all(c.closed and all(m.state in SETTLED for m in c.members) for c in self.cohorts)

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
        waiting = [f"{m.rollout_id} {m.state.value}" for c in self.cohorts for m in c.members if m.state not in SETTLED]
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
        return all(m.state in SETTLED for m in cohort.members)

    def _close(self, cohort: Cohort) -> Closing:
        rewards, signal = cohort.rewards, bool(self.signal(cohort))
        cohort.closed = True
        join = self.objective.join(rewards, base=cohort.base) if signal and cohort.base is not None else None
        return Closing(
            cohort_id=cohort.cohort_id,
            groups=[group.group_id for group in cohort.groups],
            workers=sorted(cohort.workers),
            rewards=rewards,
            join=join,
            flat=not signal,
            dropped=[group.group_id for group in cohort.groups if group.dropped],
            skipped=[m.rollout_id for m in cohort.members if m.state is MemberState.SKIPPED],
        )

    def _missing(self, rollout_id: RolloutId) -> Member:
        member = self.group_of(rollout_id).members[rollout_id]
        if not member.missing:
            raise LedgerError(
                f"rollout {rollout_id} is {member.state.value}, expected pending",
                remedy="Something was reported twice or too late; report it with the run folder.",
            )
        return member

    def _member(self, rollout_id: RolloutId, expected: MemberState) -> Member:
        member = self.group_of(rollout_id).members[rollout_id]
        if member.state is not expected:
            raise LedgerError(
                f"rollout {rollout_id} is {member.state.value}, expected {expected.value}",
                remedy="Something was reported twice or too late; report it with the run folder.",
            )
        return member
