"""Adapters stream like all weights: every path equals the one-piece gradient, with recomputed activations and cuts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.learn import replay as rp
from tests.tiny import tiny_model
from thundersync.core.objective import Objective
from thundersync.core.types import Scored
from thundersync.learn import messages as m
from thundersync.learn.settings import LoraSettings
from thundersync.learn.worker import Worker
from thundersync.verify.textbook import of_rollouts


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation_checkpointing": True},
        {"block_tokens": 4},
        {"activation_checkpointing": True, "block_tokens": 4},
    ],
    ids=["plain", "recomputed", "cut", "both"],
)
@pytest.mark.parametrize("lora", [LoraSettings(rank=4), None], ids=["lora", "full"])
async def test_streamed_gradients_equal_the_one_piece_gradient(
    tmp_path: Path, options: dict[str, Any], lora: LoraSettings | None
) -> None:
    objective = Objective(kl_coef=0.1, entropy_coef=0.02)
    terms = m.Terms(kl="k3", entropy=True, mismatch="tis", sums=objective.sums)
    model = tiny_model(tmp_path / "model", std=0.1)
    reference = str(tiny_model(tmp_path / "reference", std=0.1, seed=3))
    worker = Worker()
    worker.answer(rp.setup(model, tmp_path / "weights", terms=terms, lora=lora, reference_path=reference, **options))
    if lora is not None:  # B begins at zero, where A has no gradient
        with torch.no_grad():
            worker._flat.buffer.add_(torch.randn(worker._flat.size, generator=torch.Generator().manual_seed(1)) * 0.02)
    for seed, parts in ((42, 100), (43, 0)):
        step = rp.record(seed, rewards=(0.0, 0.5, 1.0), forked=0.2, failed=0.1)
        rewards = {r.rollout_id: r.outcome.reward for r in step.rollouts if isinstance(r.outcome, Scored)}
        book = of_rollouts(step.rollouts, rewards, objective, min_group_size=2, skip_flat=False)
        worker.answer(m.Reference(pieces=book.pieces, scales=book.scales))
        ledger, _ = await rp.replay(worker, step, objective=objective, max_parts=parts)
        found = worker.answer(m.Compare(scales=ledger.objective.scales(ledger.tally())))
        worker.answer(m.Discard())
        assert isinstance(found, m.Comparison)
        assert found.relative_l2 < 5e-6
