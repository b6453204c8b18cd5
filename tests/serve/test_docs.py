"""docs/endpoint.md: its programs run as they stand there, and its settings are the settings."""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import turns
from tests.serve.documents import DOCUMENT, example, running
from tests.serve.rig import KEY, assert_captured, rig
from thundersync.config import ServeConfig
from thundersync.config_file import config_from
from thundersync.core.types import Scored


def write_door(folder: Path, url: str) -> None:
    file = folder / "runs" / "served" / "endpoint.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"url": url, "api_key": KEY, "model": "tiny"}))


async def test_the_openai_program_makes_rollouts_until_the_run_is_over(
    tok: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with rig(turns("no", "yes"), tok) as made:
        write_door(tmp_path, made.endpoint.url)
        program = asyncio.create_task(running(example("openai")))
        rollouts = [await made.rollout(), await made.rollout()]
        await made.desk.end()
        await program
    for rollout in rollouts:
        assert isinstance(rollout.outcome, Scored) and rollout.outcome.reward == 1.0
        assert len(rollout.sequences) == 1
        assert_captured(made, rollout)


async def test_the_anthropic_program_makes_one(tok: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with rig(turns("hi"), tok) as made:
        write_door(tmp_path, made.endpoint.url)
        rollout = made.rollout()
        await running(example("anthropic"))
        assert_captured(made, await rollout)


def test_the_table_of_settings_is_what_there_is() -> None:
    table = DOCUMENT.read_text().partition("## Settings")[2]
    told = re.findall(r"`serve\.(\w+)`", table)
    assert sorted(told) == sorted(ServeConfig.__struct_fields__)
    for name, default in (("idle_timeout_s", 600.0), ("max_body_mib", 32.0), ("port", 8791), ("host", "127.0.0.1")):
        assert getattr(ServeConfig(), name) == default


def test_its_configurations_are_accepted() -> None:
    for block in re.findall(r"```toml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL):
        config_from({"model": {"name": "a"}, "env": {"path": "b"}, **tomllib.loads(block)})
