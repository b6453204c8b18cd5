"""Another trainer beside ours: found or asked for, each in its own environment, and what was measured told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from thundersync.bench.against.command import WORK, find_trl, work_of
from thundersync.bench.against.compare import ArmFailed, compare, environment_of, told
from thundersync.config_file import read_config
from thundersync.errors import ConfigError
from thundersync.placement import QUIET_THREADS

MEASURED = {
    "step_s": [2.0, 4.0, 3.0],
    "cpu_s": [4.0, 4.0, 4.0],
    "prompt_tokens": [20, 22],
    "sampled_tokens": [96, 96, 96],
    "who": "a script",
}
NAMED = {"name": "m", "dtype": "float32", "prompts": 2, "replies": 4, "tokens": 12}


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_only_our_own_processes_have_what_a_run_gives_them() -> None:
    user = {"HOME": "/h", "OMP_NUM_THREADS": "1"}
    theirs, ours = environment_of("trl", user), environment_of("thundersync", user)
    assert not theirs.keys() & QUIET_THREADS.keys()
    assert ours == theirs | QUIET_THREADS
    assert "OMP_NUM_THREADS" not in theirs
    assert environment_of("thundersync", {"OMP_WAIT_POLICY": "ACTIVE"})["OMP_WAIT_POLICY"] == "ACTIVE"


def test_seconds_and_tokens_a_second_stand_side_by_side(tmp_path: Path) -> None:
    theirs = script(tmp_path / "trl", f"cat >/dev/null; echo '{json.dumps(MEASURED)}'")
    half = MEASURED | {"step_s": [1.0, 2.0, 1.5]}
    ours = script(tmp_path / "ours", f"cat >/dev/null; echo '{json.dumps(half)}'")
    said: list[str] = []
    found = compare({"trl": str(theirs), "thundersync": str(ours)}, NAMED, 2, say=said.append)
    assert [line.partition(":")[0] for line in said] == ["trl", "thundersync", "thundersync", "trl"]
    assert found["ratios"] == [2.0, 2.0]
    lines = "\n".join(told(found))
    assert "2 prompts x 4 replies x 12 tokens" in lines
    assert "trl          3.00 s a step (median of 6" in lines and "32 sampled tokens/s" in lines
    assert "thundersync  1.50 s a step" in lines and "64 sampled tokens/s" in lines
    assert "TRL takes 2.00 x as long a step" in lines


def test_a_process_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    broken = script(tmp_path / "trl", "echo no such model >&2; exit 3")
    with pytest.raises(ArmFailed, match="trl ended with 3:\nno such model"):
        compare({"trl": str(broken)}, NAMED, 1, say=lambda line: None)


def test_the_first_python_that_has_trl_is_taken_and_without_one_it_is_said_how_to_make_it(tmp_path: Path) -> None:
    without, having = script(tmp_path / "no", "exit 1"), script(tmp_path / "yes", "exit 0")
    assert find_trl([tmp_path / "nowhere", without, having]) == having
    with pytest.raises(ConfigError, match="no Python that has trl and datasets") as caught:
        find_trl([tmp_path / "nowhere", without])
    assert "pip install trl datasets" in caught.value.remedy


def test_the_work_without_a_configuration_can_be_changed_key_by_key() -> None:
    work = work_of(read_config(WORK, ["algo.group_size=3", "rollout.max_tokens=8"], own_tasks=True).config)
    assert (work["prompts"], work["replies"], work["tokens"], work["steps"], work["warmup"]) == (2, 3, 8, 5, 2)
    assert Path(work["model"]).is_dir()
    adapter = read_config(WORK, ["model.lora.rank=4"], own_tasks=True).config
    with pytest.raises(ConfigError, match="plain GRPO"):
        work_of(adapter)


def test_the_command_tells_how_to_get_what_it_misses(tmp_path: Path) -> None:
    without = script(tmp_path / "python", "exit 1")
    shown = bench("--against", "trl", "--trl-python", str(without))
    assert shown.returncode == 1
    assert "no Python that has trl and datasets" in shown.stdout
    assert "python -m venv .venv-trl" in shown.stdout
    assert bench().returncode == 2


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "thundersync", "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        check=False,
    )
