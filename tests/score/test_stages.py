"""Tasks in stages, over real boxes: what each brings, when one is good enough, what all are worth together."""

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from sandboxes import DockerRuntime, ProcessRuntime
from tests.boxes import process_runtime
from tests.docker_daemon import BASE_IMAGE, DockerDaemon
from tests.fakes import ByteTokenizer, FakeGenerator, Feed, turns
from tests.rollout.test_real_sandbox import bash
from tests.tasks.folders import STAGED, make_staged
from thundersync.config import RolloutConfig
from thundersync.core.types import Failed, FinalContent, Rollout, Scored, Task
from thundersync.errors import TaskError
from thundersync.rollout.agent import ShellAgent
from thundersync.rollout.dialogue import Renderer
from thundersync.score.reward import CheckFailed, RewardChecker, Verdict
from thundersync.score.stages import good_enough, in_stages, joined, stages_of
from thundersync.tasks.check import TaskCheck
from thundersync.tasks.harbor import find_harbor, load_tasks

SHARED = Path(os.environ.get("THUNDERSYNC_TASKS", Path(__file__).parents[3] / "shared" / "tasks"))
LOOK = "ls /tests /logs/verifier 2>/dev/null; "


@pytest.fixture(scope="module")
async def runtime() -> AsyncIterator[ProcessRuntime]:
    runtime = await process_runtime()
    yield runtime
    await runtime.close()


def staged(folder: Path, toml: str = STAGED) -> Task:
    make_staged(folder, toml=toml)
    (task,) = load_tasks(str(folder))
    return task


async def roll(
    runtime: ProcessRuntime, task: Task, *replies: str, contents: list[FinalContent] | None = None
) -> Rollout:
    agent = ShellAgent(
        renderer=Renderer(ByteTokenizer()),
        runtime=runtime,
        checker=RewardChecker(runtime=runtime),
        config=RolloutConfig(max_turns=len(replies)),
        prompt=[],
        emit=Feed(),
        on_content=contents.append if contents is not None else None,
    )
    return await agent.run(
        task, rollout_id="r", group_id="g", generator=FakeGenerator(turns(*replies)), policy_version=0
    )


def outcome(rollout: Rollout) -> Scored:
    assert isinstance(rollout.outcome, Scored), rollout.outcome
    return rollout.outcome


def test_each_stage_is_read_with_what_it_leaves_to_the_task(tmp_path: Path) -> None:
    task = staged(tmp_path)
    make, greet = task.stages
    assert (task.instruction, make.instruction, greet.instruction) == ("Make made.", "Make made.", "Greet.")
    assert (make.agent_timeout_s, greet.agent_timeout_s, task.agent_timeout_s) == (30.0, 40.0, 70.0)
    assert (make.checker.timeout_s, greet.checker.timeout_s, task.checker_timeout_s) == (20.0, 10.0, 30.0)
    assert (make.checker.env, greet.checker.env) == ({"WHO": "all"}, {"WHO": "you"})
    assert (make.min_reward, greet.min_reward, task.stage_rewards) == (1.0, None, "mean")
    assert make.healthcheck is None and greet.healthcheck is not None and greet.healthcheck.retries == 2
    assert make.files == "" and greet.files.endswith("steps/greet/workdir")
    assert [each.solution for each in stages_of(task)] == [make.solution, greet.solution]


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ("steps/greet/instruction.md", "steps/greet/instruction.md is missing"),
        ("steps/make/tests/test.sh", "steps/make/tests/test.sh is missing"),
        ('name = "greet"|name = "other"', "steps/other is missing"),
        ('name = "greet"|name = "make"', "names a step twice"),
        ('name = "greet"|name = "../x"', "steps/../x is missing"),
        ("min_reward = 1.0|min_reward = true", "[[steps]]"),
        ("timeout_sec = 30.0|user = 'x'", 'make asks for what cannot be run yet: agent.user = "x"'),
        ('schema_version = "1.1"|multi_step_reward_strategy = "best"', "it is mean or final"),
    ],
)
def test_what_is_wrong_with_a_stage_is_told(tmp_path: Path, broken: str, told: str) -> None:
    folder = make_staged(tmp_path)
    old, bar, new = broken.partition("|")
    if bar:
        text = (folder / "task.toml").read_text()
        (folder / "task.toml").write_text(text.replace(old, new))
    else:
        (folder / old).unlink()
    with pytest.raises(TaskError) as caught:
        load_tasks(str(tmp_path))
    assert told in caught.value.message


