"""The shipped tasks are sound: each reference solution earns 1, an empty attempt 0, in real sandboxes."""

import asyncio
import filecmp
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandboxes import Command, ProcessRuntime, RuntimeUnavailable, SandboxSpec
from thundersync.core.types import Task
from thundersync.score.reward import RewardChecker
from thundersync.tasks.harbor import STARTER, load_tasks
from tools.make_starter_tasks import write_all

TRAIN = load_tasks("starter/train")
EVAL = load_tasks("starter/eval")


@pytest.fixture(scope="module")
async def runtime() -> AsyncIterator[ProcessRuntime]:
    runtime = ProcessRuntime()
    try:
        await runtime.check()
        yield runtime
    except RuntimeUnavailable as error:
        pytest.skip(str(error))
    finally:
        await runtime.close()


async def rewards_of(runtime: ProcessRuntime, task: Task, attempts: list[str]) -> list[float]:
    """The reward after each script of `attempts`, run in turn in one sandbox of the task."""
    spec = SandboxSpec(
        image=task.image.name, context=task.image.context, workdir=task.workdir, env=task.env, network=task.network
    )
    sandbox = await runtime.start(spec)
    try:
        rewards = []
        for script in attempts:
            await sandbox.run(Command(script=script))
            rewards.append((await RewardChecker().score(sandbox, task)).reward)
        return rewards
    finally:
        await sandbox.close()


async def rewards_of_all(runtime: ProcessRuntime, attempts: dict[str, list[str]]) -> dict[str, list[float]]:
    """Concurrently, a few at a time; `attempts` holds scripts by task id."""
    tasks = {task.task_id: task for task in TRAIN + EVAL}
    few = asyncio.Semaphore(4)

    async def one(task_id: str, scripts: list[str]) -> tuple[str, list[float]]:
        async with few:
            return task_id, await rewards_of(runtime, tasks[task_id], scripts)

    return dict(await asyncio.gather(*(one(task_id, scripts) for task_id, scripts in attempts.items())))


async def test_every_solution_earns_one_and_an_empty_attempt_nothing(runtime: ProcessRuntime) -> None:
    attempts = {task.task_id: ["", Path(task.solution).read_text(encoding="utf-8")] for task in TRAIN + EVAL}
    assert await rewards_of_all(runtime, attempts) == {task_id: [0.0, 1.0] for task_id in attempts}


@pytest.mark.parametrize(
    ("hack", "spared"),
    [
        ("mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt", ()),
        ("rm -rf /workspace/* /workspace/.??*", ()),
        ("echo 1 > /tests/reward.txt; exit 0", ()),
    ],
)
async def test_cheap_tricks_earn_nothing(runtime: ProcessRuntime, hack: str, spared: tuple[str, ...]) -> None:
    attempts = {task.task_id: [hack] for task in EVAL}
    assert {task_id for task_id, (reward,) in (await rewards_of_all(runtime, attempts)).items() if reward} == set(
        spared
    )


async def test_half_of_what_was_asked_earns_half(runtime: ProcessRuntime) -> None:
    attempts = {
        "folder-sun-moon": ["mkdir sun", "mkdir moon"],
        "nested-app-logs": ["mkdir app", "mkdir app/logs"],
        "count-cities": ["wc -l cities.txt > total.txt", "wc -l < cities.txt > total.txt"],
        "delete-p-q": ["rm p.txt", "rm q.txt"],
    }
    assert await rewards_of_all(runtime, attempts) == {task_id: [0.5, 1.0] for task_id in attempts}


def test_train_and_eval_share_no_task_and_no_sentence() -> None:
    for key in ("task_id", "instruction"):
        assert not {getattr(task, key) for task in TRAIN} & {getattr(task, key) for task in EVAL}
    assert (len(TRAIN), len(EVAL)) == (46, 18)


def test_instructions_are_one_short_sentence() -> None:
    for task in TRAIN + EVAL:
        assert len(task.instruction.split()) <= 16, task.instruction
        assert "\n" not in task.instruction


def test_the_shipped_folders_are_what_their_script_writes(tmp_path: Path) -> None:
    write_all(tmp_path)

    def differences(compared: filecmp.dircmp[str]) -> list[str]:
        found = compared.left_only + compared.right_only + compared.diff_files
        return found + [name for part in compared.subdirs.values() for name in differences(part)]

    assert differences(filecmp.dircmp(tmp_path / "train", STARTER / "train")) == []
    assert differences(filecmp.dircmp(tmp_path / "eval", STARTER / "eval")) == []
