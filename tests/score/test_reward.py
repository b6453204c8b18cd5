"""The checker's verdict: every shape a reward file comes in, and no zero that was not written."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sandboxes.base import SandboxSpec
from sandboxes.errors import SandboxGone
from tests.fakes import FakeRuntime, a_task, done
from thundersync.core.types import Checker, Task
from thundersync.score.reward import (
    CTRF,
    CheckFailed,
    RewardChecker,
    Verdict,
    parse_reward_json,
    parse_reward_text,
    training_reward,
)


@pytest.mark.parametrize(
    ("content", "reward"),
    [(b"1\n", 1.0), (b"0.5", 0.5), (b" 0 \n", 0.0), (b"-1", -1.0), (b"1e-3", 0.001), (b".5", 0.5)],
)
def test_one_number_is_a_reward(content: bytes, reward: float) -> None:
    assert parse_reward_text(content) == {"reward": reward}


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"True", b"nan", b"inf", b"1e999", b"1 2", b"1_000", b"0x1", b"\xff\xfe1", b"one", "\u0661".encode()],
)
def test_anything_else_in_the_text_file_is_no_reward(content: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_reward_text(content)


def test_a_flat_object_of_numbers_is_rewards() -> None:
    assert parse_reward_json(b'{"tests": 1, "style": 0.25}') == {"tests": 1.0, "style": 0.25}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"1",
        b"[1]",
        b'{"reward": NaN}',
        b'{"reward": Infinity}',
        b'{"reward": 1e999}',
        b'{"reward": true}',
        b'{"reward": null}',
        b'{"reward": "1"}',
        b'{"reward": {"a": 1}}',
        b'{"reward": [1]}',
        b'{"reward": ' + b"9" * 400 + b"}",
        b'{"reward": 1',
        pytest.param(b'{"reward": ' + b"[" * 5000, id="brackets without end"),
    ],
)
def test_anything_else_in_the_json_file_is_no_reward(content: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_reward_json(content)


def test_the_named_reward_trains_else_the_mean() -> None:
    assert training_reward({"reward": 0.0, "other": 1.0}) == 0.0
    assert training_reward({"a": 1.0, "b": 0.0}) == 0.5


def leaving(files: dict[str, bytes], **result: Any) -> FakeRuntime:
    """A runtime whose checkers leave `files` and end with `result`."""

    def check(sandbox: Any, command: Any) -> Any:
        sandbox.files.update(files)
        return done(b"last words", **result)

    return FakeRuntime(checker=check)


async def judge(runtime: FakeRuntime, task: Task | None = None, *, planted: dict[str, bytes] | None = None) -> Verdict:
    sandbox = await runtime.start(SandboxSpec())
    sandbox.files.update(planted or {})
    return await RewardChecker().score(sandbox, task or a_task())


TEXT, JSON = "/logs/verifier/reward.txt", "/logs/verifier/reward.json"


async def test_the_exit_code_is_ignored() -> None:
    assert (await judge(leaving({TEXT: b"1\n"}, exit_code=1))).reward == 1.0


async def test_json_goes_before_text() -> None:
    verdict = await judge(leaving({TEXT: b"1", JSON: b'{"a": 0.25, "b": 0.75}'}))
    assert verdict == Verdict(reward=0.5, rewards={"a": 0.25, "b": 0.75})


@pytest.mark.parametrize(
    "files", [{}, {TEXT: b""}, {TEXT: b"True"}, {JSON: b'{"reward": NaN}', TEXT: b"1"}, {TEXT: b"1" * 70000}]
)
async def test_no_usable_reward_is_an_error_with_the_checkers_last_words(files: dict[str, bytes]) -> None:
    with pytest.raises(CheckFailed) as caught:
        await judge(leaving(files))
    assert caught.value.reason == "no_reward"
    assert caught.value.remedy


async def test_a_checker_past_its_limit_is_an_error_even_with_a_reward() -> None:
    with pytest.raises(CheckFailed, match="ran past 600 s") as caught:
        await judge(leaving({TEXT: b"1"}, timed_out=True))
    assert caught.value.reason == "checker"


@pytest.mark.parametrize("path", [TEXT, JSON])
async def test_a_reward_that_the_agent_left_does_not_count(path: str) -> None:
    with pytest.raises(CheckFailed, match="wrote no reward"):
        await judge(leaving({}), planted={path: b"1", "/tests/conftest.py": b"cheat"})


async def test_the_checker_finds_the_tasks_own_tests_only(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "data").write_bytes(b"\x00")
    (tmp_path / "test.sh").write_text("true")
    runtime = leaving({TEXT: b"1"})
    await judge(runtime, a_task(tests=tmp_path), planted={"/tests/test.sh": b"exit 0", "/tests/extra": b""})
    files = runtime.sandboxes[0].files
    assert {path: files[path] for path in files if path.startswith("/tests/")} == {
        "/tests/test.sh": b"true",
        "/tests/deep/data": b"\x00",
    }


async def test_the_checker_runs_as_root_with_its_own_limit_and_environment() -> None:
    runtime = leaving({TEXT: b"1"})
    checker = Checker(tests="/nonexistent", command="bash /tests/t.sh", timeout_s=7.0, env={"A": "b"})
    await judge(runtime, a_task(checker=checker))
    command = runtime.sandboxes[0].commands[-1]
    assert (command.script, command.timeout_s, command.env, command.user) == (
        "bash /tests/t.sh",
        7.0,
        {"A": "b"},
        "root",
    )
    assert runtime.sandboxes[0].calls[0] == "kill_all"


async def test_a_broken_sandbox_is_its_own_error() -> None:
    runtime = FakeRuntime(failing={"put_tree": SandboxGone("fake-0", "out of memory")})
    with pytest.raises(SandboxGone):
        await judge(runtime)


async def test_a_sandbox_that_never_answers_ends_the_check() -> None:
    runtime = FakeRuntime(checker=lambda sandbox, command: asyncio.Event().wait())
    sandbox = await runtime.start(SandboxSpec())
    task = a_task(checker=Checker(tests="/nonexistent", timeout_s=0.01))
    with pytest.raises(CheckFailed, match="did not end within") as caught:
        await RewardChecker(grace_s=0.0).score(sandbox, task)
    assert caught.value.reason == "checker"


OFFLINE = b"curl: (6) Could not resolve host: astral.sh\n/tests/test.sh: line 9: uvx: command not found\n"
SUMMARY = b"=== short test summary info ===\nPASSED t.py::test_a\nFAILED t.py::test_b - no\n== 1 failed in 1s ==\n"


def saying(stdout: bytes, files: dict[str, bytes] | None = None) -> FakeRuntime:
    """A runtime whose checkers print `stdout` and leave `files`."""

    def check(sandbox: Any, command: Any) -> Any:
        sandbox.files.update(files or {})
        return done(stdout)

    return FakeRuntime(checker=check)


@pytest.mark.parametrize("files", [{TEXT: b"0\n"}, {JSON: b'{"a": 0, "b": 0}'}, {}])
async def test_the_zero_of_a_checker_without_its_tools_is_a_failure(files: dict[str, bytes]) -> None:
    with pytest.raises(
        CheckFailed, match=r"could not get what it needs: network: Could not resolve host: astral\.sh"
    ) as caught:
        await judge(saying(OFFLINE, files))
    assert caught.value.reason == "checker"


async def test_a_program_that_only_the_agents_work_calls_excuses_nothing(tmp_path: Path) -> None:
    lacking = saying(b"sh: 1: jq: not found\n", {TEXT: b"0\n"})
    (tmp_path / "test.sh").write_text("python3 /app/solution.py > out; diff out /tests/wanted\n")
    assert (await judge(lacking, a_task(tests=tmp_path))).reward == 0.0
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "run.sh").write_text("jq .sum out\n")
    for checker in (Checker(shared=str(shared)), Checker(script=str(shared / "run.sh")), Checker(command="jq . out")):
        with pytest.raises(CheckFailed, match="a program: jq: not found"):
            await judge(lacking, a_task(checker=checker))


@pytest.mark.parametrize("full", [True, False])
async def test_a_full_disk_excuses_a_zero_where_it_is_full_and_words_about_one_do_not(full: bool) -> None:
    def check(sandbox: Any, command: Any) -> Any:
        if "/dev/zero" in command.script:
            return done(exit_code=int(full))
        sandbox.files[TEXT] = b"0\n"
        return done(b"OSError: [Errno 28] No space left on device\n")

    if full:
        with pytest.raises(CheckFailed, match="disk: No space left"):
            await judge(FakeRuntime(checker=check))
    else:
        assert (await judge(FakeRuntime(checker=check))).reward == 0.0


async def test_a_reward_stands_where_tests_ran_or_points_were_given_all_the_same() -> None:
    assert (await judge(saying(OFFLINE + SUMMARY, {TEXT: b"0\n"}))).reward == 0.0
    assert (await judge(saying(OFFLINE, {TEXT: b"0\n", CTRF: REPORT}))).reward == 0.0
    assert (await judge(saying(OFFLINE, {TEXT: b"0.5\n"}))).reward == 0.5


REPORT = b'{"results": {"tests": [{"name": "test_a", "status": "passed"}, {"name": "test_b", "status": "failed"}]}}'


async def test_single_tests_shape_the_reward_by_report_or_by_log() -> None:
    def shaped(**fields: Any) -> Task:
        return a_task(checker=Checker(tests="/nonexistent", shaping="pass_ratio", **fields))

    by_report = await judge(saying(b"", {TEXT: b"0", CTRF: REPORT}), shaped(weights={"test_a": 3.0, "test_b": 1.0}))
    assert by_report == Verdict(reward=0.75, rewards={"reward": 0.75, "pass_ratio": 0.75, "all_passed": 0.0})
    assert (await judge(saying(SUMMARY, {TEXT: b"0"}), shaped())).reward == 0.5
    with pytest.raises(CheckFailed, match="names none") as caught:
        await judge(saying(b"", {TEXT: b"0"}), shaped())
    assert caught.value.reason == "no_reward"


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        (SUMMARY, 0.0),
        (SUMMARY.replace(b"FAILED", b"SKIPPED"), 1.0),
        (SUMMARY.replace(b"FAILED", b"XPASS"), 0.0),
        (SUMMARY.replace(b"FAILED", b"PASSED") + b"== short test summary info ==\nFAILED script\n", 0.0),
        (SUMMARY.replace(b"FAILED", b"PASSED") + b"== short test summary info ==\nPASSED script\n", 1.0),
        (b"no summary", None),
        (b"== short test summary info ==\nnothing\n", None),
    ],
)
async def test_a_printed_summary_is_a_verdict_and_none_is_a_failure(said: bytes, reward: float | None) -> None:
    task = a_task(checker=Checker(tests="", verdict="test_summary"))
    if reward is None:
        with pytest.raises(CheckFailed, match="print no summary"):
            await judge(saying(said), task)
    else:
        assert (await judge(saying(said), task)).reward == reward


@pytest.mark.parametrize(("word", "reward"), [(b"PASSED", 1.0), (b"FAILED", 0.0), (b"", 0.0)])
async def test_a_word_between_two_marks_is_a_verdict(word: bytes, reward: float) -> None:
    task = a_task(checker=Checker(tests="", verdict="swebench_results"))
    said = b"x\nSWEBench results starts here\n" + word + b"\nSWEBench results ends here\n"
    assert (await judge(saying(said), task)).reward == reward
    with pytest.raises(CheckFailed, match="no results"):
        await judge(saying(b"PASSED"), task)


async def test_a_script_is_copied_beside_the_tests(tmp_path: Path) -> None:
    (tmp_path / "run-tests.sh").write_text("true")
    runtime = saying(SUMMARY)
    await judge(
        runtime, a_task(checker=Checker(tests="", script=str(tmp_path / "run-tests.sh"), verdict="test_summary"))
    )
    assert runtime.sandboxes[0].files["/tests/run-tests.sh"] == b"true"
