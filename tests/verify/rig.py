"""Provers and auditors over workers in this process, and recorded steps as they take them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests.learn import replay as rp
from thundersync.config import Config
from thundersync.config_file import config_from
from thundersync.core.turn_ledger import TurnKey
from thundersync.core.types import Rollout, SampledTurn
from thundersync.learn import messages as m
from thundersync.learn.turn_stream import ScoredTurn, Scorer
from thundersync.learn.worker import Worker
from thundersync.recipe import lora_of, terms_of
from thundersync.verify import recording as rec
from thundersync.verify.proof import Prover
from thundersync.verify.recording import Recording

R = TypeVar("R", bound=m.Reply)


class Link(rp.InProcessLink):
    """Tells, as a real one does, whether it waits for an answer."""

    async def call(self, request: m.AnyRequest, expected: type[R], *, limit_s: float) -> R:
        self.waiting += 1
        try:
            return await super().call(request, expected, limit_s=limit_s)
        finally:
            self.waiting -= 1


def config(model: Path, **changes: object) -> Config:
    """`changes` are dotted keys with `__` for the dots."""
    raw: dict[str, Any] = {
        "model": {"name": str(model), "dtype": "float32", "max_model_len": 1024},
        "algo": {"group_size": 4, "prompts_per_step": 2},
        "env": {"path": "tasks"},
    }
    for dotted, value in changes.items():
        table, _, key = dotted.rpartition("__")
        place = raw.setdefault(table, {}) if table else raw
        place[key] = value
    return config_from(raw)


def link(config: Config, model: Path, folder: Path, **changes: Any) -> Link:
    worker = Worker()
    own = {"terms": terms_of(config), "lora": lora_of(config), "reference_path": str(model)}
    worker.answer(rp.setup(model, folder / "weights", **(own | changes)))
    return Link(worker)


def prover(config: Config, links: Sequence[Link], *, shares_prompts: bool = True, max_parts: int = 100) -> Prover:
    return Prover(
        config,
        links,  # type: ignore[arg-type]
        shares_prompts=shares_prompts,
        max_parts=max_parts,
        dtype="float32",
        bits_repeat=True,
        say=lambda text: None,
    )


def recorded(step: rp.RecordedStep) -> Recording:
    groups = {g: [r.rollout_id for r in step.rollouts if r.group_id == g] for g in step.prompts}
    return rec.of_rewards(0, groups, step.prompts, step.rollouts[::-1])


async def scored_turns(
    prompts: dict[str, list[int]], turns: Sequence[tuple[SampledTurn, Rollout | None]], score: Scorer
) -> Recording:
    rollouts = sorted((r for _, r in turns if r is not None), key=lambda r: r.rollout_id)
    scored = {
        TurnKey(t.rollout_id, t.attempt, t.sequence, t.turn): ScoredTurn(sampled=t, scores=await score(t))
        for t, _ in turns
    }
    groups = {g: [r.rollout_id for r in rollouts if r.group_id == g] for g in prompts}
    return rec.of_turns(0, groups, prompts, rollouts, scored)
