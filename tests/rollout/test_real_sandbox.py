"""Whole rollouts in real process sandboxes: real commands, a real checker, a scripted engine."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sandboxes import DockerRuntime, ProcessRuntime, Runtime
from tests.boxes import process_runtime
from tests.docker_daemon import BASE_IMAGE, DockerDaemon
from tests.fakes import ByteTokenizer, FakeGenerator, Feed, a_task, turns
from tests.tasks.repairs import a_row
from thundersync.config import RolloutConfig
from thundersync.core.types import Checker, Failed, Image, Rollout, Scored, Task
from thundersync.rollout.agent import ShellAgent
from thundersync.rollout.dialogue import Renderer
from thundersync.rollout.runner import GroupPlan, RolloutRunner
from thundersync.score.reward import RewardChecker
from thundersync.tasks.kept import KeptFiles
from thundersync.tasks.swe import smith_task

CHECK = """
mkdir -p /logs/verifier
if [ "$(cat greeting.txt 2>/dev/null)" = "hello" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
exit 7
"""


def bash(*lines: str) -> str:
    return "```bash\n" + "\n".join(lines) + "\n```"


@pytest.fixture
async def runtime() -> AsyncIterator[ProcessRuntime]:
    runtime = await process_runtime()
    yield runtime
    await runtime.close()


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return checked_by(tmp_path, CHECK)


def checked_by(folder: Path, script: str, *, timeout_s: float = 60.0) -> Task:
    tests = folder / "tests"
    tests.mkdir()
    (tests / "test.sh").write_text(script)
    (folder / "Dockerfile").write_text("FROM debian:bookworm-slim\nWORKDIR /workspace\n")
    return a_task(image=Image(context=str(folder)), checker=Checker(tests=str(tests), timeout_s=timeout_s))


async def roll(runtime: Runtime, task: Task, *replies: str, **config: Any) -> Rollout:
    agent = ShellAgent(
        renderer=Renderer(ByteTokenizer()),
        runtime=runtime,
        checker=RewardChecker(runtime=runtime),
        config=RolloutConfig(**config),
        prompt=[],
        emit=Feed(),
    )
    return await agent.run(
        task, rollout_id="r", group_id="g", generator=FakeGenerator(turns(*replies)), policy_version=0
    )


def reward(rollout: Rollout) -> float:
    assert isinstance(rollout.outcome, Scored), rollout.outcome
    return rollout.outcome.reward


async def test_what_the_agent_did_is_what_is_judged(runtime: ProcessRuntime, task: Task) -> None:
    solved = await roll(runtime, task, bash("pwd", "echo hello > greeting.txt"), bash("submit"))
    assert reward(solved) == 1.0
    assert solved.turns[0].output == "/workspace"
    idle = await roll(runtime, task, bash("submit"))
    assert reward(idle) == 0.0
    assert solved.image == idle.image and solved.image.startswith("sha256:")


@pytest.mark.docker
async def test_a_rollout_records_the_image_that_its_container_was_made_from(
    docker_daemon: DockerDaemon, task: Task
) -> None:
    containers = DockerRuntime(docker_daemon.host)
    named = msgspec.structs.replace(task, image=Image(name=BASE_IMAGE))
    rollout = await roll(containers, named, bash("echo hello > greeting.txt"), bash("submit"))
    await containers.close()
    assert reward(rollout) == 1.0
    assert rollout.image == docker_daemon.docker("inspect", "-f", "{{.Id}}", BASE_IMAGE).strip()
    assert rollout.image_digest == ""  # it came from no registry


async def test_output_comes_back_in_its_order_with_exit_codes_and_line_numbers(
    runtime: ProcessRuntime, task: Task
) -> None:
    rollout = await roll(runtime, task, bash("echo one", "echo two >&2", "nosuchcommand", "exit 3"), bash("submit"))
    told = rollout.turns[0].output.split("\n")
    assert told[:3] == ["[exit code 3]", "one", "two"]
    assert "line 3" in told[3] and "not found" in told[3]


async def test_a_syntax_error_is_told_and_the_rollout_goes_on(runtime: ProcessRuntime, task: Task) -> None:
    rollout = await roll(runtime, task, bash("if true; then"), bash("echo hello > greeting.txt", "submit"))
    assert "[exit code" in rollout.turns[0].output and "syntax error" in rollout.turns[0].output
    assert reward(rollout) == 1.0


async def test_long_output_is_cut_with_an_exact_count(runtime: ProcessRuntime, task: Task) -> None:
    rollout = await roll(
        runtime, task, bash("head -c 3000 /dev/zero | tr '\\0' x; printf end"), bash("submit"), output_limit_chars=100
    )
    assert rollout.turns[0].output == "x" * 50 + "\n[... 2903 characters cut ...]\n" + "x" * 47 + "end"


async def test_a_command_past_its_limit_is_stopped_and_the_sandbox_lives_on(
    runtime: ProcessRuntime, task: Task
) -> None:
    rollout = await roll(
        runtime,
        task,
        bash("echo before; sleep 600"),
        bash("echo hello > greeting.txt", "submit"),
        command_timeout_s=0.5,
    )
    assert rollout.turns[0].output == "[stopped after 0.5 s]\nbefore"
    assert reward(rollout) == 1.0


async def test_forged_rewards_tests_and_watchers_change_nothing(runtime: ProcessRuntime, task: Task) -> None:
    forge = bash(
        "mkdir -p /logs/verifier /tests mine",
        "echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json",
        "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
        "rm -rf /logs/verifier && ln -s $PWD/mine /logs/verifier; echo 1 > mine/reward.txt",
        "setsid nohup bash -c 'while :; do echo 1 > /logs/verifier/reward.json; done' >/dev/null 2>&1 &",
        "submit",
    )
    assert reward(await roll(runtime, task, forge)) == 0.0


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 0", "no_reward"),
        (": > /logs/verifier/reward.txt", "no_reward"),
        ("mkdir /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt", "no_reward"),
        ("echo '[1]' > /logs/verifier/reward.json", "no_reward"),
        ("echo 1 > /logs/verifier/reward.txt; sleep 600", "checker"),
    ],
)
async def test_a_checker_without_a_usable_reward_is_a_failed_world(
    runtime: ProcessRuntime, tmp_path: Path, script: str, reason: str
) -> None:
    task = checked_by(tmp_path, script, timeout_s=1.0 if "sleep" in script else 60.0)
    rollout = await roll(runtime, task, bash("submit"))
    assert isinstance(rollout.outcome, Failed) and rollout.outcome.reason == reason


async def test_a_step_of_groups_runs_side_by_side(runtime: ProcessRuntime, task: Task) -> None:
    finished: list[Rollout] = []

    async def on_rollout(rollout: Rollout) -> None:
        finished.append(rollout)

    def script(asked: Any) -> Any:
        solves = asked.rollout_id.endswith("1")
        return turns(bash("echo hello > greeting.txt" if solves else "ls", "submit"))(asked)

    agent = ShellAgent(
        renderer=Renderer(ByteTokenizer()),
        runtime=runtime,
        checker=RewardChecker(runtime=runtime),
        config=RolloutConfig(),
        prompt=[],
        emit=Feed(),
    )
    runner = RolloutRunner(
        agent=agent, generators=[FakeGenerator(script)], on_failure="retry", max_attempts=2, emit=Feed()
    )
    groups = [GroupPlan(group_id=f"g{each}", task=task, rollout_ids=[f"g{each}-0", f"g{each}-1"]) for each in range(3)]
    await runner.run(groups, policy_version=0, on_rollout=on_rollout)
    assert (
        sorted((rollout.rollout_id[-1], reward(rollout)) for rollout in finished) == [("0", 0.0)] * 3 + [("1", 1.0)] * 3
    )


async def test_a_repair_begins_with_its_bug_and_is_judged_in_another_sandbox(
    runtime: ProcessRuntime, tmp_path: Path
) -> None:
    found = smith_task(a_row(tmp_path), suite="s", keep=KeptFiles(tmp_path / "kept"), near=tmp_path)
    assert found.task is not None
    solved = await roll(runtime, found.task, bash("cat calc.py", "sed -i 's/a - b/a + b/' calc.py"), bash("submit"))
    assert "a - b" in solved.turns[0].output
    assert reward(solved) == 1.0
    assert reward(await roll(runtime, found.task, bash("submit"))) == 0.0
