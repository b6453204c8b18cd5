import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thundersync.core import ready_queue
from thundersync.core.advantage import AdvantageRule
from thundersync.core.holds import settlements
from thundersync.core.ledger import Ledger
from thundersync.core.members import Hold, MemberState
from thundersync.core.objective import Objective, Tally
from thundersync.core.ready_queue import PartRoom
from thundersync.errors import LedgerError

OBJECTIVES = {
    "grpo": Objective(),
    "dr_grpo": Objective(rule=AdvantageRule(norm_by_std=False), loss_agg="constant", constant=20.0),
    "rloo": Objective(rule=AdvantageRule(norm_by_std=False, leave_one_out=True), loss_agg="seq_mean_token_sum"),
    "reinforce_pp": Objective(cohort="step"),
    "kl": Objective(kl_coef=0.1),
    "step_kl": Objective(cohort="step", kl_coef=0.1),
}


def a_ledger(
    groups: int = 2,
    size: int = 4,
    min_group_size: int = 2,
    objective: Objective = OBJECTIVES["grpo"],
    skip_flat: bool = False,
) -> Ledger:
    return Ledger(
        {f"g{g}": [f"g{g}-{i}" for i in range(size)] for g in range(groups)},
        objective=objective,
        min_group_size=min_group_size,
        skip_flat=skip_flat,
    )


def score(ledger: Ledger, rollout_id: str, reward: float, tokens: int = 10) -> None:
    ledger.scored(rollout_id, reward, longest=tokens, sampled_tokens=tokens)


def next_pass(ledger: Ledger, max_parts: int = 99, max_tokens: int = 1000, worker: int = 0) -> ready_queue.Pass | None:
    return ready_queue.next_pass(ledger, max_tokens=max_tokens, room=PartRoom(most=max_parts), worker=worker)


def begin(ledger: Ledger, ids: list[str], *, in_part: bool, worker: int = 0) -> None:
    ledger.begin(ids, worker=worker, in_part=in_part)


def test_a_reward_reported_twice_is_refused() -> None:
    ledger = a_ledger()
    score(ledger, "g0-0", 1.0)
    with pytest.raises(LedgerError, match="g0-0 is ready, expected pending"):
        score(ledger, "g0-0", 1.0)


def test_a_reward_after_the_groups_close_is_refused() -> None:
    ledger = a_ledger(groups=1)
    for i in range(3):
        score(ledger, f"g0-{i}", 1.0)
    ledger.failed("g0-3")
    assert ledger.closings()[0].flat
    with pytest.raises(LedgerError):
        score(ledger, "g0-3", 1.0)


def test_an_unknown_rollout_is_refused() -> None:
    with pytest.raises(LedgerError, match="does not belong"):
        score(a_ledger(), "g7-0", 1.0)


def test_the_first_landed_reward_is_the_base_of_the_parts() -> None:
    ledger = a_ledger(groups=1)
    score(ledger, "g0-2", 5.0)
    score(ledger, "g0-0", 1.0)
    chosen = next_pass(ledger)
    assert chosen is not None
    assert chosen.base == 5.0
    assert chosen.advantages is None


def test_a_complete_flat_group_is_never_worked() -> None:
    ledger = a_ledger(groups=1)
    for i in range(4):
        score(ledger, f"g0-{i}", 1.0)
    assert next_pass(ledger) is None
    (closing,) = ledger.closings()
    assert closing.flat
    assert closing.join is None
    assert len(closing.skipped) == 4
    assert ledger.settled


