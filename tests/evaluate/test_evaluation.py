"""Whole evaluations without a model: the oracle solves what is validated, idleness nothing; a killed one goes on."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomli_w
from rich.console import Console

from sandboxes import ProcessRuntime
from sandboxes.base import isolation_of
from tests.boxes import process_runtime
from tests.tasks.repairs import a_row
from thundersync.config import Config
from thundersync.config_file import config_from
from thundersync.errors import ConfigError, ResumeError, TaskError
from thundersync.evaluation import Evaluation
from thundersync.tasks.command import check_all


@pytest.fixture(scope="module")
async def boxes() -> None:
    await (await process_runtime()).close()


def raw(folder: Path, suite: str) -> dict[str, object]:
    return {
        "name": "x",
        "output_dir": str(folder / "runs"),
        "model": {"name": "none"},
        "env": {"path": "starter/train"},
        "eval": {"env": {"path": suite}},
        "sandbox": {"runtime": "process"},
    }


def config(folder: Path, suite: str = "starter/eval", *, first: int = 0) -> Config:
    settings = raw(folder, suite)
    return config_from(settings | {"eval": {"env": {"path": suite}, "num_examples": first}})


async def test_the_oracle_solves_every_starter_task_and_idleness_none(boxes: None, tmp_path: Path) -> None:
    for agent, reward in (("oracle", 1.0), ("idle", 0.0)):
        async with Evaluation(config(tmp_path), agent=agent) as evaluation:  # type: ignore[arg-type]
            report = await evaluation.run()
        assert {task.task_id: task.rewards for task in report.tasks} == {
            task.task_id: [reward] for task in report.tasks
        }
        assert len(report.tasks) == 18
        (suite,) = report.suites
        assert (suite.suite, suite.pass_at["1"].value, suite.failed) == ("starter/eval", reward, 0)
        written = json.loads((evaluation.run_dir / "results.json").read_text())
        assert written["suites"][0]["pass_at"]["1"]["value"] == reward
        assert "bootstrap" in written["method"]
        kinds = [json.loads(line)["kind"] for line in (evaluation.run_dir / "events.jsonl").open()]
        assert {"run_started", "eval_started", "rollout_scored", "eval_finished", "run_finished"} <= set(kinds)


async def test_an_evaluation_says_what_its_commands_are_isolated_by(boxes: None, tmp_path: Path) -> None:
    said: list[str] = []
    async with Evaluation(config(tmp_path, first=1), agent="idle", say=said.append):
        assert isolation_of(ProcessRuntime()) in said


async def test_repairs_are_exported_for_the_official_harness(boxes: None, tmp_path: Path) -> None:
    rows = tmp_path / "repairs.jsonl"
    rows.write_text(json.dumps(a_row(tmp_path)) + "\n")
    async with Evaluation(config(tmp_path, str(rows)), suites=[str(rows)], agent="oracle", samples=2) as evaluation:
        report = await evaluation.run()
    assert [task.rewards for task in report.tasks] == [[1.0, 1.0]]
    for name in ("predictions.jsonl", "predictions-1.jsonl"):
        (line,) = (evaluation.run_dir / name).read_text().splitlines()
        prediction = json.loads(line)
        assert list(prediction) == ["instance_id", "model_name_or_path", "model_patch"]
        assert prediction["model_patch"].startswith("diff --git a/calc.py b/calc.py\n")
        assert "+    return a + b\n" in prediction["model_patch"]


async def test_more_samples_may_be_added_to_an_evaluation_and_nothing_else_changed(boxes: None, tmp_path: Path) -> None:
    async with Evaluation(config(tmp_path, first=4), agent="idle") as first:
        await first.run()
    async with Evaluation(config(tmp_path, first=4), agent="idle", samples=2, resume=True) as second:
        report = await second.run()
    assert second.run_dir == first.run_dir
    assert {len(task.rewards) for task in report.tasks} == {2}
    lines = (second.run_dir / "samples.jsonl").read_text().splitlines()
    assert len({json.loads(line)["rollout_id"] for line in lines}) == len(lines) == 8
    with pytest.raises(ResumeError, match="suites changed"):
        async with Evaluation(config(tmp_path, first=4), suites=["starter/train"], agent="idle", resume=True):
            pass


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="PROCESS SANDBOX TESTS DO NOT RUN: no bubblewrap")
def test_a_killed_evaluation_goes_on_where_it_was(tmp_path: Path) -> None:
    file = tmp_path / "eval.toml"
    settings = raw(tmp_path, "starter/eval") | {"rollout": {"concurrency": 2}}
    file.write_text(tomli_w.dumps(settings))
    command = [sys.executable, "-m", "thundersync", "eval", str(file), "--agent", "oracle", "--samples", "2", "--plain"]
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def samples() -> int:
        return sum(path.read_bytes().count(b"\n") for path in (tmp_path / "runs").glob("*/samples.jsonl"))

    deadline = time.monotonic() + 60
    while samples() < 5 and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    before = samples()
    assert 5 <= before < 36
    again = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert samples() == 36
    assert "pass@2" in again.stdout


async def test_what_cannot_be_evaluated_is_refused_before_anything_starts(tmp_path: Path) -> None:
    without = {key: value for key, value in raw(tmp_path, "starter/eval").items() if key != "eval"}
    with pytest.raises(ConfigError, match="no evaluation tasks"):
        async with Evaluation(config_from(without), agent="idle"):
            pass
    with pytest.raises(ResumeError, match="no evaluation eval-x-idle"):
        async with Evaluation(config(tmp_path), agent="idle", resume=True):
            pass
    assert not list((tmp_path / "runs").glob("*"))


async def test_a_suite_is_read_from_the_split_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hub:
        @staticmethod
        def load_dataset(name: str, split: str) -> None:
            raise ValueError(f"asked for {split}")

    monkeypatch.setitem(sys.modules, "datasets", Hub())
    with pytest.raises(TaskError, match="asked for dev"):
        async with Evaluation(config(tmp_path), suites=["owner/name"], split="dev", agent="idle"):
            pass
    with pytest.raises(TaskError, match="asked for dev"):
        await check_all(
            "owner/name",
            runtime="process",
            docker_host="",
            jobs=1,
            json=None,
            again=False,
            network="off",
            stand_in="",
            split="dev",
            variables={},
            console=Console(quiet=True),
            bad=[],
        )
