"""The engine as a library: weights really reach the generator, and what it offers to a program that embeds it."""

import asyncio
import json
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest

from tests.endtoend.rig import config
from tests.tiny import tiny_model
from thundersync.core.types import Scored
from thundersync.engine import Engine
from thundersync.errors import ConfigError, ThundersyncError
from thundersync.generate.base import Sampling
from thundersync.learn import messages as m
from thundersync.monitor.events import Event, WeightsPublished
from thundersync.step import StepResult

PROMPT = [1, 40, 50, 60, 70, 80, 90, 100, 2, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24,
          25, 26, 27, 28, 29, 30, 31, 32, 33]  # fmt: skip


async def audited(engine: Engine) -> list[float]:
    """The engine's logprobs of its own samples are those of every trainer worker. Gives those of a fixed text."""
    generator = engine.parts.generators[0]
    reply = await generator.generate(PROMPT, Sampling(max_tokens=8), request_id=f"audit-{uuid4().hex}")
    assert reply.policy_version == engine.parts.driver.policy_version
    fixed = []
    for worker in engine.parts.workers:
        scores = await worker.call(m.Score(token_ids=[*PROMPT, *reply.token_ids]), m.Scores, limit_s=60)
        assert reply.logprobs == pytest.approx(scores.logprobs[len(PROMPT) - 1 :], abs=5e-4)
        fixed.append((await worker.call(m.Score(token_ids=PROMPT), m.Scores, limit_s=60)).logprobs)
    assert fixed == [fixed[0]] * len(fixed)
    return fixed[0]


def moved(before: list[float], after: list[float]) -> bool:
    """Far more than the audit tolerates: stale weights would have failed it."""
    return max(abs(a - b) for a, b in zip(before, after, strict=True)) > 1e-2


@pytest.mark.vllm
async def test_samples_come_from_the_new_weights_and_a_world_that_is_down_for_everybody_ends_the_run(
    tmp_path: Path,
) -> None:
    settings = config(tmp_path, tiny_model(tmp_path / "model"), engine__backend="vllm", max_steps=50)
    with pytest.raises(ThundersyncError, match="not one of the 6 rollouts of step 3 could be scored"):
        async with Engine(settings) as engine:
            worker = engine.parts.workers[0].pid
            assert engine.parts.generators[0].name == "vllm"
            seen = [await audited(engine)]
            async for step in engine.steps():
                seen.append(await audited(engine))
                assert step.empty or moved(seen[-2], seen[-1])
                if step.step == 2:
                    for checker in (tmp_path / "tasks").rglob("test.sh"):
                        checker.write_text("echo no reward at all\n")
    assert len(seen) == 4
    assert not Path(f"/proc/{worker}").exists()
    events = [json.loads(line) for line in (engine.run_dir / "events.jsonl").read_text().splitlines()]
    assert len([event for event in events if event["kind"] == "step_opened"]) == 4  # instead of burning all its steps


@pytest.mark.parametrize("lora", [None, pytest.param({"rank": 4}, marks=pytest.mark.slow)], ids=["full", "lora"])
async def test_several_workers_stay_equal_and_an_interrupt_in_a_commit_waits_for_it_and_keeps_it(
    tmp_path: Path, lora: dict[str, int] | None
) -> None:
    """What is saved on the way out is the step that the weights are after, or a resume would make it twice."""
    published, last = 0, 3

    def interrupt(event: Event) -> None:
        nonlocal published
        published += isinstance(event, WeightsPublished)
        if published == 1 + last:  # the first is before any step: the last step's commit is made, and not yet told
            training.cancel()

    async def train() -> None:
        async with engine:
            pids.append(engine.parts.workers[0].pid)
            seen = [await audited(engine)]
            async for step in engine.steps():
                steps.append(step)
                seen.append(await audited(engine))
                assert (seen[-2] != seen[-1]) != step.empty
                assert step.empty or lora or moved(seen[-2], seen[-1])

    changes: dict[str, object] = {"trainer__workers": 2, "max_steps": 50, "stream__verify_every": 1}
    if lora is not None:
        changes["model__lora"] = lora
    settings = config(tmp_path, tiny_model(tmp_path / "model"), ckpt__interval=100, **changes)
    pids: list[int] = []
    steps: list[StepResult] = []
    engine = Engine(settings, on_event=interrupt)
    training = asyncio.create_task(train())
    with pytest.raises(asyncio.CancelledError):
        await training
    assert len([step for step in steps if not step.empty]) == last - 1
    rows = [json.loads(line) for line in (engine.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["policy_version"] == last
    (saved,) = (engine.run_dir / "checkpoints").glob("step-*")
    assert saved.name == f"step-{len(rows):06d}"
    assert json.loads((saved / "state.json").read_text())["policy_version"] == last
    assert len(list(saved.glob("optimizer/shard-*"))) == 2
    assert len(list((engine.run_dir / "rollouts").glob("step-*"))) == len(rows)
    # Each live step was audited before its commit.
    events = [json.loads(line) for line in (engine.run_dir / "events.jsonl").read_text().splitlines()]
    audits = [event for event in events if event["kind"] == "audited"]
    assert [event["step"] for event in audits if event["ok"]] == [row["step"] for row in rows if not row["empty"]]
    assert audits and all("audit_relative_l2" in step.metrics for step in steps if not step.empty)
    # And leaving early ends everything.
    assert not Path(f"/proc/{pids[0]}").exists()
    assert not [t for t in asyncio.all_tasks() if t.get_name() in ("gauges", "gradient-stream", "rollouts")]


@pytest.mark.parametrize(
    "who", ["engines", *(pytest.param(who, marks=pytest.mark.slow) for who in ("workers", "itself"))]
)
async def test_a_policy_learns_from_a_teacher_whatever_its_place(tmp_path: Path, who: str) -> None:
    model, other = tiny_model(tmp_path / "model"), tiny_model(tmp_path / "teacher", seed=1)
    teacher: dict[str, object] = {
        "engines": {"name": str(other), "topk": 4},
        "workers": {"name": str(other), "topk": -1},
        "itself": {"privileged": "solution"},
    }[who]
    changes = {"algo__type": "opsd" if who == "itself" else "opd", "algo__group_size": 1, "teacher": teacher}
    async with Engine(config(tmp_path, model, max_steps=1, **changes)) as engine:
        (step,) = [step async for step in engine.steps()]
        alone = await engine.rollout(engine.tasks[0])  # outside of a step nobody is asked
    assert not step.empty
    assert step.metrics["grad_norm"] > 0
    assert isinstance(alone.outcome, Scored)
    events = [json.loads(line) for line in (engine.run_dir / "events.jsonl").read_text().splitlines()]
    scored = [event for event in events if event["kind"] == "turn_scored"]
    assert len(scored) == sum(len(rollout.turns) for rollout in step.rollouts)


async def test_a_configuration_built_in_python_is_checked_before_anything_starts(tmp_path: Path) -> None:
    good = config(tmp_path, tmp_path / "no-model")
    wrong = msgspec.structs.replace(good, algo=msgspec.structs.replace(good.algo, type="dr_grpo"))
    with pytest.raises(ConfigError, match=r'say algo\.type = "grpo"'):
        async with Engine(wrong):
            pass
    assert not (tmp_path / "runs").exists()
