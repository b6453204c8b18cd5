"""Programs that the run starts: what they are told, how they end, and that nothing of them stays."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil

from tests.fakes import a_task, turns
from tests.serve.rig import Rig, assert_captured, rig
from thundersync.config import RolloutConfig
from thundersync.core.types import Failed, Rollout, Scored
from thundersync.serve.program import Program

ASK = """
import json, os, sys, urllib.request

def post(url, body, key=os.environ["OPENAI_API_KEY"]):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Authorization": "Bearer " + key})
    return json.load(urllib.request.urlopen(request))

messages = [{"role": "user", "content": os.environ["THUNDERSYNC_INSTRUCTION"]}]
"""
CHAT = 'post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": messages})\n'


async def roll(tok: Any, tmp_path: Path, script: str, *said: str, **settings: Any) -> tuple[Rig, Rollout]:
    file = tmp_path / "agent.py"
    file.write_text(textwrap.dedent(ASK + script))
    made: Rig
    who = Program([sys.executable, str(file)], environment=os.environ, url=lambda: made.endpoint.url)
    async with rig(turns(*said), tok, who=who, client_judges=False, **settings) as made:
        rollout = await made.rollout(a_task(instruction="Say hi."))
    return made, rollout


async def test_a_program_is_a_rollout_that_the_checker_judges(tok: Any, tmp_path: Path) -> None:
    made, rollout = await roll(tok, tmp_path, CHAT, "hi")
    assert rollout.outcome == Scored(reward=1.0, rewards={"reward": 1.0}, stop="submitted")
    assert [message.content for message in rollout.messages] == ["Say hi.", "hi"]
    assert_captured(made, rollout)


async def test_a_program_that_fails_says_why_and_is_no_reward(tok: Any, tmp_path: Path) -> None:
    _, rollout = await roll(tok, tmp_path, CHAT + "sys.exit('my database is down')", "hi")
    assert isinstance(rollout.outcome, Failed) and rollout.outcome.reason == "function"
    assert "exit code 1" in rollout.outcome.detail and "my database is down" in rollout.outcome.detail


async def test_one_that_a_limit_stopped_is_judged_whatever_its_exit_code(tok: Any, tmp_path: Path) -> None:
    _, rollout = await roll(tok, tmp_path, CHAT * 2, "hi", config=RolloutConfig(max_turns=1))
    assert isinstance(rollout.outcome, Scored) and rollout.outcome.stop == "max_turns"


async def test_time_ends_a_program_and_what_it_started(tok: Any, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    hang = f"""
import subprocess, time
child = subprocess.Popen(["sleep", "1000"])
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
time.sleep(1000)
"""
    _, rollout = await roll(tok, tmp_path, CHAT + hang, "hi", config=RolloutConfig(timeout_s=5))
    assert isinstance(rollout.outcome, Scored) and rollout.outcome.stop == "time"
    for pid in map(int, pids.read_text().split()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_one_that_cannot_be_started_is_told(tok: Any) -> None:
    who = Program(["/nowhere/agent"], environment={}, url=lambda: "")
    async with rig(turns(), tok, who=who, client_judges=False) as made:
        rollout = await made.rollout()
    assert isinstance(rollout.outcome, Failed) and "/nowhere/agent could not be started" in rollout.outcome.detail
