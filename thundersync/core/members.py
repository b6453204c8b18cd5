"""Who takes part in a step: members (rollouts), their groups, and cohorts of groups whose rewards are compared.

A *cohort* is a group, or (REINFORCE++) all groups of the step. Values and what follows from them; `ledger` alone
changes them.
"""

import enum
from collections.abc import Sequence

from thundersync.core.types import GroupId, RolloutId


class MemberState(enum.Enum):
    """Life of one rollout in the ledger."""

    PENDING = "pending"  # its reward has not landed
    CONTENT = "content"  # its tokens are final, its checker still runs
    HELD = "held"  # its backward began or is done, its reward has not landed or is not yet applied
    READY = "ready"  # rewarded, its backward not begun
    WORKING = "working"  # a worker has it
    WORKED = "worked"  # its gradient is in a part or in the step's sums
    SKIPPED = "skipped"  # its gradient is known to be zero
    FAILED = "failed"  # its world failed for good; it never votes


SETTLED = {MemberState.WORKED, MemberState.SKIPPED, MemberState.FAILED}


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
        self.hold: Hold | None = None
        self.in_part = False
        """True once its gradient went (or is going) into its cohort's parts instead of the step's sums."""

    @property
    def tokens(self) -> int:
        """Of its rows in one pass, padded to the longest."""
        return self.rows * self.longest

    @property
    def votes(self) -> bool:
        return self.reward is not None and self.state is not MemberState.FAILED

    @property
    def missing(self) -> bool:
        """Its reward has not landed."""
        return self.reward is None and self.state is not MemberState.FAILED


class Hold:
    """A gradient worked before its reward: it waits in a part of its own, by itself."""

    def __init__(self, rollout_id: RolloutId, name: str, worker: int) -> None:
        self.rollout_id, self.name, self.worker = rollout_id, name, worker
        self.done = False
        """The worker has it."""
        self.doomed = False
        """Its attempt failed: it is thrown away."""


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
        return sum(m.missing for m in self.members.values())

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
        self.advantages: dict[RolloutId, float] | None = None
        """Of the members that vote, once all rewards are known."""
        self.workers: set[int] = set()
        """Those that worked anything of it."""
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

    def values_in(self, worker: int) -> set[float]:
        """Rewards of the pieces whose gradients are in the worker's parts."""
        if self.closed:
            return set()
        return {m.reward for m in self.members if m.in_part and m.worker == worker and m.reward is not None}
