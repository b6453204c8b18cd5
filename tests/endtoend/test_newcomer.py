"""A newcomer's first hour, command by command, on a tiny model: a run, two viewers beside it, an interrupt and a
resume, its report, and an agent of their own over the endpoint with the `openai` package.

    .venv/bin/python -m pytest tests/endtoend/test_newcomer.py tests/endtoend/test_readme.py -m slow
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.endtoend.rig import Run, count, raw_config
from tests.tiny import tiny_model

pytestmark = pytest.mark.slow
LIMIT_S = 600.0
"""For whatever is waited for: a slow machine does not fail."""
COMMAND = [sys.executable, "-m", "thundersync"]


def written(folder: Path, **changes: object) -> Path:
    file = folder / "my.toml"
    file.write_text(tomli_w.dumps(raw_config(folder, folder / "model", **changes)))
    return file


def said(*arguments: str) -> str:
    """What a command prints; it must succeed."""
    ran = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_run_watch_interrupt_resume_report(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    config = written(tmp_path, max_steps=1000)  # which nobody waits for
    folder = tmp_path / "runs" / "run"

    explained = said("run", str(config), "--dry-run")
    assert "one optimizer step" in explained and not folder.exists()

    run = Run(tmp_path, config)
    run.until(lambda events: count(events, "rollout_started") > 0, limit_s=LIMIT_S)
    viewers = [
        subprocess.Popen([*COMMAND, "monitor", str(folder), how], stdout=subprocess.PIPE, text=True)
        for how in ("--json", "--plain")
    ]
    run.until(lambda events: count(events, "step_committed") >= 2, limit_s=LIMIT_S)
    run.signal(signal.SIGINT)
    assert run.wait(limit_s=LIMIT_S) == 130
    assert run.left_behind() == []
    seen, lines = (viewer.communicate(timeout=LIMIT_S)[0] for viewer in viewers)
    kinds = [json.loads(line)["kind"] for line in seen.splitlines()]
    assert kinds[0] == "run_started" and kinds.count("step_committed") >= 2 and kinds[-1] == "run_finished"
    assert "step" in lines
    committed = count(run.read_events(), "step_committed")

    again = Run(tmp_path, config, "--resume", "--set", f"max_steps={committed + 2}")
    assert again.wait(limit_s=LIMIT_S) == 0, again.text()
    assert again.left_behind() == []
    steps = [event["step"] for event in again.read_events() if event["kind"] == "step_committed"]
    assert sorted(set(steps)) == list(range(committed + 2))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(committed + 2))
    replayed = said("monitor", str(folder), "--json")
    assert json.loads(replayed.splitlines()[-1])["kind"] == "run_finished"

    assert "report.html" in said("report", str(folder)).replace("\n", "")
    page = (folder / "report.html").read_text()
    assert page.lstrip().startswith("<!") and "http://" not in page.replace("http://www.w3.org", "")


async def test_an_agent_of_ones_own_trains_over_the_endpoint_with_the_openai_package(tmp_path: Path) -> None:
    aiohttp, openai = pytest.importorskip("aiohttp"), pytest.importorskip("openai")
    await asyncio.to_thread(tiny_model, tmp_path / "model")
    config = written(tmp_path, max_steps=2, serve={"port": 0, "judge": "client"})
    run = await asyncio.to_thread(Serve, tmp_path, config)
    door = tmp_path / "runs" / "run" / "endpoint.json"
    opened = lambda events: door.is_file() and count(events, "step_opened") > 0  # noqa: E731
    await asyncio.to_thread(run.until, opened, limit_s=LIMIT_S)
    told = json.loads(door.read_text())
    headers = {"Authorization": f"Bearer {told['api_key']}"}
    rewards = 0
    async with aiohttp.ClientSession() as http:

        async def play() -> None:
            """Take rollouts until there are none any more; a reply is worth its letters."""
            nonlocal rewards
            while True:
                try:
                    async with http.post(f"{told['url']}/sessions", headers=headers) as answer:
                        if answer.status != 201:
                            return
                        session: dict[str, Any] = await answer.json()
                except aiohttp.ClientError:
                    return  # the run is over, and its door with it
                async with openai.AsyncOpenAI(
                    base_url=session["openai_base_url"], api_key=session["api_key"], max_retries=0
                ) as client:
                    reply = await client.chat.completions.create(
                        model=told["model"], messages=[{"role": "user", "content": session["instruction"]}]
                    )
                worth = sum(map(str.isalpha, reply.choices[0].message.content or ""))
                own = {"Authorization": f"Bearer {session['api_key']}"}
                url = f"{told['url']}/sessions/{session['session_id']}/reward"
                async with http.post(url, json={"reward": worth}, headers=own) as done:
                    assert done.status < 300, await done.text()
                    rewards += 1

        await asyncio.gather(*(play() for _ in range(3)))
    assert await asyncio.to_thread(run.wait, limit_s=LIMIT_S) == 0, run.text()
    assert run.left_behind() == []
    assert rewards == 2 * 2 * 3
    assert count(run.read_events(), "step_committed") == 2


class Serve(Run):
    """`python -m thundersync serve`."""

    verb = "serve"
