"""What the trainer workers say to each other is exact, ordered and bounded; real processes, gloo."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.learn.rank_processes import RankProcesses
from thundersync.learn import collective
from thundersync.learn.collective import Ranks, RanksLost


def given(rank: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 + rank)) * 10.0**rank


def reduced(ranks: Ranks, size: int, slab: int) -> tuple[int, list[float], bool]:
    flat = given(ranks.rank, size)
    before, collective.SLAB = collective.SLAB, slab  # the process goes on to other tests, perhaps beside other ranks
    own = ranks.reduce_scatter(flat)
    collective.SLAB = before
    return ranks.own(size).start, own.tolist(), own.numel() == 0 or own.data_ptr() == flat[ranks.own(size)].data_ptr()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("size", "slab"), [(1, 8), (12, 8), (101, 8), (101, 1000)])
def test_every_rank_gets_its_slice_of_the_sum_in_the_order_of_the_ranks(
    rank_processes: RankProcesses, world: int, size: int, slab: int
) -> None:
    expected = given(0, size)
    for rank in range(1, world):
        expected += given(rank, size)
    answers = rank_processes.run(world, reduced, size, slab)
    assert sum(len(values) for _, values, _ in answers) == size
    for start, values, in_place in answers:
        assert in_place
        assert torch.equal(torch.tensor(values), expected[start : start + len(values)])


def gathered(ranks: Ranks, size: int, dtype: torch.dtype) -> list[float]:
    flat = torch.full((size,), -1.0, dtype=dtype)
    flat[ranks.own(size)] = ranks.rank
    ranks.all_gather(flat)
    return flat.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 100])
def test_gathering_fills_every_rank_with_everyones_slice(
    rank_processes: RankProcesses, size: int, dtype: torch.dtype
) -> None:
    answers = rank_processes.run(3, gathered, size, dtype)
    assert answers[0] == answers[1] == answers[2]
    assert answers[0] == sorted(answers[0])
    assert min(answers[0]) >= 0.0


def totals(ranks: Ranks, size: int) -> tuple[float, list[float], bool]:
    flat = given(ranks.rank, size)
    result = ranks.total(flat)
    return ranks.sum(0.1 * (ranks.rank + 1)), result.tolist(), torch.equal(flat, given(ranks.rank, size))


def test_a_total_is_equal_on_all_ranks_and_leaves_its_terms(rank_processes: RankProcesses) -> None:
    answers = rank_processes.run(3, totals, 50)
    assert answers[0] == answers[1] == answers[2]
    total, values, untouched = answers[0]
    assert total == (0.1 + 0.2) + 0.1 * 3
    assert torch.equal(torch.tensor(values), given(0, 50) + given(1, 50) + given(2, 50))
    assert untouched


def test_one_worker_alone_copies_nothing() -> None:
    ranks = Ranks.join(0, 1, "no file is made", "cpu", 1.0)
    flat = torch.ones(7)
    assert ranks.reduce_scatter(flat) is flat
    assert ranks.total(flat) is flat
    assert ranks.sum(0.1) == 0.1
    assert ranks.own(7) == slice(0, 7)
    ranks.all_gather(flat)
    ranks.close()


def left_alone(ranks: Ranks) -> str:
    ranks.sum(1.0)  # both have met before one leaves
    if ranks.rank == 1:
        return ""  # and closes the group
    try:
        ranks.reduce_scatter(torch.ones(10))
    except RanksLost as error:
        return str(error)
    return "nothing happened"


def test_a_rank_that_goes_away_is_an_error_on_the_others(rank_processes: RankProcesses) -> None:
    told, _ = rank_processes.run(2, left_alone)
    assert "trainer worker 0 of 2 could not reduce with the others" in told


def test_a_rank_that_nobody_meets_gives_up_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # what joining sets is put back afterwards
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    with pytest.raises(RanksLost, match="could not meet"):
        Ranks.join(0, 2, str(tmp_path / "meeting"), "cpu", timeout_s=0.5)
