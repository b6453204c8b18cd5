"""Repairs made of real packages: thirty and more, each solved by its reference and by nothing else; and a GRPO run on
repairs in Docker, whose rewards are test runs."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from sandboxes import Command, DockerRuntime, ProcessRuntime, Runtime, Sandbox
from tests.boxes import process_runtime
from tests.docker_daemon import DockerDaemon
from tests.rollout.test_hands import FIX, SUBMIT, roll, scored
from tests.tasks.repairs import a_row
from tests.tasks.test_stand_in import IMAGE, image
from tests.tasks.toy import toy_package
from tests.tiny import tiny_model
from thundersync.config import EnvConfig
from thundersync.config_file import read_config
from thundersync.core.types import Outcome, Scored, Task
from thundersync.engine import Engine
from thundersync.rollout.policy import Policy
from thundersync.tasks.check import TaskCheck, TaskReport
from thundersync.tasks.kept import KeptFiles
from thundersync.tasks.load import find_all, load_env
from thundersync.tasks.make_command import make_all
from thundersync.tasks.package import PackageFailed
from thundersync.tasks.swe import kind_of, smith_task

__all__ = ["image"]
pytestmark = pytest.mark.slow
PACKAGES = {"addict==2.4.0": "MIT", "cachetools==8.0.2": "MIT", "toolz==1.2.0": "BSD-3-Clause"}
"""Pure Python, tests in their source distributions, a run of them takes seconds."""
REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
async def boxes() -> AsyncIterator[ProcessRuntime]:
    runtime = await process_runtime()
    yield runtime
    await runtime.close()


@pytest.fixture(scope="module")
async def containers(docker_daemon: DockerDaemon, image: str) -> AsyncIterator[DockerRuntime]:
    runtime = DockerRuntime(docker_daemon.host)
    yield runtime
    await runtime.close()


async def checked(runtime: Runtime, out: Path, keep: KeptFiles) -> list[TaskReport]:
    """An attempt that does nothing and the reference solution, on every task."""
    reports: list[TaskReport] = []
    await TaskCheck(runtime, jobs=2).run(find_all(str(out), keep=keep), done=reports.append)
    return reports


async def test_three_packages_become_more_than_thirty_validated_repairs(boxes: ProcessRuntime, tmp_path: Path) -> None:
    out = tmp_path / "out"
    try:
        made = await make_all(
            list(PACKAGES),
            out,
            count=11,
            seed=1,
            jobs=2,
            timeout_s=120.0,
            beside=(),
            runtime="process",
            docker_host="",
            base_image="python:3.11",
            console=Console(width=160),
        )
    except PackageFailed as error:
        if "cannot be had" in error.message:
            pytest.skip(f"THREE PACKAGES ARE NOT TESTED, THE PACKAGE INDEX CANNOT BE REACHED: {error.message}")
        raise
    rows = [row for each in made for row in each.rows]
    assert [len(each.rows) for each in made] == [11, 11, 11]
    assert len({row["patch"] for row in rows}) == 33
    assert len({kind_of(row["instance_id"]) for row in rows}) >= 6
    reports = await checked(boxes, out, KeptFiles(tmp_path / "kept"))
    assert len(reports) == 33
    assert {(each.state, each.empty, each.solved) for each in reports} == {("ok", 0.0, 1.0)}, [
        each for each in reports if each.state != "ok"
    ]


async def make_toy(tmp_path: Path, host: str, count: int) -> Path:
    out = tmp_path / "out"
    await make_all(
        [str(toy_package(tmp_path))],
        out,
        count=count,
        seed=1,
        jobs=2,
        timeout_s=600.0,
        beside=(),
        runtime="docker",
        docker_host=host,
        base_image=IMAGE,
        console=Console(width=160),
    )
    return out


@pytest.mark.docker
async def test_repairs_are_made_and_checked_in_containers(
    containers: DockerRuntime, docker_daemon: DockerDaemon, tmp_path: Path
) -> None:
    out = await make_toy(tmp_path, docker_daemon.host, 3)
    reports = await checked(containers, out, KeptFiles(tmp_path / "kept"))
    assert [(each.state, each.empty, each.solved) for each in reports] == [("ok", 0.0, 1.0)] * 3, reports


@pytest.mark.docker
async def test_a_repair_agent_and_a_terminal_agent_work_in_containers(
    containers: DockerRuntime, tmp_path: Path
) -> None:
    found = smith_task(a_row(tmp_path), suite="s", keep=KeptFiles(tmp_path / "kept"), near=tmp_path)
    assert found.task is not None
    file = Path(found.task.image.context) / "Dockerfile"
    file.write_text(file.read_text().replace("debian", IMAGE))
    assert scored(await roll(containers, found.task, FIX, SUBMIT)) == (1.0, "submitted")
    typed = '{"commands": [{"keystrokes": "sed -i \'s/a - b/a + b/\' calc.py; clear\\n", "duration": 20}]}'
    done = '{"commands": [], "task_complete": true}'
    rollout = await roll(containers, found.task, typed, done, done, agent="terminal")
    assert scored(rollout) == (1.0, "submitted")


async def half_of_the_time(task: Task, policy: Policy, sandbox: Sandbox) -> Outcome | None:
    """The policy's first token decides whether its bug is repaired; what it is worth, only the tests say."""
    reply = await policy.chat(policy.opening)
    script = await asyncio.to_thread(Path(task.solution).read_text)
    change = script if reply.token_ids[0] % 2 else "echo changed > NOTES.txt"
    result = await sandbox.run(Command(script=change))
    assert result.exit_code == 0, result
    return None