def test_folders_of_steps_without_their_tables_are_told(tmp_path: Path) -> None:
    make_staged(tmp_path, toml=STAGED.partition("[[steps]]")[0])
    with pytest.raises(TaskError, match=r"steps has no \[\[steps\]\] in task.toml"):
        load_tasks(str(tmp_path))


async def test_a_rollout_goes_from_stage_to_stage_in_one_conversation(runtime: ProcessRuntime, tmp_path: Path) -> None:
    contents: list[FinalContent] = []
    second = bash(LOOK + "cat kept.txt > greeting; ls", "submit")
    rollout = await roll(runtime, staged(tmp_path), bash("touch made", "submit"), second, contents=contents)
    assert outcome(rollout) == Scored(reward=1.0, rewards={"reward": 1.0}, stop="submitted"), rollout.turns
    assert [each.content for each in rollout.messages if each.role == "user"] == ["Make made.", "Greet."]
    assert rollout.turns[1].output.split() == ["/logs/verifier:", "/tests:", "greeting", "kept.txt", "made", "name.txt"]
    assert len(rollout.sequences) == 1 and len(contents) == 1
    assert contents[0].sampled_tokens == rollout.sampled_tokens


async def test_a_stage_that_is_not_good_enough_is_the_last(runtime: ProcessRuntime, tmp_path: Path) -> None:
    rollout = await roll(runtime, staged(tmp_path), bash("submit"), bash("submit"))
    assert outcome(rollout).reward == 0.0 and len(rollout.turns) == 1


async def test_partial_rewards_are_averaged_or_the_last_counts(runtime: ProcessRuntime, tmp_path: Path) -> None:
    replies = (bash("touch made", "submit"), bash("submit"))
    assert outcome(await roll(runtime, staged(tmp_path / "a"), *replies)).reward == 0.75
    final = STAGED.replace("[agent]", 'multi_step_reward_strategy = "final"\n[agent]', 1)
    assert outcome(await roll(runtime, staged(tmp_path / "b", final), *replies)).reward == 0.5


async def test_stages_that_no_turn_is_left_for_are_judged_as_they_stand(
    runtime: ProcessRuntime, tmp_path: Path
) -> None:
    rollout = await roll(runtime, staged(tmp_path), bash("touch made"))
    assert outcome(rollout) == Scored(reward=0.75, rewards={"reward": 0.75}, stop="max_turns")


async def test_a_health_check_that_fails_is_the_agents_doing_once_it_has_acted(
    runtime: ProcessRuntime, tmp_path: Path
) -> None:
    task = staged(tmp_path / "a", STAGED.replace("test -f /app/made", "test ! -f /app/made"))
    assert outcome(await roll(runtime, task, bash("touch made", "submit"), bash("submit"))).reward == 0.5
    first = STAGED.replace("min_reward = 1.0", '[steps.healthcheck]\ncommand = "false"\nretries = 1')
    failed = await roll(runtime, staged(tmp_path / "b", first), bash("submit"))
    assert isinstance(failed.outcome, Failed) and "health check of stage make failed 1 times" in failed.outcome.detail


async def test_a_setup_that_fails_is_the_worlds_failure(runtime: ProcessRuntime, tmp_path: Path) -> None:
    task = staged(tmp_path)
    (Path(task.stages[1].files) / "setup.sh").write_text("echo no such luck; exit 3\n")
    rollout = await roll(runtime, task, bash("touch made", "submit"), bash("submit"))
    assert isinstance(rollout.outcome, Failed) and "no such luck" in rollout.outcome.detail


async def test_a_stage_may_bring_a_link_to_what_is_not_there_yet(runtime: ProcessRuntime, tmp_path: Path) -> None:
    task = staged(tmp_path)
    (Path(task.stages[1].files) / "link").symlink_to("greeting")
    rollout = await roll(runtime, task, bash("touch made", "submit"), bash("cat kept.txt > link", "submit"))
    assert outcome(rollout).reward == 1.0


async def test_a_task_in_stages_is_solved_by_its_solutions_and_by_nothing_else(
    runtime: ProcessRuntime, tmp_path: Path
) -> None:
    (found,) = find_harbor(str(make_staged(tmp_path)))
    report = await TaskCheck(runtime, jobs=1).check(found)
    assert (report.state, report.empty, report.solved) == ("ok", 0.0, 1.0), report.reason


