"""Which turns the trainer takes next. Pure: reads the turn ledger, decides.

1. sweeps that free a worker's blocks; 2. whole sequences that no worker has begun, packed by group (a backlog costs
what one lazy pass costs); 3. under `forward` and `immediate`, ready turns of running rollouts, as long as the worker's
kept graphs fit. All orders and mixtures give the same sum.
"""

from collections import defaultdict

from thundersync.core.turn_ledger import Branch, TurnLedger, TurnWork
from thundersync.core.types import GroupId, StreamMode


def next_work(
    ledger: TurnLedger,
    *,
    worker: int,
    streams: bool,
    max_tokens: int,
    longest: int,
    workers: int = 1,
    mode: StreamMode = "stream",
) -> TurnWork | None:
    """The best work for `worker` now, or None.

    `streams`: turns may be worked before their rollout has ended. `max_tokens` bounds a pass (rows x longest row), and
    the tokens whose graphs wait for a sweep: so many rollouts are begun as fit if each becomes `longest` tokens long,
    and one always (its whole sequence would make one pass too). Of several `workers` none takes more than its share of
    the whole sequences at once.
    `mode`: a turn may also have to wait until every turn of its group is scored (`group`), or of the step (`lazy`).
    """
    if mode == "lazy" and not ledger.all_whole:
        return None
    live = ledger.live
    if mode == "group":
        unfinished = ledger.unfinished_groups
        live = [branch for branch in live if branch.group_id not in unfinished]
    own = [b for b in live if b.worker == worker]
    if swept := next((b for b in own if b.whole and not b.ready), None):
        return TurnWork(group_id=swept.group_id, branches=[swept.branch_id], turns=[], how="sweep")
    if continued := next((b for b in own if b.in_order), None):
        return _turns(continued)
    whole: dict[GroupId, list[Branch]] = defaultdict(list)
    for branch in live:
        if branch.worker is None and branch.whole:
            whole[branch.group_id].append(branch)
    if whole:
        share = sum(branch.longest for branches in whole.values() for branch in branches) / workers
        return _rows(max(whole.values(), key=len), max_tokens, share)
    begun = ledger.begun(worker)
    if not streams or (begun and (begun + 1) * longest > max_tokens):
        return None
    fresh = [b for b in live if b.worker is None and b.in_order]
    return _turns(max(fresh, key=lambda b: len(b.ready))) if fresh else None


def _turns(branch: Branch) -> TurnWork:
    return TurnWork(group_id=branch.group_id, branches=[branch.branch_id], turns=branch.in_order, how="turns")


def _rows(branches: list[Branch], max_tokens: int, share: float) -> TurnWork:
    first, *others = sorted(branches, key=lambda b: (-b.longest, b.branch_id))
    chosen, tokens = [first], first.longest
    for branch in others:
        tokens += branch.longest
        if first.longest * (len(chosen) + 1) > max_tokens or tokens > share:
            break
        chosen.append(branch)
    turns = [key for branch in chosen for key in branch.ready]
    return TurnWork(group_id=first.group_id, branches=[b.branch_id for b in chosen], turns=turns, how="rows")
