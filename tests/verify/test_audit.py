"""The audit of a live step passes what is exact, and ends a run before it commits what is not."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fakes import FakeGenerator, Feed, a_task, turns
from tests.learn import replay as rp
from tests.learn import test_turns
from tests.tiny import tiny_model
from tests.verify.rig import Link, config, link
from thundersync.config import Config
from thundersync.core.ready_queue import PartRoom
from thundersync.core.types import Rollout
from thundersync.errors import ExactnessLost
from thundersync.learn import messages as m
from thundersync.learn import parts as parts_module
from thundersync.monitor.events import Audited
from thundersync.rollout.runner import GroupPlan, OnRollout
from thundersync.step import StepDriver
from thundersync.verify.audit import Auditor

STEP = rp.record(42, groups=2, size=4, rewards=(0.0, 0.5, 1.0))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), std=0.1)


class RecordedRunner:
    """Gives every planned rollout the tokens and reward of a recorded one, and its turns first where it has some."""

    def __init__(self, rollouts: Sequence[Rollout], lines: dict[str, list[Any]] | None = None) -> None:
        self.rollouts = rollouts
        self.lines = lines or {}
        self.driver: StepDriver

    async def run(self, groups: Sequence[GroupPlan], *, policy_version: int, on_rollout: OnRollout, **_: Any) -> None:
        for plan in groups:
            recorded = [rollout for rollout in self.rollouts if rollout.task_id == plan.task.task_id]
            for name, rollout in zip(plan.rollout_ids, recorded, strict=True):
                where = {"rollout_id": name, "group_id": plan.group_id, "policy_version": policy_version}
                for turn in self.lines.get(rollout.rollout_id, []):
                    self.driver.sampled(msgspec.structs.replace(turn, **where))
                own = [msgspec.structs.replace(turn, policy_version=policy_version) for turn in rollout.turns]
                await on_rollout(msgspec.structs.replace(rollout, turns=own, **where))
                for _ in range(25):  # the worker takes what it can, as between two rewards of a run
                    await asyncio.sleep(0)


class Kept:
    """Where rollouts would be written."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    async def __call__(self, step: int, rollouts: Sequence[Rollout]) -> Path:
        assert rollouts
        self.steps.append(step)
        return Path(f"rollouts/step-{step:06d}.jsonl.zst")


def driver(
    cfg: Config, own: Link, runner: RecordedRunner, prompts: dict[str, list[int]], feed: Feed, kept: Kept, **more: Any
) -> StepDriver:
    made = StepDriver(
        cfg,
        runner=runner,  # type: ignore[arg-type]
        generators=[FakeGenerator(turns())],
        workers=[own],  # type: ignore[list-item]
        shares_prompts=True,
        prompt_ids=lambda task: prompts[task.task_id],
        room=PartRoom(most=100),
        policy_version=0,
        emit=feed,
        keep=kept,
        auditor=Auditor(cfg, [own], dtype="float32", keep=kept, emit=feed),  # type: ignore[list-item]
        **more,
    )
    runner.driver = made
    return made


def rewarded(cfg: Config, own: Link, feed: Feed, kept: Kept) -> StepDriver:
    return driver(cfg, own, RecordedRunner(STEP.rollouts), STEP.prompts, feed, kept)


TASKS = [a_task(group) for group in STEP.prompts]


async def test_every_nth_step_is_audited_and_committed(model: Path, tmp_path: Path) -> None:
    cfg = config(model, stream__verify_every=2)
    own, feed, kept = link(cfg, model, tmp_path), Feed(), Kept()
    steps = rewarded(cfg, own, feed, kept)
    metrics = [(await steps.run(step, TASKS)).metrics for step in range(4)]
    audits = [event for event in feed if isinstance(event, Audited)]
    assert [event.step for event in audits] == [1, 3]
    assert all(event.ok and event.relative_l2 < 5e-6 and event.worst_name for event in audits)
    assert [row.get("audit_relative_l2") for row in metrics] == [
        None, audits[0].relative_l2, None, audits[1].relative_l2,
    ]  # fmt: skip
    assert steps.policy_version == 4
    assert kept.steps == []
    assert own.worker._reference is None  # an audited step keeps no buffer beyond its commit


async def test_the_kl_that_is_taken_off_rewards_is_audited_as_it_was_measured(model: Path, tmp_path: Path) -> None:
    cfg = config(model, stream__verify_every=1, algo__kl_coef=0.1, algo__kl_type="k1")
    own, feed = link(cfg, model, tmp_path), Feed()
    steps = rewarded(cfg, own, feed, Kept())
    for step in range(2):
        await steps.run(step, TASKS)
    assert [event.ok for event in feed if isinstance(event, Audited)] == [True, True]


async def test_what_is_not_exact_is_not_committed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(model, stream__verify_every=1)
    own, feed, kept = link(cfg, model, tmp_path), Feed(), Kept()
    steps = rewarded(cfg, own, feed, kept)
    whole = parts_module.CohortParts._coefficients
    monkeypatch.setattr(
        parts_module.CohortParts, "_coefficients", lambda self, s: [(p, c * 1.0001) for p, c in whole(self, s)]
    )
    before = own.worker._flat.buffer.clone()
    with pytest.raises(ExactnessLost, match=r"step 0 is .*e-05 from") as lost:
        await steps.run(0, TASKS)
    assert "rollouts/step-000000.jsonl.zst" in str(lost.value)
    assert kept.steps == [0]
    assert not any(isinstance(request, m.Commit) for request in own.requests)
    assert steps.policy_version == 0
    assert own.worker._flat.buffer.equal(before)
    (audit,) = [event for event in feed if isinstance(event, Audited)]
    assert not audit.ok
    assert audit.tolerance == 1e-5


async def test_a_step_without_a_gradient_is_not_audited(model: Path, tmp_path: Path) -> None:
    cfg = config(model, stream__verify_every=1)
    own, feed = link(cfg, model, tmp_path), Feed()
    flat = rp.record(42, groups=2, size=4, rewards=(1.0,))
    steps = driver(cfg, own, RecordedRunner(flat.rollouts), flat.prompts, feed, Kept())
    assert (await steps.run(0, TASKS)).empty
    assert not any(isinstance(event, Audited) for event in feed)


async def test_a_distilled_step_is_audited(
    model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    teacher = tiny_model(tmp_path_factory.mktemp("teacher"), std=0.1, seed=5)
    cfg = config(
        model, stream__verify_every=1, algo__type="opd", algo__group_size=3, teacher={"name": str(teacher), "topk": 4}
    )
    own, feed = link(cfg, model, tmp_path), Feed()
    prompts, recorded = test_turns.record(42)
    lines: dict[str, list[Any]] = {}
    for turn, _ in recorded:
        lines.setdefault(turn.rollout_id, []).append(turn)
    rollouts = sorted((r for _, r in recorded if r is not None), key=lambda r: r.rollout_id)
    runner = RecordedRunner(rollouts, lines)
    steps = driver(cfg, own, runner, prompts, feed, Kept(), scorer=test_turns.scorer(teacher, 4))
    await steps.run(0, [a_task(group) for group in prompts])
    (audit,) = [event for event in feed if isinstance(event, Audited)]
    assert audit.ok
    assert audit.relative_l2 < 5e-6