@pytest.mark.docker
async def test_a_setup_is_roots_and_what_it_leaves_in_the_folder_the_agents(
    docker_daemon: DockerDaemon, tmp_path: Path
) -> None:
    folder = make_staged(tmp_path)
    (folder / "environment" / "Dockerfile").write_text(f"FROM {BASE_IMAGE}\nWORKDIR /app\n")
    setup = folder / "steps" / "greet" / "workdir" / "setup.sh"
    setup.write_text(
        "set -e\ntouch /etc/installed\necho a line > /logs/artifacts/setup.txt\nmkdir new\ncp name.txt new/kept\n"
    )
    (folder / "steps" / "greet" / "solution" / "solve.sh").write_text(
        "set -e\necho more >> /logs/artifacts/mine.txt\ntouch /logs/agent/notes\nmv new/kept greeting\n"
    )
    runtime = DockerRuntime(docker_daemon.host)
    try:
        (found,) = find_harbor(str(folder))
        report = await TaskCheck(runtime, jobs=1).check(found)
        assert (report.state, report.empty, report.solved) == ("ok", 0.0, 1.0), report.reason
    finally:
        await runtime.close()


@pytest.mark.docker
async def test_where_the_folder_is_the_whole_image_nothing_in_it_changes_hands(
    docker_daemon: DockerDaemon, tmp_path: Path
) -> None:
    folder = make_staged(tmp_path, toml=STAGED.replace("/app/made", "/made"))
    (folder / "environment" / "Dockerfile").write_text(f"FROM {BASE_IMAGE}\nWORKDIR /\nRUN touch seen; chgrp 7 seen\n")
    brought = folder / "steps" / "greet" / "workdir" / "workspace" / "brought"
    brought.parent.mkdir()
    brought.write_text("")
    (folder / "steps" / "greet" / "solution" / "solve.sh").write_text(
        "[ $(stat -c %g seen) = 7 ] && [ $(stat -c %u workspace) = $(stat -c %u home/agent) ] &&\n"
        "[ $(stat -c %u workspace/brought) != 0 ] && cp kept.txt greeting\n"
    )
    runtime = DockerRuntime(docker_daemon.host)
    try:
        (found,) = find_harbor(str(folder))
        report = await TaskCheck(runtime, jobs=1).check(found)
        assert (report.state, report.empty, report.solved) == ("needs_root", 0.0, 1.0), report.reason
    finally:
        await runtime.close()


@pytest.mark.skipif(not SHARED.is_dir(), reason="the published tasks are not here (THUNDERSYNC_TASKS)")
async def test_the_published_example_is_solved_stage_by_stage(runtime: ProcessRuntime, tmp_path: Path) -> None:
    folder = tmp_path / "cookbook-multi-step"
    shutil.copytree(SHARED / "harbor" / "cookbook-multi-step", folder)
    (folder / "environment" / "Dockerfile").write_text("FROM ubuntu:24.04\nWORKDIR /app\n")  # apt needs a network
    (found,) = find_harbor(str(folder))
    report = await TaskCheck(runtime, jobs=1).check(found)
    assert (report.state, report.empty, report.solved) == ("ok", 0.0, 1.0), report.reason


async def test_whoever_does_not_know_of_stages_is_refused(runtime: ProcessRuntime, tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="has stages"):
        await RewardChecker(runtime=runtime).score(None, staged(tmp_path))  # type: ignore[arg-type]  # never looked at


def test_good_enough_is_told_by_one_number_or_by_name(tmp_path: Path) -> None:
    stage = staged(tmp_path).stages[0]

    def enough(least: float | dict[str, float] | None, **rewards: float) -> bool:
        return good_enough(msgspec.structs.replace(stage, min_reward=least), Verdict(reward=0.5, rewards=rewards))

    assert enough(None) and enough(0.5) and not enough(0.6)
    assert enough({"a": 1.0}, a=1.0) and not enough({"a": 1.0, "b": 0.1}, a=1.0)


def test_rewards_of_stages_are_joined_by_name() -> None:
    verdicts = [Verdict(reward=1.0, rewards={"a": 1.0}), Verdict(reward=0.5, rewards={"a": 0.0, "b": 1.0})]
    assert joined(verdicts, last_only=False) == Verdict(reward=0.5, rewards={"a": 0.5, "b": 0.5})
    assert joined(verdicts, last_only=True) == verdicts[1]


async def test_a_task_without_stages_is_its_own_only_one(runtime: ProcessRuntime) -> None:
    acted: list[bool] = []
    task = Task(task_id="t", suite="s", instruction="i", image=None, checker=None)  # type: ignore[arg-type]
    assert stages_of(task) == [task]

    async def act(stage: Task, last: bool) -> None:
        acted.append(last)

    async def judge(stage: Task) -> Verdict:
        return Verdict(reward=1.0, rewards={})

    checker = RewardChecker()
    assert (await in_stages(None, task, act=act, judge=judge, checker=checker)).reward == 1.0  # type: ignore[arg-type]
    assert acted == [True]
