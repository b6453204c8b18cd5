"""Every way a step's gradient can take equals the one-piece reference: relative L2 at most 5e-6 in float32."""

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.learn import replay as rp
from tests.learn import textbook
from tests.learn.test_objectives import KINDS
from tests.tiny import tiny_model
from thundersync.core.advantage import AdvantageRule
from thundersync.core.objective import Objective
from thundersync.core.types import Scored, StreamMode
from thundersync.learn import messages as m
from thundersync.learn.worker import Worker

TOLERANCE = 5e-6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), std=0.1)


@pytest.fixture(scope="module")
def worker(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    worker = Worker()
    worker.answer(rp.setup(model, tmp_path_factory.mktemp("arena") / "weights"))
    yield worker


async def streamed(worker: Worker, step: rp.RecordedStep, seed: int, **options: object) -> torch.Tensor:
    order = list(range(len(step.rollouts)))
    random.Random(seed).shuffle(order)
    ledger, _ = await rp.replay(worker, step, order=order, **options)  # type: ignore[arg-type]
    return rp.gradient_of(worker, ledger)


@pytest.mark.parametrize("seed", [42, 43, 44])
@pytest.mark.parametrize(
    "rewards", [(0.0, 1.0), (0.0, 0.25, 0.5, 1.0), (999.0, 1000.0, 1001.0)], ids=["binary", "graded", "offset"]
)
async def test_streamed_gradient_equals_the_one_piece_gradient(
    worker: Worker, model: Path, seed: int, rewards: tuple[float, ...]
) -> None:
    step = rp.record(seed, rewards=rewards, size=6)
    expected = rp.one_piece_gradient(model, step)
    for order in range(3):
        assert rp.relative_l2(await streamed(worker, step, order), expected) < TOLERANCE


@pytest.mark.parametrize("options", [
    {"mode": "lazy"},
    {"mode": "group"},
    {"max_tokens": 1},
    {"max_parts": 0},
    {"max_parts": 1},
    {"max_parts": 2},
    {"eager": False},
    {"objective": Objective(loss_agg="seq_mean_token_mean")},
    {"objective": Objective(loss_agg="seq_mean_token_sum")},
    {"objective": Objective(rule=AdvantageRule(norm_by_std=False))},
    {"objective": Objective(rule=AdvantageRule(std_unbiased=False, eps=1e-4))},
], ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items())[:40])  # fmt: skip
@pytest.mark.parametrize("seed", [42, 43])
async def test_every_path_and_option_equals_the_one_piece_gradient(
    worker: Worker, model: Path, seed: int, options: dict[str, object]
) -> None:
    step = rp.record(seed, rewards=(0.0, 0.5, 1.0), failed=0.1, forked=0.2)
    objective = options.get("objective", Objective())
    assert isinstance(objective, Objective) and objective.rule is not None
    expected = rp.one_piece_gradient(model, step, loss_agg=objective.loss_agg, rule=objective.rule)
    assert rp.relative_l2(await streamed(worker, step, seed, **options), expected) < TOLERANCE


async def test_temperature_divides_the_logits_in_the_gradient_too(model: Path, tmp_path: Path) -> None:
    worker = Worker()
    worker.answer(rp.setup(model, tmp_path / "weights", terms=m.Terms(temperature=0.7)))
    step = rp.record(5)
    expected = rp.one_piece_gradient(model, step, temperature=0.7, importance_cap=None)
    assert rp.relative_l2(await streamed(worker, step, 1), expected) < TOLERANCE


async def test_a_model_that_cannot_be_cut_gives_the_same_gradient(model: Path, tmp_path: Path) -> None:
    worker = Worker()
    worker.answer(rp.setup(model, tmp_path / "weights"))
    worker._gradient._prompts.shares = False
    step = rp.record(6)
    assert rp.relative_l2(await streamed(worker, step, 1), rp.one_piece_gradient(model, step)) < TOLERANCE


async def test_an_untied_head_changes_nothing(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "untied", tie=False, seed=3, std=0.1)
    worker = Worker()
    worker.answer(rp.setup(model, tmp_path / "weights"))
    step = rp.record(7)
    assert rp.relative_l2(await streamed(worker, step, 1), rp.one_piece_gradient(model, step)) < TOLERANCE


async def test_a_flat_step_has_a_gradient_of_exactly_zero(worker: Worker) -> None:
    step = rp.record(8, rewards=(1.0,))
    _, link = await rp.replay(worker, step)
    worked = [r for r in link.requests if isinstance(r, m.RunPass)]
    assert all(not r.direct for r in worked)  # early pieces may be worked in the hope of signal; none of it counts
    assert worker._gradient.finish([1.0]).abs().max() == 0.0
    worker._gradient.discard()


async def test_the_same_order_gives_the_same_bits(worker: Worker) -> None:
    step = rp.record(9, rewards=(0.0, 0.5, 1.0))
    assert torch.equal(await streamed(worker, step, 1), await streamed(worker, step, 1))