def test_known_advantages_go_first_then_mixed_groups_with_parts_then_new_ones() -> None:
    ledger = a_ledger(groups=4)
    score(ledger, "g0-0", 1.0)  # would open a part, may turn out flat
    score(ledger, "g1-0", 1.0)
    score(ledger, "g1-1", 0.0)  # would open a part, mixed
    score(ledger, "g2-0", 1.0)
    begin(ledger, ["g2-0"], in_part=True)
    ledger.worked(["g2-0"])
    score(ledger, "g2-1", 1.0)  # holds a part
    for i in range(4):
        score(ledger, f"g3-{i}", float(i == 0))  # complete
    order = []
    while (chosen := next_pass(ledger)) is not None:
        order.append((chosen.group_id, chosen.advantages is not None))
        begin(ledger, chosen.rollout_ids, in_part=chosen.advantages is None)
        ledger.worked(chosen.rollout_ids)
    assert order == [("g3", True), ("g2", False), ("g1", False), ("g1", False), ("g0", False)]


def test_without_room_for_parts_a_piece_waits_until_its_group_is_complete() -> None:
    ledger = a_ledger(groups=1)
    score(ledger, "g0-0", 1.0)
    assert next_pass(ledger, max_parts=0) is None
    for i in range(1, 4):
        score(ledger, f"g0-{i}", 0.0)
    chosen = next_pass(ledger, max_parts=0)
    assert chosen is not None
    assert chosen.advantages is not None


def test_the_last_part_serves_one_reward_and_the_others_wait_until_their_group_is_complete() -> None:
    ledger = a_ledger(groups=2)
    for group in ("g0", "g1"):
        score(ledger, f"{group}-0", 0.0)
        score(ledger, f"{group}-1", 1.0)
        score(ledger, f"{group}-2", 0.0)
    chosen = next_pass(ledger, max_parts=1)
    assert chosen is not None
    assert (chosen.rollout_ids, chosen.advantages) == (["g0-0", "g0-2"], None)
    begin(ledger, chosen.rollout_ids, in_part=True)
    assert next_pass(ledger, max_parts=1) is None
    assert next_pass(ledger, max_parts=2).rollout_ids == ["g0-1"]  # type: ignore[union-attr]
    ledger.worked(chosen.rollout_ids)
    score(ledger, "g0-3", 1.0)
    chosen = next_pass(ledger, max_parts=1)
    assert chosen is not None
    assert (chosen.rollout_ids, chosen.advantages is None) == (["g0-1", "g0-3"], False)
    begin(ledger, chosen.rollout_ids, in_part=False)
    ledger.worked(chosen.rollout_ids)
    assert ledger.closings()[0].cohort_id == "g0"
    assert next_pass(ledger, max_parts=1).rollout_ids == ["g1-0", "g1-2"]  # type: ignore[union-attr]


SHARED = PartRoom(most=99, tokens=30, spare=10)
"""A part is as large as the activations of 30 tokens."""


def test_where_parts_share_memory_with_passes_a_pass_beside_a_part_is_smaller() -> None:
    """A lazy step's largest pass would have 4 x 20 tokens: beside a part it may have 80 + 10 - 30."""
    ledger = a_ledger(groups=2)
    score(ledger, "g0-0", 0.0, tokens=20)
    chosen = ready_queue.next_pass(ledger, max_tokens=1000, room=SHARED)
    assert chosen is not None
    begin(ledger, chosen.rollout_ids, in_part=True)
    ledger.worked(chosen.rollout_ids)
    for i in range(4):
        score(ledger, f"g1-{i}", float(i == 0), tokens=20)
    chosen = ready_queue.next_pass(ledger, max_tokens=1000, room=SHARED)
    assert chosen is not None
    assert len(chosen.rollout_ids) == 3
    assert len(next_pass(ledger).rollout_ids) == 4  # type: ignore[union-attr]


@pytest.mark.parametrize(("longest", "streams"), [(20, False), (40, True), (90, False), (300, False)])
def test_where_parts_share_memory_a_part_is_opened_if_the_longest_piece_still_fits_beside_it(
    longest: int, streams: bool
) -> None:
    ledger = a_ledger(groups=2, size=2)
    score(ledger, "g0-0", 0.0, tokens=longest)
    room = PartRoom(most=99, tokens=50, spare=10)  # of a lazy step's 2 x longest
    assert (ready_queue.next_pass(ledger, max_tokens=100, room=room) is not None) == streams


