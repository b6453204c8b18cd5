"""The one optimizer step: the textbook's with one worker, and the same one with several."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.learn.rank_processes import RankProcesses
from thundersync.learn.collective import Ranks
from thundersync.learn.flat import FlatParameters
from thundersync.learn.optimizer import Optimizer
from thundersync.learn.settings import OptimSettings

STEPS = 6


def settings(**changes: Any) -> OptimSettings:
    values: dict[str, Any] = {
        "lr": 1e-2,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "scheduler": "cosine",
        "warmup_steps": 2,
        "max_steps": 10,
    }
    return OptimSettings(**(values | changes))


def module(dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 5)).to(dtype)


def gradient(step: int, size: int, rank: int, world: int) -> Tensor:
    """This rank's part of a gradient that is the same whatever the number of ranks; norms on both sides of the clip."""
    draw = torch.Generator().manual_seed(1000 + step)
    whole = torch.randn(size, generator=draw) * (0.01 if step % 2 else 1.0)
    share = torch.softmax(torch.randn(world, size, generator=draw), 0)
    return whole * share[rank] if world > 1 else whole


def train(ranks: Ranks, dtype: torch.dtype, **changes: Any) -> tuple[list[float], list[float], list[float]]:
    """Weights, norms and learning rates of some steps."""
    flat = FlatParameters(module(dtype))
    optimizer = Optimizer(flat, settings(**changes), ranks)
    norms, rates = [], []
    for step in range(STEPS):
        norm, finite = optimizer.reduce(gradient(step, flat.size, ranks.rank, ranks.world))
        assert finite
        norms.append(norm)
        rates.append(optimizer.step())
    return flat.buffer.float().tolist(), norms, rates


def relative(got: list[float], expected: list[float]) -> float:
    start = torch.cat([p.detach().flatten() for p in module().parameters()])
    got_update, update = torch.tensor(got) - start, torch.tensor(expected) - start
    return float((got_update - update).norm() / update.norm())


def test_one_worker_steps_as_the_textbook_bit_for_bit() -> None:
    reference = module()
    parameters = list(reference.parameters())
    adamw = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.01, fused=True)
    weights, norms, rates = train(Ranks.alone(), torch.float32, scheduler="constant", warmup_steps=0)
    flat = FlatParameters(module())
    for step in range(STEPS):
        for parameter, part in zip(parameters, flat.views(gradient(step, flat.size, 0, 1)), strict=True):
            parameter.grad = part.clone()
        norm = float(torch.linalg.vector_norm(gradient(step, flat.size, 0, 1)))
        if norm > 1.0:
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad.mul_(1.0 / (norm + 1e-6))
        adamw.step()
        assert norms[step] == norm
    # One flat tensor and several small ones may differ by how the last lanes of a vector are computed.
    expected = torch.cat([p.detach().flatten() for p in parameters])
    assert torch.allclose(torch.tensor(weights), expected, rtol=0, atol=1e-7)
    assert rates == [1e-2] * STEPS


@pytest.mark.parametrize("world", [2, 3])
def test_several_workers_make_the_step_of_one(rank_processes: RankProcesses, world: int) -> None:
    weights, norms, rates = train(Ranks.alone(), torch.float32)
    answers = rank_processes.run(world, train, torch.float32)
    assert all(answer == answers[0] for answer in answers)
    assert relative(answers[0][0], weights) <= 1e-6
    assert answers[0][1] == pytest.approx(norms, rel=1e-6)
    assert answers[0][2] == rates


SLOW: dict[str, Any] = {"lr": 1e-4, "scheduler": "constant", "warmup_steps": 0, "weight_decay": 0.0}


def train_slowly(ranks: Ranks) -> list[float]:
    return train(ranks, torch.bfloat16, **SLOW)[0]


def test_a_bfloat16_model_moves_by_steps_that_its_dtype_could_not_add(rank_processes: RankProcesses) -> None:
    start = torch.cat([p.detach().float().flatten() for p in module(torch.bfloat16).parameters()])
    alone, (first, second) = train_slowly(Ranks.alone()), rank_processes.run(2, train_slowly)
    assert first == second
    for weights in (alone, first):
        # One step of 1e-4 is below half of bfloat16's spacing at 0.06; the masters have added up six.
        assert (torch.tensor(weights) != start)[start.abs() > 0.06].any()


def test_a_master_copy_is_made_only_where_the_dtype_asks_for_it() -> None:
    flat = FlatParameters(module())
    assert Optimizer(flat, settings(), Ranks.alone()).master.data_ptr() == flat.buffer.data_ptr()
    assert Optimizer(FlatParameters(module(torch.bfloat16)), settings(), Ranks.alone()).master.dtype == torch.float32


def test_on_a_cpu_offloading_changes_nothing() -> None:
    assert train(Ranks.alone(), torch.float32, offload=True) == train(Ranks.alone(), torch.float32)


def poisoned(ranks: Ranks, bad: float) -> tuple[bool, bool, bool]:
    """One rank's gradient has one bad element; then a good step."""
    flat = FlatParameters(module())
    optimizer = Optimizer(flat, settings(warmup_steps=0), ranks)
    before = flat.buffer.clone()
    broken = gradient(0, flat.size, ranks.rank, ranks.world)
    if ranks.rank == ranks.world - 1:
        broken[3] = bad
    _, finite = optimizer.reduce(broken)
    with pytest.raises(RuntimeError, match="finite"):
        optimizer.step()
    optimizer.drop()
    untouched = torch.equal(flat.buffer, before)
    optimizer.reduce(gradient(1, flat.size, ranks.rank, ranks.world))
    optimizer.step()
    return finite, untouched, bool(flat.buffer.isfinite().all()) and not torch.equal(flat.buffer, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_on_one_worker_is_refused_by_all(
    rank_processes: RankProcesses, bad: float
) -> None:
    assert poisoned(Ranks.alone(), bad) == (False, True, True)
    assert rank_processes.run(2, poisoned, bad) == [(False, True, True)] * 2


def test_a_step_needs_a_gradient() -> None:
    optimizer = Optimizer(FlatParameters(module()), settings(), Ranks.alone())
    with pytest.raises(RuntimeError, match="reduced"):
        optimizer.step()
    optimizer.reduce(torch.ones(optimizer.flat.size))
    optimizer.drop()
    with pytest.raises(RuntimeError, match="reduced"):
        optimizer.step()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_in_host_memory_make_the_step_of_masters_on_the_gpu(dtype: torch.dtype) -> None:
    weights = []
    for offload in (False, True):
        flat = FlatParameters(module(dtype).cuda())
        optimizer = Optimizer(flat, settings(offload=offload), Ranks.alone())
        assert optimizer.master.device.type == ("cpu" if offload else "cuda")
        for step in range(STEPS):
            optimizer.reduce(gradient(step, flat.size, 0, 1).cuda())
            optimizer.step()
        weights.append(flat.buffer.float().tolist())
    if dtype == torch.float32:
        assert relative(weights[1], weights[0]) <= 1e-5
    else:  # where a master lies between two bfloat16 values, rounding may go either way
        assert torch.tensor(weights[1]).allclose(torch.tensor(weights[0]), rtol=2**-7, atol=1e-6)
