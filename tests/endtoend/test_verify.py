"""`verify` with every real part: engine, sandboxes, worker processes, and the command line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomli_w

from tests.endtoend.rig import raw_config
from tests.tiny import tiny_model


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