@pytest.mark.docker
async def test_a_grpo_run_on_repairs_learns_from_what_their_tests_say_in_containers(
    docker_daemon: DockerDaemon, containers: DockerRuntime, tmp_path: Path
) -> None:
    out = await make_toy(tmp_path, docker_daemon.host, 2)
    config = read_config(
        REPO / "configs" / "repairs.toml",
        [
            f"env.path={out}",
            f"model.name={tiny_model(tmp_path / 'model')}",
            f"output_dir={tmp_path / 'runs'}",
            f"sandbox.docker_host={docker_daemon.host}",
            "engine.backend=transformers",
            "engine.kv_cache_gib=0.0625",
            "model.dtype=float32",
            "algo.prompts_per_step=2",
            "rollout.max_tokens=4",
            "sandbox.max_containers=4",
            "max_steps=2",
        ],
    ).config
    rewards: list[float] = []
    async with Engine(config, agent=half_of_the_time) as engine:
        async for step in engine.steps():
            for rollout in step.rollouts:
                assert isinstance(rollout.outcome, Scored), rollout.outcome
                lucky = rollout.sequences[0].token_ids[rollout.turns[0].start] % 2
                assert rollout.outcome.reward == float(lucky)
                # Tests were run either way: what passed before a wrong change still does.
                assert rollout.outcome.rewards == {"reward": float(lucky), "fixed": float(lucky), "kept": 1.0}
                rewards.append(rollout.outcome.reward)
            assert step.metrics["reward_mean"] == sum(rewards[-8:]) / 8
    assert len(rewards) == 16 and {0.0, 1.0} == set(rewards)
    left = docker_daemon.docker("ps", "-aq")
    assert not left.split()
    # The repair agent itself, on the same path: a random model repairs nothing, and its steps are judged and closed.
    alone = msgspec.structs.replace(config, name="alone", max_steps=1)
    async with Engine(alone) as engine:
        (only,) = [step async for step in engine.steps()]
    outcomes = [rollout.outcome for rollout in only.rollouts]
    assert {outcome.reward for outcome in outcomes if isinstance(outcome, Scored)} == {0.0} and len(outcomes) == 8
    assert len(load_env(EnvConfig(path=str(out)), keep=KeptFiles(tmp_path / "kept"))) == 2
