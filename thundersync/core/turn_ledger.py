"""What a distillation step still owes: every turn that was sampled, from its teacher score to the last sweep.

A turn is a piece of its own: once scored it counts, whatever later becomes of its rollout's world. An *attempt* at a
rollout is one line of turns; each of its token sequences is a *branch* in a trainer worker. Pure bookkeeping, as
`ledger` is for rewards; an impossible report raises LedgerError.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from thundersync.core.types import GroupId, RolloutId
from thundersync.errors import LedgerError


class TurnKey(Struct, frozen=True, order=True):
    """A turn of an attempt. `sequence`: which of the rollout's token sequences it was sampled in."""

    rollout_id: RolloutId
    attempt: int
    sequence: int
    turn: int

    @property
    def branch(self) -> str:
        """The name of its token sequence in this step."""
        return f"{self.rollout_id}/{self.attempt}/{self.sequence}"


class Branch:
    """One token sequence of one attempt."""

    def __init__(self, group_id: GroupId, key: TurnKey) -> None:
        self.group_id = group_id
        self.branch_id, self.rollout_id, self.attempt = key.branch, key.rollout_id, key.attempt
        self.unscored: set[TurnKey] = set()
        self.ready: list[TurnKey] = []
        self.tokens: dict[TurnKey, tuple[int, int]] = {}
        """Turn -> (tokens of the sequence up to its end, tokens it sampled)."""
        self.worker: int | None = None
        """Who holds its blocks, once a turn was worked by itself."""
        self.last_worker: int | None = None
        self.busy = False
        self.ended = False
        """No further turn will be sampled."""
        self.done = False

    @property
    def whole(self) -> bool:
        """Ended, and every turn scored."""
        return self.ended and not self.unscored

    @property
    def in_order(self) -> list[TurnKey]:
        """Ready turns that can be worked now: a later one whose score landed first waits for those before it."""
        first = min(self.unscored, default=None)
        return [key for key in self.ready if first is None or key < first]

    @property
    def longest(self) -> int:
        return max((end for end, _ in self.tokens.values()), default=0)


class TurnWork(Struct, frozen=True, kw_only=True):
    """What a worker does next with one branch, or with several that are whole."""

    group_id: GroupId
    branches: list[str]
    turns: list[TurnKey]
    """Those to be differentiated now; none for the closing sweep."""
    how: Literal["rows", "turns", "sweep"]
    """`rows`: whole sequences in one pass; `turns`: these turns alone; `sweep`: what is left of a branch."""


class TurnLedger:
    """The books of one distillation step."""

    def __init__(self, groups: Mapping[GroupId, Sequence[RolloutId]]) -> None:
        self.groups = {group_id: list(ids) for group_id, ids in groups.items()}
        self._group_of = {r: g for g, ids in groups.items() for r in ids}
        self._open = dict(self._group_of)
        self._branches: dict[str, Branch] = {}
        self._closed: set[GroupId] = set()

    def sampled(self, key: TurnKey, *, end: int, tokens: int) -> None:
        """A turn has ended; its score is on the way. `end`: tokens of its sequence so far, `tokens` of them its own."""
        branch = self._branch(key)
        if branch.ended or key in branch.tokens:
            raise LedgerError(f"turn {key} came twice, or after its attempt had ended")
        branch.tokens[key] = (end, tokens)
        branch.unscored.add(key)

    def scored(self, key: TurnKey) -> None:
        """The teacher's score has landed: the turn is ready."""
        branch = self._branch(key)
        if key not in branch.unscored:
            raise LedgerError(f"turn {key} was scored twice, or never sampled")
        branch.unscored.remove(key)
        branch.ready.append(key)
        branch.ready.sort()

    def ended(self, rollout_id: RolloutId, attempt: int, *, final: bool) -> None:
        """The attempt samples no more; `final`: nor does its rollout."""
        for branch in self._branches.values():
            if (branch.rollout_id, branch.attempt) == (rollout_id, attempt):
                branch.ended = True
        if final and self._open.pop(rollout_id, None) is None:
            raise LedgerError(f"rollout {rollout_id} ended twice, or does not belong to this step")

    def begin(self, work: TurnWork, worker: int) -> None:
        for branch in map(self._branches.__getitem__, work.branches):
            branch.busy, branch.last_worker = True, worker
            if work.how == "turns":
                branch.worker = worker
            branch.ready = [key for key in branch.ready if key not in work.turns]

    def worked(self, work: TurnWork) -> None:
        for branch in map(self._branches.__getitem__, work.branches):
            branch.busy = False
            branch.done = work.how in ("rows", "sweep")

    def rollouts_of(self, work: TurnWork) -> set[RolloutId]:
        return {self._branches[name].rollout_id for name in work.branches}

    def closings(self) -> list[tuple[GroupId, list[int]]]:
        """Groups that became whole since the last call, with the workers that hold their prompts."""
        found = []
        for group_id, rollouts in self.groups.items():
            branches = [b for b in self._branches.values() if b.group_id == group_id]
            if group_id in self._closed or any(r in self._open for r in rollouts) or not all(b.done for b in branches):
                continue
            self._closed.add(group_id)
            found.append((group_id, sorted({b.last_worker for b in branches if b.last_worker is not None})))
        return found

    @property
    def settled(self) -> bool:
        return len(self._closed) == len(self.groups)

    @property
    def live(self) -> list[Branch]:
        """Branches with something left to do, that no worker has in hand."""
        return [b for b in self._branches.values() if not b.done and not b.busy]

    @property
    def all_whole(self) -> bool:
        """Every turn of the step has been sampled and scored."""
        return not self._open and all(b.whole for b in self._branches.values())

    @property
    def unfinished_groups(self) -> set[GroupId]:
        """Groups of which a turn is still to be sampled or scored."""
        running = {self._group_of[rollout_id] for rollout_id in self._open}
        return running | {b.group_id for b in self._branches.values() if not b.whole}

    def begun(self, worker: int) -> int:
        """Branches whose blocks a worker holds for later sweeps."""
        return sum(b.worker == worker and not b.done for b in self._branches.values())

    def tokens(self) -> int:
        """Scored tokens of the step: the denominator of a token mean."""
        return sum(own for b in self._branches.values() for _, own in b.tokens.values())

    def queued(self) -> int:
        return sum(len(b.ready) for b in self._branches.values())

    def owes(self) -> str:
        """For the watchdog: what the step is still waiting for, in one line."""
        waiting = [f"{r} running" for r in self._open] + [
            f"{b.branch_id} {'to be scored' if b.unscored else 'to be worked'}"
            for b in self._branches.values()
            if not b.done
        ]
        more = f" and {len(waiting) - 8} more" if len(waiting) > 8 else ""
        return ", ".join(waiting[:8]) + more if waiting else "nothing"

    def _branch(self, key: TurnKey) -> Branch:
        name = key.branch
        if name not in self._branches:
            if key.rollout_id not in self._open:
                raise LedgerError(f"rollout {key.rollout_id} has ended, or does not belong to this step")
            self._branches[name] = Branch(self._group_of[key.rollout_id], key)
        return self._branches[name]
