"""Every order of turns, scores, failures and work settles; each turn is differentiated exactly once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thundersync.core.turn_ledger import TurnKey, TurnLedger, TurnWork
from thundersync.core.turn_queue import next_work
from thundersync.errors import LedgerError


def sample(ledger: TurnLedger, key: TurnKey) -> None:
    ledger.sampled(key, end=10 * (key.turn + 1), tokens=5)


@settings(deadline=None)
@given(
    data=st.data(),
    groups=st.integers(1, 3),
    size=st.integers(1, 4),
    workers=st.integers(1, 3),
    streams=st.booleans(),
    max_tokens=st.sampled_from([1, 25, 10_000]),
)
def test_every_turn_is_worked_once_and_in_order(
    data: st.DataObject, groups: int, size: int, workers: int, streams: bool, max_tokens: int
) -> None:
    ids = {f"g{g}": [f"g{g}-{i}" for i in range(size)] for g in range(groups)}
    ledger = TurnLedger(ids)
    waiting = {r: 1 for rollouts in ids.values() for r in rollouts}  # rollout -> attempt that runs
    turns: dict[str, int] = dict.fromkeys(waiting, 0)
    unscored: list[TurnKey] = []
    worked: list[TurnKey] = []
    held: dict[str, int] = {}
    swept: set[str] = set()

    def work(worker: int) -> bool:
        chosen = next_work(ledger, worker=worker, streams=streams, max_tokens=max_tokens, longest=60, workers=workers)
        if chosen is None:
            return False
        ledger.begin(chosen, worker)
        worked.extend(chosen.turns)
        for branch in chosen.branches:
            if chosen.how == "turns":
                assert held.setdefault(branch, worker) == worker
            elif chosen.how == "sweep":
                assert held[branch] == worker
                swept.add(branch)
            else:
                assert branch not in held
        assert ledger.begun(worker) <= max(1, max_tokens // 60) or chosen.how != "turns"
        ledger.worked(chosen)
        return True

    while waiting or unscored:
        actions = (["turn", "end", "retry"] if waiting else []) + (["score"] if unscored else []) + ["work"]
        action = data.draw(st.sampled_from(actions))
        if action == "work":
            work(data.draw(st.integers(0, workers - 1)))
        elif action == "score":
            ledger.scored(unscored.pop(data.draw(st.integers(0, len(unscored) - 1))))
        else:
            rollout = data.draw(st.sampled_from(sorted(waiting)))
            if action == "turn" and turns[rollout] < 6:
                key = TurnKey(rollout, waiting[rollout], 0, turns[rollout])
                turns[rollout] += 1
                sample(ledger, key)
                unscored.append(key)
            elif action == "retry" and waiting[rollout] == 1:
                ledger.ended(rollout, waiting[rollout], final=False)
                waiting[rollout], turns[rollout] = 2, 0
            else:
                ledger.ended(rollout, waiting.pop(rollout), final=True)
    while any(work(worker) for worker in range(workers)):
        pass
    closed = [group for group, _ in ledger.closings()]
    assert sorted(closed) == sorted(ids)
    assert ledger.settled, ledger.owes()
    assert len(worked) == len(set(worked)) == ledger.tokens() / 5
    assert swept == set(held)
    for branch in held:
        own = [key for key in worked if f"{key.rollout_id}/{key.attempt}/{key.sequence}" == branch]
        assert own == sorted(own)


def test_lazy_waits_for_the_last_score_of_the_step() -> None:
    ledger = TurnLedger({"g": ["a", "b"]})
    first, second = TurnKey("a", 1, 0, 0), TurnKey("b", 1, 0, 0)
    sample(ledger, first)
    ledger.scored(first)
    ledger.ended("a", 1, final=True)
    assert next_work(ledger, worker=0, streams=True, max_tokens=99, longest=30, mode="lazy") is None
    sample(ledger, second)
    ledger.ended("b", 1, final=True)
    assert next_work(ledger, worker=0, streams=True, max_tokens=99, longest=30, mode="lazy") is None
    ledger.scored(second)
    work = next_work(ledger, worker=0, streams=True, max_tokens=99, longest=30, mode="lazy")
    assert work == TurnWork(group_id="g", branches=["a/1/0", "b/1/0"], turns=[first, second], how="rows")


def test_group_mode_waits_for_the_last_score_of_a_group() -> None:
    ledger = TurnLedger({"g": ["a", "b"], "h": ["c"]})
    first, second, other = TurnKey("a", 1, 0, 0), TurnKey("b", 1, 0, 0), TurnKey("c", 1, 0, 0)
    for key in (first, second, other):
        sample(ledger, key)
    ledger.scored(first)
    ledger.ended("a", 1, final=True)
    ledger.ended("b", 1, final=True)
    assert next_work(ledger, worker=0, streams=False, max_tokens=99, longest=30, mode="group") is None
    ledger.scored(second)
    work = next_work(ledger, worker=0, streams=False, max_tokens=99, longest=30, mode="group")
    assert work == TurnWork(group_id="g", branches=["a/1/0", "b/1/0"], turns=[first, second], how="rows")


def test_a_backlog_is_packed_and_an_idle_worker_starts_a_running_rollout() -> None:
    ledger = TurnLedger({"g": ["a", "b", "c"]})
    for rollout in "ab":
        key = TurnKey(rollout, 1, 0, 0)
        sample(ledger, key)
        ledger.scored(key)
        ledger.ended(rollout, 1, final=True)
    running = TurnKey("c", 1, 0, 0)
    sample(ledger, running)
    ledger.scored(running)
    work = next_work(ledger, worker=0, streams=True, max_tokens=99, longest=30)
    assert work is not None and work.how == "rows" and len(work.branches) == 2
    ledger.begin(work, 0)
    work = next_work(ledger, worker=1, streams=True, max_tokens=99, longest=30)
    assert work is not None and work.how == "turns" and work.turns == [running]


def test_of_several_workers_none_takes_more_than_its_share_of_whole_sequences() -> None:
    ledger = TurnLedger({"g": list("abcd"), "h": ["e"]})
    for rollout in "abcde":
        sample(ledger, TurnKey(rollout, 1, 0, 0))
        ledger.scored(TurnKey(rollout, 1, 0, 0))
        ledger.ended(rollout, 1, final=True)

    def most(workers: int) -> int:
        work = next_work(ledger, worker=0, streams=False, max_tokens=99, longest=30, workers=workers)
        assert work is not None and work.how == "rows"
        return len(work.branches)

    assert [most(workers) for workers in (1, 2, 5)] == [4, 2, 1]


def test_one_rollout_streams_whatever_length_it_may_reach() -> None:
    ledger = TurnLedger({"g": ["a", "b"]})
    for rollout in "ab":
        sample(ledger, TurnKey(rollout, 1, 0, 0))
        ledger.scored(TurnKey(rollout, 1, 0, 0))
    work = next_work(ledger, worker=0, streams=True, max_tokens=8192, longest=32_768)
    assert work is not None and work.how == "turns"
    ledger.begin(work, 0)
    ledger.worked(work)
    assert next_work(ledger, worker=0, streams=True, max_tokens=8192, longest=32_768) is None  # the other waits


def test_a_turn_scored_twice_or_after_its_rollouts_end_is_refused() -> None:
    ledger = TurnLedger({"g": ["a"]})
    key = TurnKey("a", 1, 0, 0)
    sample(ledger, key)
    ledger.scored(key)
    with pytest.raises(LedgerError):
        ledger.scored(key)
    ledger.ended("a", 1, final=True)
    with pytest.raises(LedgerError):
        sample(ledger, TurnKey("a", 1, 0, 1))
    with pytest.raises(LedgerError):
        ledger.ended("a", 1, final=True)
