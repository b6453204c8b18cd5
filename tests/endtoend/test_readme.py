"""The README's Python examples, run as they stand, on a small stand-in for the quickstart's model and tasks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from tests.endtoend.rig import raw_config
from tests.test_docs import example
from tests.tiny import tiny_model

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.slow  # .ci/run has it in its newcomer's hour
@pytest.mark.parametrize("name", ["steps", "rollout"])
def test_the_readmes_example_runs(name: str, tmp_path: Path) -> None:
    raw = raw_config(tmp_path, tiny_model(tmp_path / "model"), max_steps=1)
    raw["eval"] = {"env": {"path": "starter/eval"}, "num_examples": 1}
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.toml").write_text(tomli_w.dumps(raw))
    (tmp_path / "example.py").write_text(example(name))
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
