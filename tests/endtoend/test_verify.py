"""`verify` and the live audit with every real part: engine, sandboxes, worker processes, and the command line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomli_w

from tests.endtoend.rig import config, raw_config
from tests.tiny import tiny_model
from thundersync.engine import Engine


def verify(folder: Path, model: Path, *arguments: str, **changes: object) -> tuple[int, str, dict[str, Any]]:
    """The command's exit code, what it printed, and what it wrote as JSON."""
    file, found = folder / "config.toml", folder / "proof.json"
    file.write_text(tomli_w.dumps(raw_config(folder, model, **changes)))
    done = subprocess.run(
        [sys.executable, "-m", "thundersync", "verify", str(file), "--json", str(found), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, json.loads(found.read_text()) if found.is_file() else {}


def test_a_configuration_is_proved_on_its_own_rollouts_by_all_its_workers(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", std=0.1)
    code, text, proof = verify(tmp_path, model, algo__group_size=4, trainer__workers=2)
    assert code == 0, text
    assert proof["ok"] and proof["workers"] == 2 and proof["rollouts"] == 8
    paths = {finding["path"] for finding in proof["findings"]}
    assert {"streamed", "packed", "no room for parts", "spilled parts", "held for rewards", "lazy"} <= paths
    (run,) = (tmp_path / "runs").iterdir()
    assert [each.name for each in (run / "rollouts").iterdir()] == ["step-000000.jsonl.zst"]
    assert not list((run / "checkpoints").iterdir())  # nothing was committed


def test_a_distilling_configuration_is_proved_with_its_teachers_scores(tmp_path: Path) -> None:
    model, teacher = tiny_model(tmp_path / "model", std=0.1), tiny_model(tmp_path / "teacher", std=0.1, seed=1)
    code, text, proof = verify(
        tmp_path, model, "--size", "2", algo__type="opd", teacher={"name": str(teacher), "topk": 4}
    )
    assert code == 0, text
    assert proof["rollouts"] == 4
    assert "same bits" in text
    assert {"as it ran", "forward", "immediate", "deferred"} <= {finding["path"] for finding in proof["findings"]}


def test_a_teacher_that_is_the_policy_is_told_to_prove_nothing(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", std=0.1)
    code, text, _ = verify(tmp_path, model, algo__type="opd", teacher={"name": str(model)})
    assert code == 1
    assert "teacher and policy agree" in " ".join(text.split())


async def test_live_steps_are_audited_before_their_commit(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", std=0.1)
    changes = {"stream__verify_every": 1, "algo__group_size": 4, "trainer__workers": 2}
    async with Engine(config(tmp_path, model, **changes)) as engine:
        steps = [step async for step in engine.steps()]
    events = [json.loads(line) for line in (engine.run_dir / "events.jsonl").read_text().splitlines()]
    audits = [event for event in events if event["kind"] == "audited"]
    assert [event["step"] for event in audits] == [step.step for step in steps if not step.empty]
    assert audits and all(event["ok"] for event in audits)
    assert all("audit_relative_l2" in step.metrics for step in steps if not step.empty)