def test_where_parts_share_memory_a_piece_longer_than_a_pass_streams_too() -> None:
    ledger = a_ledger(groups=1)
    score(ledger, "g0-0", 0.0, tokens=300)
    room = PartRoom(most=99, tokens=2, spare=10)
    chosen = ready_queue.next_pass(ledger, max_tokens=100, room=room)
    assert chosen is not None and chosen.advantages is None


def test_where_parts_share_memory_a_longer_piece_that_comes_later_waits_for_its_group() -> None:
    ledger = a_ledger(groups=1, size=8)
    score(ledger, "g0-0", 0.0, tokens=50)
    room = PartRoom(most=99, tokens=100, spare=0)
    chosen = ready_queue.next_pass(ledger, max_tokens=400, room=room)
    assert chosen is not None
    begin(ledger, chosen.rollout_ids, in_part=True)
    ledger.worked(chosen.rollout_ids)
    score(ledger, "g0-1", 0.0, tokens=400)
    assert ready_queue.next_pass(ledger, max_tokens=400, room=room) is None  # 400 + 100 is more than lazy's 400
    score(ledger, "g0-2", 0.0, tokens=40)
    chosen = ready_queue.next_pass(ledger, max_tokens=400, room=room)
    assert chosen is not None and chosen.rollout_ids == ["g0-2"]


def test_a_pass_keeps_within_its_tokens_but_takes_one_piece_of_any_length() -> None:
    ledger = a_ledger(groups=1)
    for i, tokens in enumerate([700, 40, 400, 30]):
        score(ledger, f"g0-{i}", float(i == 0), tokens=tokens)
    chosen = next_pass(ledger, max_tokens=500)
    assert chosen is not None
    assert chosen.rollout_ids == ["g0-0"]
    begin(ledger, chosen.rollout_ids, in_part=False)
    chosen = next_pass(ledger, max_tokens=500)
    assert chosen is not None
    assert chosen.rollout_ids == ["g0-2"]


@pytest.mark.parametrize("whole", [True, False])
def test_of_several_workers_none_takes_more_than_its_share_of_what_is_ready(whole: bool) -> None:
    ledger = a_ledger(groups=2, size=8)
    for i in range(7):
        score(ledger, f"g0-{i}", float(whole and i == 0))
    score(ledger, "g1-0", 1.0, tokens=30)  # 100 tokens are ready, or 110
    if whole:
        score(ledger, "g0-7", 0.0)

    def most(workers: int) -> int:
        chosen = ready_queue.next_pass(ledger, max_tokens=1000, room=PartRoom(most=9), workers=workers)
        assert chosen is not None and (chosen.advantages is not None) == whole
        return len(chosen.rollout_ids)

    assert [most(workers) for workers in (1, 2, 3, 4, 20)] == [8 if whole else 7, 5, 3, 2, 1]


def test_lazy_waits_for_the_last_reward_of_the_step() -> None:
    ledger = a_ledger(groups=2)
    for i in range(4):
        score(ledger, f"g0-{i}", float(i == 0))
    assert ready_queue.next_pass(ledger, max_tokens=99, room=PartRoom(most=9), mode="lazy") is None
    for i in range(4):
        score(ledger, f"g1-{i}", 0.0)
    chosen = ready_queue.next_pass(ledger, max_tokens=99, room=PartRoom(most=9), mode="lazy")
    assert chosen is not None
    assert chosen.group_id == "g0"


def test_group_mode_waits_for_the_last_reward_of_a_group_and_works_it_with_final_advantages() -> None:
    ledger = a_ledger(groups=2)
    for i in range(3):
        score(ledger, f"g0-{i}", float(i == 0))
    score(ledger, "g1-0", 1.0)
    assert ready_queue.next_pass(ledger, max_tokens=99, room=PartRoom(most=9), mode="group") is None
    score(ledger, "g0-3", 0.0)
    chosen = ready_queue.next_pass(ledger, max_tokens=99, room=PartRoom(most=9), mode="group")
    assert chosen is not None
    assert chosen.group_id == "g0"
    assert chosen.advantages is not None


