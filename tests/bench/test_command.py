"""`bench` as a program: real engines and workers of a tiny model, every arm, and the files it leaves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from tests.tiny import tiny_model


@pytest.mark.slow
def test_a_bench_measures_every_arm_and_leaves_its_files(tmp_path: Path) -> None:
    arms = ["stream", "group", "lazy", "colocated", "async"]
    config = {
        "seed": 3,
        "output_dir": str(tmp_path / "runs"),
        "model": {"name": str(tiny_model(tmp_path / "model")), "dtype": "float32", "max_model_len": 256},
        "algo": {"group_size": 3, "prompts_per_step": 2},
        "rollout": {"max_tokens": 16},
        "engine": {"backend": "transformers", "kv_cache_gib": 0.0625, "max_num_seqs": 8},
        "bench": {
            "arms": arms,
            "repeats": 2,
            "shared_tokens": 20,
            "prompt_tokens": 8,
            "reply_tokens": 8,
            "result_tokens": 4,
            "tool_s": 0.1,
        },
    }
    (tmp_path / "bench.toml").write_text(tomli_w.dumps(config))
    told = bench(tmp_path, "bench.toml", "--json", "bench.json", "--chart", "bench.svg", "--record", "work.json")
    assert "speed-up" in told
    found = json.loads((tmp_path / "bench.json").read_text())
    assert list(found["arms"]) == arms
    assert {f"{arm}_over_lazy" for arm in arms if arm != "lazy"} == set(found["speedup"])
    assert "stream_error" in found["forecast"]
    assert all(arm["trainer_peak_gib"] > 0 and len(arm["step_s"]["values"]) == 2 for arm in found["arms"].values())
    assert (tmp_path / "bench.svg").read_text().startswith("<svg")
    assert json.loads((tmp_path / "work.json").read_text())["shared_tokens"] == 20
    again = bench(tmp_path, "bench.toml", "--set", "bench.workload=work.json", "--set", 'bench.arms=["stream", "lazy"]')
    assert "lazy" in again


def bench(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "thundersync", "bench", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        env={**environment(), "COLUMNS": "200"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