async def test_parts_are_given_back_at_close(worker: Worker) -> None:
    await streamed(worker, rp.record(10, rewards=(0.0, 0.5, 1.0)), 1)
    assert worker._gradient._pool.lent == 0


@pytest.fixture(scope="module")
def workers(worker: Worker, model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Worker]:
    others = []
    for rank in (1, 2):
        other = Worker()
        other.answer(rp.setup(model, tmp_path_factory.mktemp(f"arena-{rank}") / "weights"))
        others.append(other)
    return [worker, *others]


@settings(deadline=None, max_examples=40)
@given(
    data=st.data(),
    seed=st.integers(0, 10_000),
    size=st.integers(1, 16),
    groups=st.integers(1, 3),
    count=st.integers(1, 3),
    kind=st.sampled_from(["grpo", "dr_grpo", "rloo", "reinforce_pp"]),
)
async def test_any_step_streams_exactly_over_any_number_of_workers(
    workers: list[Worker], model: Path, data: st.DataObject, seed: int, size: int, groups: int, count: int, kind: str
) -> None:
    rewards = data.draw(st.sampled_from([(0.0, 1.0), (0.0, 0.3, 0.7, 1.0), (999.0, 1000.0, 1001.0), (2.0,)]))
    step = rp.record(seed, groups=groups, size=size, rewards=rewards, failed=0.15, length=(1, 12))
    ledger, _ = await rp.replay(
        workers[:count],
        step,
        order=data.draw(st.permutations(range(len(step.rollouts)))),
        objective=KINDS[kind][0],
        max_parts=data.draw(st.sampled_from([0, 1, 2, 4, 100])),
        max_tokens=data.draw(st.sampled_from([1, 30, 1000])),
    )
    got = rp.gradient_of(workers[:count], ledger)
    if ledger.empty:
        assert got.abs().max() == 0.0
    else:
        expected = textbook.gradient(model, step, kind=kind, agg=KINDS[kind][1], constant=40.0, mismatch="tis")
        assert rp.relative_l2(got, expected) < TOLERANCE


async def test_spilled_parts_give_the_same_bits_as_resident_ones(model: Path, worker: Worker, tmp_path: Path) -> None:
    spilling = Worker()
    spilling.answer(rp.setup(model, tmp_path / "weights", resident_parts=1))
    for seed in (42, 43):
        step = rp.record(seed, rewards=(0.0, 0.5, 1.0), size=6)
        assert torch.equal(await streamed(spilling, step, seed), await streamed(worker, step, seed))


@pytest.mark.parametrize("block_tokens", [1, 3, 7])
async def test_long_rows_cut_into_blocks_give_the_same_gradient(model: Path, tmp_path: Path, block_tokens: int) -> None:
    """Every destination of every block: parts, the step's sums, prompts, and a term of its own sum."""
    objective = Objective(step_std=AdvantageRule(), rule=AdvantageRule(norm_by_std=False), entropy_coef=0.05)
    terms = m.Terms(entropy=True, sums=objective.sums)
    worker = Worker()
    worker.answer(rp.setup(model, tmp_path / "weights", terms=terms, block_tokens=block_tokens))
    for seed in (42, 43):
        step = rp.record(seed, rewards=(0.0, 0.5, 1.0), forked=0.2, groups=2, length=(5, 16))
        expected = textbook.gradient(model, step, kind="batch", agg="token_mean", entropy_coef=0.05)
        for parts in (100, 0):
            got = await streamed(worker, step, seed, objective=objective, max_parts=parts)
            assert rp.relative_l2(got, expected) < TOLERANCE


@pytest.mark.parametrize("kind", ["grpo", "rloo", "reinforce_pp"])
async def test_gradients_held_while_checkers_run_go_where_their_rewards_say(
    workers: list[Worker], model: Path, kind: str
) -> None:
    for seed in (42, 43, 44):
        step = rp.record(seed, rewards=(0.0, 0.5, 1.0), failed=0.1, forked=0.1, size=5)
        expected = textbook.gradient(model, step, kind=kind, agg=KINDS[kind][1], mismatch="tis")
        for count, parts in ((1, 100), (2, 4), (1, 1)):
            ledger, link = await rp.replay(
                workers[:count], step, objective=KINDS[kind][0], content=True, max_parts=parts, max_tokens=30
            )
            assert any(isinstance(request, m.RunHeld) for request in link.requests)
            assert rp.relative_l2(rp.gradient_of(workers[:count], ledger), expected) < TOLERANCE


async def test_a_reversed_order_gives_the_same_gradient_up_to_rounding(worker: Worker) -> None:
    step = rp.record(11, rewards=(0.0, 0.5, 1.0), size=8)
    forward, _ = await rp.replay(worker, step)
    first = rp.gradient_of(worker, forward)
    backward, _ = await rp.replay(worker, step, order=list(reversed(range(len(step.rollouts)))))
    assert rp.relative_l2(rp.gradient_of(worker, backward), first) < TOLERANCE