def test_a_group_that_shrank_too_far_is_dropped_and_counts_nowhere() -> None:
    ledger = a_ledger(groups=1, size=3, min_group_size=2)
    score(ledger, "g0-0", 1.0)
    ledger.failed("g0-1")
    ledger.failed("g0-2")
    (closing,) = ledger.closings()
    assert closing.dropped
    assert closing.join is None
    assert ledger.tally() == Tally(tokens=0, rollouts=0, rewards=[])
    assert ledger.settled


def test_denominators_count_flat_groups_but_no_failed_member() -> None:
    ledger = a_ledger(groups=2, size=2)
    score(ledger, "g0-0", 1.0, tokens=3)
    score(ledger, "g0-1", 1.0, tokens=4)
    score(ledger, "g1-0", 1.0, tokens=5)
    ledger.failed("g1-1")
    assert ledger.tally() == Tally(tokens=7, rollouts=2, rewards=[1.0, 1.0])


@settings(deadline=None)
@given(
    size=st.integers(1, 16),
    groups=st.integers(1, 3),
    data=st.data(),
    parts=st.integers(0, 6),
    shared=st.sampled_from([0.0, 15.0, 40.0]),
    max_tokens=st.sampled_from([1, 40, 10_000]),
    workers=st.integers(1, 3),
    name=st.sampled_from(sorted(OBJECTIVES)),
    skip_flat=st.booleans(),
)
def test_every_order_of_events_settles_and_gives_each_voter_its_advantage(
    size: int,
    groups: int,
    data: st.DataObject,
    parts: int,
    shared: float,
    max_tokens: int,
    workers: int,
    name: str,
    skip_flat: bool,
) -> None:
    """Random arrivals, failures and workers: each voter's total weight is its textbook advantage, its KL weight counts
    exactly once, and nothing is left."""
    skip_flat = skip_flat and OBJECTIVES[name].cohort == "group"  # the other combination is refused at start
    ledger = a_ledger(groups, size, objective=OBJECTIVES[name], skip_flat=skip_flat)
    ids = [f"g{g}-{i}" for g in range(groups) for i in range(size)]
    arrivals = data.draw(st.permutations(ids))
    kinds = st.sampled_from([0.0, 1.0, 0.5, 1000.0, 1001.0])
    fate = {i: data.draw(st.one_of(st.none(), kinds), label=i) for i in ids}
    weight: dict[str, float] = {}
    known: dict[str, int] = dict.fromkeys(ids, 0)
    in_part: dict[tuple[str, int], list[str]] = {}
    held: dict[str, str] = {}
    unfinished: list[Hold] = []

    def work(worker: int) -> bool:
        room = PartRoom(most=parts, tokens=shared, spare=10)
        chosen = ready_queue.next_pass(ledger, max_tokens=max_tokens, room=room, worker=worker, workers=workers)
        if chosen is None:
            return False
        if chosen.held:
            (rollout_id,) = chosen.rollout_ids
            hold = ledger.hold(rollout_id, name=f"{rollout_id}/{attempt[rollout_id]}", worker=worker)
            held[hold.name] = rollout_id
            unfinished.append(hold)
            return True
        begin(ledger, chosen.rollout_ids, in_part=chosen.advantages is None, worker=worker)
        for index, rollout_id in enumerate(chosen.rollout_ids):
            known[rollout_id] += 1
            if chosen.advantages is None:
                assert fate[rollout_id] == chosen.reward
                in_part.setdefault((chosen.cohort_id, worker), []).append(rollout_id)
            else:
                weight[rollout_id] = chosen.advantages[index]
        ledger.worked(chosen.rollout_ids)
        return True

    def settle() -> None:
        for settlement in settlements(ledger):
            rollout_id = held.pop(settlement.hold)
            if settlement.advantage is None:
                in_part.setdefault((settlement.cohort_id, settlement.worker), []).append(rollout_id)
            elif settlement.hold == f"{rollout_id}/{attempt[rollout_id]}":
                weight[rollout_id] = settlement.advantage
            else:
                assert settlement.advantage == 0.0  # of an attempt that failed

    def close() -> None:
        settle()
        for closing in ledger.closings():
            for worker in closing.workers:
                for rollout_id in in_part.pop((closing.cohort_id, worker), []):
                    reward = fate[rollout_id]
                    assert reward is not None
                    weight[rollout_id] = closing.join.advantage(reward) if closing.join else 0.0

    attempt = dict.fromkeys(ids, 1)
    for rollout_id in arrivals:
        reward = fate[rollout_id]
        while not ledger.objective.weights(1).known and data.draw(st.booleans(), label="content first"):
            ledger.content(rollout_id, longest=10)
            if data.draw(st.booleans()):
                work(data.draw(st.integers(0, workers - 1)))
            if unfinished and data.draw(st.booleans()):
                unfinished.pop().done = True
            if data.draw(st.booleans(), label="the checker fails"):
                ledger.withdrawn(rollout_id)
                attempt[rollout_id] += 1
            else:
                break
        if reward is None:
            ledger.failed(rollout_id)
        else:
            score(ledger, rollout_id, reward)
        if data.draw(st.booleans()):
            work(data.draw(st.integers(0, workers - 1)))
        assert all(ready_queue.parts_in_use(ledger, worker) <= parts for worker in range(workers))
        close()
    while unfinished or any(work(worker) for worker in range(workers)):
        while unfinished:
            unfinished.pop().done = True
        close()
    close()
    assert ledger.settled, ledger.owes()
    assert not in_part
    assert not held
    for cohort in ledger.cohorts:
        for group in cohort.groups:
            voters = [m for m in group.members.values() if m.state is not MemberState.FAILED]
            for member in voters:
                counts = not group.dropped
                expected = ledger.advantage(member.rollout_id) if counts and ledger.signal(cohort) else 0.0
                assert (member.rollout_id in weight) or expected == 0.0  # known to be zero: skipped
                assert weight.get(member.rollout_id, 0.0) == pytest.approx(expected, abs=1e-9, rel=1e-9)
                if ledger.objective.weights(1).known:
                    flat = len(set(group.rewards)) < 2
                    assert known[member.rollout_id] == int(counts and not (skip_flat and flat))


