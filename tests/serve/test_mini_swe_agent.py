"""mini-swe-agent, as it comes from PyPI, through the endpoint: its ids are the engine's, its step the built-in's."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.endtoend.rig import raw_config
from tests.fakes import turns
from tests.serve.documents import example, running
from tests.serve.rig import assert_captured, rig
from tests.tiny import tiny_model
from thundersync.config_file import config_from
from thundersync.core.types import Rollout, Scored
from thundersync.engine import Engine
from thundersync.generate.base import Generation

pytestmark = pytest.mark.slow  # importing litellm takes longer than a test may

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
# Rewards what the agent wrote, so that the same commands are worth the same.
CHECKER = "mkdir -p /logs/verifier; cat /workspace/out > /logs/verifier/reward.txt\n"
PROMPT = "Answer with one ```bash block."


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path / "mswea"))
    monkeypatch.setenv("MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT", "1")


async def test_with_tool_calls_it_is_one_exact_sequence(tok: Any) -> None:
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    said = [
        'I look. CALL {"name": "bash",  "arguments": {"command": "echo here"}}',
        f'CALL {{"name": "bash", "arguments": {{"command": "{SUBMIT}"}}}}',
    ]
    async with rig(turns(*said), tok) as made:
        session = await made.open()
        model = LitellmModel(
            model_name="openai/policy",
            model_kwargs={"api_base": session["openai_base_url"], "api_key": session["api_key"]},
            cost_tracking="ignore_errors",
        )
        agent = DefaultAgent(
            model, LocalEnvironment(), system_template="You have a shell.", instance_template="{{task}}", cost_limit=0
        )
        result = await asyncio.to_thread(agent.run, session["instruction"])
        assert result["exit_status"] == "Submitted"
        rollout = await made.reward(session)
    assert len(rollout.sequences) == 1 and "history_forked" not in made.feed.kinds
    assert_captured(made, rollout)
    assert "here" in rollout.messages[3].content


async def test_replies_that_it_leaves_out_of_its_history_fork_and_are_learned_all_the_same(tok: Any) -> None:
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

    said = ["no action", "none again", f"```mswea_bash_command\n{SUBMIT}\n```"]
    async with rig(turns(*said), tok) as made:
        session = await made.open()
        model = LitellmTextbasedModel(
            model_name="openai/policy",
            model_kwargs={"api_base": session["openai_base_url"], "api_key": session["api_key"]},
            cost_tracking="ignore_errors",
        )
        agent = DefaultAgent(
            model, LocalEnvironment(), system_template="You have a shell.", instance_template="{{task}}", cost_limit=0
        )
        await asyncio.to_thread(agent.run, session["instruction"])
        rollout = await made.reward(session)
    assert len(rollout.sequences) == 3 and made.feed.kinds.count("history_forked") == 2
    assert_captured(made, rollout)


def scripted_tasks(folder: Path) -> Path:
    """Two tasks whose checker reads the reward out of a file that the agent wrote."""
    for index in range(2):
        task = folder / f"write-{index}"
        (task / "environment").mkdir(parents=True)
        (task / "tests").mkdir()
        (task / "task.toml").write_text('version = "1.0"\n')
        (task / "instruction.md").write_text(f"Write number {index}.")
        (task / "environment" / "Dockerfile").write_text("FROM debian:bookworm-slim\nWORKDIR /workspace\n")
        (task / "tests" / "test.sh").write_text(CHECKER)
    return folder


class Scripted:
    """In the place of an engine's sampling: what each rollout says is given, whoever asks."""

    def __init__(self, engine: Engine, last: str) -> None:
        self.said: dict[tuple[str, int], tuple[list[int], list[int]]] = {}
        self._renderer = engine.parts.renderer
        self._last = last
        for generator in engine.parts.generators:
            generator.generate = self._generate(generator)  # type: ignore[method-assign]

    def _generate(self, generator: Any) -> Any:
        async def generate(prompt_ids: Any, sampling: Any, *, request_id: str) -> Generation:
            rollout_id, _, turn = request_id.split("/")
            member = int(rollout_id.split("-")[2])
            command = f"echo {member % 2} > out; echo wrote {member}" if turn == "0" else self._last
            ids = [*self._renderer.encode(f"```bash\n{command}\n```"), 2]
            self.said[rollout_id, int(turn)] = (list(prompt_ids), ids)
            return Generation(
                token_ids=ids,
                logprobs=[-2.0 - 0.01 * place for place in range(len(ids))],
                finish_reason="stop",
                policy_version=generator.policy_version,
            )

        return generate


