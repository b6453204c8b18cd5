"""The engine as a library: weights really reach the generator, and what it offers to a program that embeds it."""

import asyncio
from pathlib import Path

import pytest

from tests.endtoend.rig import config
from tests.tiny import tiny_model
from thundersync.core.types import Message, Scored
from thundersync.engine import Engine
from thundersync.generate.base import Sampling
from thundersync.learn import messages as m

PROMPT = [1, 40, 50, 60, 70, 80, 90, 100, 2, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24,
          25, 26, 27, 28, 29, 30, 31, 32, 33]  # fmt: skip


@pytest.mark.parametrize("backend", [pytest.param("vllm", marks=pytest.mark.vllm), "transformers"])
async def test_the_next_steps_samples_come_from_the_new_weights(tmp_path: Path, backend: str) -> None:
    model = tiny_model(tmp_path / "model")
    async with Engine(config(tmp_path, model, engine__backend=backend)) as engine:
        seen: list[list[float]] = []

        async def audit() -> None:
            """The engine's logprobs of its own samples against the trainer's, on the same tokens."""
            generator, worker = engine.parts.generators[0], engine.parts.workers[0]
            assert generator.name == backend
            reply = await generator.generate(PROMPT, Sampling(max_tokens=8), request_id=f"audit-{len(seen)}")
            assert reply.policy_version == engine.parts.driver.policy_version
            scores = await worker.call(m.Score(token_ids=[*PROMPT, *reply.token_ids]), m.Scores, limit_s=60)
            own = scores.logprobs[len(PROMPT) - 1 :]
            assert reply.logprobs == pytest.approx(own, abs=5e-4)
            fixed = await worker.call(m.Score(token_ids=PROMPT), m.Scores, limit_s=60)
            seen.append(fixed.logprobs)

        await audit()
        async for step in engine.steps():
            await audit()
            if not step.empty:
                change = max(abs(a - b) for a, b in zip(seen[-1], seen[-2], strict=True))
                assert change > 1e-2  # far above what the audit tolerates: stale weights would have failed it
        assert len(seen) == 4


async def test_an_embedding_program_can_generate_and_run_single_rollouts(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    async with Engine(config(tmp_path, model)) as engine:
        text = await engine.generate([Message(role="user", content="hello")], max_tokens=5)
        assert isinstance(text, str)
        rollout = await engine.rollout(engine.tasks[0])
        assert isinstance(rollout.outcome, Scored)
        assert rollout.policy_version == 0


async def test_leaving_the_engine_early_ends_everything(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    engine = Engine(config(tmp_path, model))
    with pytest.raises(ZeroDivisionError):
        async with engine:
            worker = engine.parts.workers[0].pid
            async for _ in engine.steps():
                raise ZeroDivisionError
    assert not Path(f"/proc/{worker}").exists()
    assert not [t for t in asyncio.all_tasks() if t.get_name() in ("gauges", "gradient-stream", "rollouts")]