def test_members_that_failed_are_masked_by_the_published_rule() -> None:
    """Rewards 1, 1, 0, 0 of which the second failed give 0.667, -0.333, -0.333 without std."""
    ledger = a_ledger(1, 4, objective=OBJECTIVES["dr_grpo"])
    for i, reward in enumerate([1.0, None, 0.0, 0.0]):
        if reward is None:
            ledger.failed(f"g0-{i}")
        else:
            score(ledger, f"g0-{i}", reward)
    assert [round(ledger.advantage(f"g0-{i}"), 3) for i in (0, 2, 3)] == [0.667, -0.333, -0.333]


def test_a_worker_prefers_cohorts_that_it_holds_to_those_that_another_holds() -> None:
    ledger = a_ledger(groups=2)
    score(ledger, "g0-0", 1.0)
    begin(ledger, ["g0-0"], in_part=True, worker=1)
    ledger.worked(["g0-0"])
    score(ledger, "g0-1", 0.0)
    score(ledger, "g1-0", 0.0)
    chosen = next_pass(ledger, worker=0)
    assert chosen is not None
    assert chosen.group_id == "g1"
    chosen = next_pass(ledger, worker=1)
    assert chosen is not None
    assert chosen.group_id == "g0"


def test_the_watchdog_names_what_is_missing() -> None:
    ledger = a_ledger(groups=1, size=2)
    score(ledger, "g0-0", 1.0)
    assert ledger.owes() == "g0-0 ready, g0-1 pending"