async def two_steps(engine: Engine, beside: Any) -> tuple[list[Rollout], Scripted, dict[str, Any]]:
    async with engine:
        scripted = Scripted(engine, "submit")
        programs = asyncio.create_task(beside(engine))
        steps = [step async for step in engine.steps()]
        assert all(not step.empty for step in steps)
        await engine.parts.driver.publish(engine.parts.driver.arena)  # type: ignore[arg-type]
    await programs
    weights = load_file(next((engine.run_dir / "checkpoints" / "step-000002").glob("*.safetensors")))
    return [rollout for step in steps for rollout in step.rollouts], scripted, weights


async def test_two_steps_through_the_endpoint_equal_the_built_in_agents_on_the_same_tokens(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", std=0.1)
    tasks = scripted_tasks(tmp_path / "tasks")
    prompt = tmp_path / "prompt.md"
    prompt.write_text(PROMPT)
    common: dict[str, Any] = {
        "max_steps": 2,
        "env": {"path": str(tasks)},
        "rollout": {"max_tokens": 200, "max_turns": 4, "timeout_s": 120, "system_prompt": str(prompt)},
    }

    async def mini(engine: Engine) -> None:
        door = json.loads((engine.run_dir / "endpoint.json").read_text())
        # The documented program, shown and answered in the built-in agent's words. Its `submit` is a command there.
        code = example("mini-swe-agent").replace("runs/served/endpoint.json", str(engine.run_dir / "endpoint.json"))
        code = re.sub(r'system_template="[^"]*"', f"system_template={PROMPT!r}", code)
        code = code.replace(
            '"command": action["command"]', f'"command": action["command"].replace("submit", "{SUBMIT}")'
        )
        code = code.replace("{{output.output}}", "{{output.output.rstrip()}}")
        code = code.replace("range(8)", "range(2)").replace("ThreadPoolExecutor(8)", "ThreadPoolExecutor(2)")
        await running(code)
        assert door["url"]

    async def nobody(engine: Engine) -> None:
        return None

    served = Engine(config_from(raw_config(tmp_path / "served", model, serve={"port": 0}, **common)))
    built_in = Engine(config_from(raw_config(tmp_path / "built-in", model, **common)))
    through, scripted, weights = await two_steps(served, mini)
    inside, _, expected = await two_steps(built_in, nobody)

    for ours, theirs in zip(through, inside, strict=True):
        assert isinstance(ours.outcome, Scored) and isinstance(theirs.outcome, Scored)
        assert ours.outcome.reward == theirs.outcome.reward
        assert ours.messages == theirs.messages
        assert ours.sequences == theirs.sequences
        for turn in ours.turns:
            prompt_ids, ids = scripted.said[ours.rollout_id, turn.index]
            assert ours.sequences[turn.sequence].token_ids[: turn.end] == [*prompt_ids, *ids]
    start = load_file(next(model.glob("*.safetensors")))
    moved = np.concatenate([(expected[name] - start[name]).ravel() for name in expected])
    other = np.concatenate([(weights[name] - start[name]).ravel() for name in expected])
    assert np.linalg.norm(moved) > 0
    assert np.linalg.norm(moved - other) / np.linalg.norm(moved) < 3e-4
