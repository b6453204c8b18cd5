"""A run's door: what it writes down, what it hands to programs, and what happens where none comes."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fakes import FakeGenerator, FakeRuntime, Feed, a_task, turns
from thundersync.config import RolloutConfig, ServeConfig
from thundersync.config_file import config_from
from thundersync.core.types import Rollout, Scored
from thundersync.endpoint import DOOR, Door, open_door, refuse_missing_parser
from thundersync.errors import ConfigError, StepStalled
from thundersync.evaluate.evaluator import Evaluator
from thundersync.rollout.dialogue import Renderer
from thundersync.rollout.functions import FunctionAgent
from thundersync.rollout.runner import Agent, RolloutRunner
from thundersync.score.judge import CheckerJudge
from thundersync.score.reward import RewardChecker

ROLLOUT = RolloutConfig(max_tokens=200)


class Hall:
    """A door, and a scripted engine and sandboxes behind it."""

    def __init__(self, door: Door, tok: Any, told: dict[str, str], warned: list[str]) -> None:
        self.door, self.told, self.warned = door, told, warned
        self.engine = FakeGenerator(turns("hi"), tokenizer=tok)
        self.feed = Feed()
        self._renderer = Renderer(tok)

    def agent(self) -> Agent:
        checker = RewardChecker()
        return self.door.agent(
            ROLLOUT,
            lambda function, judge: FunctionAgent(
                function,
                renderer=self._renderer,
                runtime=FakeRuntime(),
                checker=checker,
                judge=judge or CheckerJudge(checker),
                config=ROLLOUT,
                prompt=[],
                emit=self.feed,
            ),
        )

    async def rollout(self) -> Rollout:
        return await self.agent().run(
            a_task(), rollout_id="000000-00-00", group_id="000000-00", generator=self.engine, policy_version=0
        )


@asynccontextmanager
async def hall(
    tok: Any, folder: Path, environment: dict[str, str] | None = None, *, stall_timeout_s: float = 3600.0, **serve: Any
) -> AsyncIterator[Hall]:
    (folder / "config.json").write_text(json.dumps({"vocab_size": 384}))
    raw = {"model": {"name": str(folder)}, "env": {"path": "p"}, "serve": serve | {"port": 0}}
    # Sooner than a file may say.
    config = msgspec.structs.replace(config_from(raw), stall_timeout_s=stall_timeout_s)
    assert config.serve is not None
    warned: list[str] = []
    door = await open_door(
        config,
        config.serve,
        folder=folder,
        model_path=folder,
        renderer=Renderer(tok),
        environment=environment or {},
        say=lambda text: None,
        warn=warned.append,
    )
    try:
        yield Hall(door, tok, json.loads((folder / DOOR).read_text()), warned)
    finally:
        await door.close()


async def test_a_program_that_the_run_starts_does_not_inherit_the_runs_key(tok: Any, tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text(
        "import json, os, sys, urllib.request\n"
        "if 'THE_RUNS_KEY' in os.environ or os.environ.get('KEPT') != 'yes': sys.exit('what it should not see')\n"
        "request = urllib.request.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions',\n"
        "    json.dumps({'messages': [{'role': 'user', 'content': 'a'}]}).encode(),\n"
        "    {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']})\n"
        "json.load(urllib.request.urlopen(request))\n"
    )
    environment = {**os.environ, "THE_RUNS_KEY": "secret", "KEPT": "yes"}
    serve = {"api_key_env": "THE_RUNS_KEY", "command": [sys.executable, str(script)], "host": "0.0.0.0"}
    async with hall(tok, tmp_path, environment, **serve) as made:
        assert made.told["api_key"] == "secret" and "0.0.0.0" not in made.told["url"]
        rollout = await made.rollout()
    assert isinstance(rollout.outcome, Scored), rollout.outcome


async def test_the_public_url_is_what_is_written_down(tok: Any, tmp_path: Path) -> None:
    async with hall(tok, tmp_path, public_url="https://train.example.org/") as made:
        assert made.told["url"] == "https://train.example.org"


async def test_an_evaluation_that_no_program_comes_to_warns_and_ends(tok: Any, tmp_path: Path) -> None:
    async with hall(tok, tmp_path, stall_timeout_s=0.4, judge="client") as made:
        assert made.door.missing() == ""
        runner = RolloutRunner(
            agent=made.agent(), generators=[made.engine], on_failure="retry", max_attempts=3, emit=made.feed
        )
        evaluator = Evaluator([a_task()], samples=2, runner=runner, emit=made.feed)
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.timeout(60):
                await evaluator.run(0)
        assert caught.group_contains(StepStalled, match=f"2 rollouts wait for a program at {made.told['url']}")
        assert made.warned and made.warned[0].startswith(f"2 rollouts wait for a program at {made.told['url']}")
        assert made.door.missing() == ""  # they have been withdrawn


async def test_what_moves_elsewhere_keeps_rollouts_waiting(tok: Any, tmp_path: Path) -> None:
    async with hall(tok, tmp_path, stall_timeout_s=0.4, judge="client") as made:
        waiting = asyncio.create_task(made.rollout())
        while not len(made.warned) > 2:  # at 0.2, 0.4 and 0.8 seconds: beyond the limit
            made.door.heartbeat()
            await asyncio.sleep(0.01)
        assert not waiting.done() and "1 rollout waits" in made.door.missing()
        waiting.cancel()
        await asyncio.wait({waiting})


def test_a_tool_parser_without_vllm_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="vLLM is not installed") as caught:
        refuse_missing_parser(ServeConfig(tool_parser="hermes"))
    assert "pip install" in caught.value.remedy
    refuse_missing_parser(ServeConfig())
    refuse_missing_parser(None)