@pytest.mark.parametrize("seed", [42, 43, 44])
async def test_stream_and_lazy_end_a_recorded_step_with_equal_weights(model: Path, tmp_path: Path, seed: int) -> None:
    """Two steps in common, then the third by either mode: relative L2 of the update at most 1e-5 in float32."""
    updates = []
    modes: tuple[StreamMode, ...] = ("stream", "lazy")
    for mode in modes:
        worker = Worker()
        worker.answer(rp.setup(model, tmp_path / f"weights-{mode}"))
        for common in (seed + 100, seed + 200):
            await commit(worker, rp.record(common, rewards=(0.0, 0.5, 1.0), size=8), mode="lazy")
        updates.append(await commit(worker, rp.record(seed, rewards=(0.0, 0.5, 1.0), size=8), mode=mode))
    assert rp.relative_l2(updates[0], updates[1]) < 1e-5


@pytest.mark.parametrize("seed", [42, 43, 44])
async def test_on_adams_very_first_step_the_modes_agree_as_far_as_its_sign_like_update_allows(
    model: Path, tmp_path: Path, seed: int
) -> None:
    """With empty moments the update is g / (|g| + eps), nearly a sign: gradients that are zero up to rounding
    decide it, so equal gradients (tested above) give updates that differ by up to 2e-4 in relative L2."""
    updates = []
    modes: tuple[StreamMode, ...] = ("stream", "lazy")
    for mode in modes:
        worker = Worker()
        worker.answer(rp.setup(model, tmp_path / f"weights-{mode}"))
        updates.append(await commit(worker, rp.record(seed, rewards=(0.0, 0.5, 1.0), size=8), mode=mode))
    assert rp.relative_l2(updates[0], updates[1]) < 2e-4


async def commit(worker: Worker, step: rp.RecordedStep, *, mode: StreamMode) -> torch.Tensor:
    """Work one recorded step to its commit; gives the change of the weights [P]."""
    before = worker._flat.buffer.clone()
    ledger, _ = await rp.replay(worker, step, mode=mode)
    committed = worker.answer(m.Commit(scales=ledger.objective.scales(ledger.tally())))
    assert isinstance(committed, m.Committed)
    assert committed.finite
    return worker._flat.buffer - before


async def test_bfloat16_weights_stream_into_float32_sums(model: Path, tmp_path: Path) -> None:
    """Against the float32 truth, the streamed bfloat16 gradient is as accurate as the one-piece bfloat16 gradient."""
    worker = Worker()
    worker.answer(rp.setup(model, tmp_path / "weights", dtype="bfloat16"))
    step = rp.record(12)
    got = await streamed(worker, step, 1)
    assert got.dtype == torch.float32
    truth = rp.one_piece_gradient(model, step)
    stock = rp.relative_l2(rp.one_piece_gradient(model, step, dtype=torch.bfloat16), truth)
    assert rp.relative_l2(got, truth) < 1.25 * stock
    committed = worker.answer(m.Commit(scales=[1.0]))
    assert isinstance(committed, m.Committed)


async def test_a_piece_whose_advantage_is_known_to_be_zero_is_never_worked(worker: Worker) -> None:
    step = rp.record(13, groups=1, size=3, rewards=(0.0,))
    rewards = dict(zip([r.rollout_id for r in step.rollouts], [0.0, 1.0, 0.5], strict=True))
    rollouts = [
        msgspec.structs.replace(r, outcome=Scored(reward=rewards[r.rollout_id], stop="submitted"))
        for r in step.rollouts
    ]
    step = msgspec.structs.replace(step, rollouts=rollouts)
    _, link = await rp.replay(worker, step, mode="lazy")
    assert sum(len(r.rows) for r in link.requests if isinstance(r, m.RunPass)) == 2
    worker._gradient.discard()


async def test_in_float64_parts_and_direct_sums_agree_to_rounding(model: Path) -> None:
    """The same passes, once into parts that are joined and once under textbook advantages: 1e-11 relative L2."""
    for seed in (42, 43, 44):
        for rewards in ((0.0, 1.0), (0.0, 0.25, 1.0), (999.0, 1000.0, 1001.0)):
            step = rp.record(seed, rewards=rewards, size=5)
            gradients = []
            for parts in (100, 0):
                worker = rp.float64_worker(model)
                order = random.Random(seed).sample(range(len(step.rollouts)), len(step.rollouts))
                ledger, _ = await rp.replay(worker, step, order=order, max_parts=parts, max_tokens=1)
                gradients.append(rp.gradient_of(worker, ledger))
            assert gradients[0].dtype == torch.float64
            assert rp.relative_l2(gradients[0], gradients[1]) < 1e-11
