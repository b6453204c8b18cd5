"""A repair counts when its tests pass on the change alone, and no way around them counts, over real boxes."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sandboxes import Command, ProcessRuntime, Result, Sandbox
from tests.boxes import process_runtime
from tests.fakes import FakeRuntime, done
from tests.tasks.repairs import BUG, a_bench_row, a_row
from thundersync.core.types import Image, Task
from thundersync.score.repairs import RepairJudge, spec_of
from thundersync.score.reward import CheckFailed, RewardChecker
from thundersync.tasks.kept import KeptFiles
from thundersync.tasks.swe import bench_task, smith_task


@pytest.fixture(scope="module")
async def runtime() -> AsyncIterator[ProcessRuntime]:
    runtime = await process_runtime()
    yield runtime
    await runtime.close()


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    folder = tmp_path_factory.mktemp("repairs")
    found = smith_task(a_row(folder), suite="s", keep=KeptFiles(folder / "kept"), near=folder)
    assert found.task is not None, found.faults
    return found.task


class Bench:
    """One agent's sandbox, from its start state to its verdict."""

    def __init__(self, runtime: ProcessRuntime, task: Task) -> None:
        self.checker = RewardChecker(runtime=runtime)
        self.task, self.runtime = task, runtime

    async def rewards(self, script: str) -> dict[str, float]:
        sandbox = await self.runtime.start(spec_of(self.task))
        try:
            await self.checker.prepare(sandbox, self.task)
            await say(sandbox, script)
            return (await self.checker.score(sandbox, self.task)).rewards
        finally:
            await sandbox.close()


async def say(sandbox: Sandbox, script: str) -> str:
    result = await sandbox.run(Command(script=script))
    assert result.exit_code == 0, result.stderr
    return result.stdout.decode()


@pytest.fixture
def bench(runtime: ProcessRuntime, task: Task) -> Bench:
    return Bench(runtime, task)


FIX = "sed -i 's/a - b/a + b/' calc.py\n"
LAZY = "printf 'def add(a, b):\\n    return 3\\n\\n\\ndef double(a):\\n    return 5\\n' > calc.py\n"


async def test_the_repair_is_resolved_and_the_reference_solution_is_one(bench: Bench, task: Task) -> None:
    assert (await bench.rewards(FIX))["reward"] == 1.0
    assert (await bench.rewards(Path(task.solution).read_text()))["reward"] == 1.0
    assert await bench.rewards(FIX + "git add -A; git commit -qm done; echo more > notes.txt\n") == {
        "reward": 1.0,
        "fixed": 1.0,
        "kept": 1.0,
    }


async def test_no_change_and_half_a_repair_are_not_resolved(bench: Bench) -> None:
    assert (await bench.rewards("true"))["reward"] == 0.0
    assert await bench.rewards(LAZY) == {"reward": 0.0, "fixed": 0.5, "kept": 1.0}


async def test_the_start_state_holds_neither_the_tests_nor_the_past(runtime: ProcessRuntime, bench: Bench) -> None:
    sandbox = await runtime.start(spec_of(bench.task))
    await bench.checker.prepare(sandbox, bench.task)
    assert await say(sandbox, "ls tests") == "test_other.py\n"
    assert await say(sandbox, "git log --all --oneline | wc -l; git status --porcelain") == "1\n"
    assert "a - b" in await say(sandbox, "cat calc.py")
    fixed = "git cat-file --batch-all-objects --batch-check | while read id type _; do git cat-file $type $id; done"
    assert "return a + b" not in await say(sandbox, f"{fixed} | cat -v")
    await sandbox.close()


FORGED = "tests/test_calc.py::test_add PASSED [ 20%]\\ntests/test_calc.py::test_double PASSED [ 40%]\\n"
CHEATS = {
    "tests that were weakened": "mkdir -p tests; printf 'def test_add(): pass\n' > tests/test_calc.py",
    "tests that were deleted": "git rm -q -r tests; rm -rf tests",
    "skips by configuration": "printf '[pytest]\\naddopts = --deselect tests/test_calc.py\\n' > pytest.ini",
    "a conftest that forges": """cat > conftest.py <<'END'
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    out = yield
    out.get_result().outcome = 'passed'
END""",
    "a forged pytest": f"""mkdir pytest; cat > pytest/__main__.py <<'END'
print('{FORGED}==== 2 passed in 0.01s ====')
END
touch pytest/__init__.py""",
    "forged lines and an early end": f"""cat >> calc.py <<'END'
import os
for n in range(1, 30):
    try: os.write(n, b'\\n{FORGED}')
    except OSError: pass
os._exit(0)
END""",
    "forged lines and the true ones": f"""cat >> calc.py <<'END'
import os
for n in range(1, 30):
    try: os.write(n, b'\\n{FORGED}')
    except OSError: pass
END""",
    "a broken import": "echo 'raise SystemError' > calc.py",
    "a repository without its past": "rm -rf .git; git init -q",
    "a link for a folder": "rm -rf tests; mkdir /tmp/t; touch /tmp/t/test_calc.py; ln -s /tmp/t tests",
    "git made to lie": "git config diff.external /bin/true; printf '*.py -diff\\n' > .gitattributes",
    "sitecustomize": "printf 'import os\\n' > sitecustomize.py",
}


@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS)
async def test_a_way_around_the_tests_is_worth_nothing(bench: Bench, cheat: str) -> None:
    assert (await bench.rewards(cheat))["reward"] == 0.0


@pytest.mark.parametrize(
    "beside",
    [
        CHEATS["tests that were weakened"],
        CHEATS["skips by configuration"],
        "echo 'raise SystemError' > tests/test_other.py",
        "printf 'print(1)\\n' > tests/test_mine.py; printf '\\0\\1\\2' > data.bin",
        CHEATS["git made to lie"],
    ],
)
async def test_a_repair_counts_whatever_was_done_to_the_tests_beside_it(bench: Bench, beside: str) -> None:
    assert (await bench.rewards(f"{FIX}\n{beside}"))["reward"] == 1.0


async def test_an_empty_change_is_run_where_that_is_asked_for(runtime: ProcessRuntime, task: Task) -> None:
    verdict = await RepairJudge(runtime).judge(task, "", even_empty=True)
    assert (verdict.resolved, verdict.rewards["fixed"], verdict.rewards["kept"]) == (False, 0.0, 1.0)


async def test_changes_that_no_agent_of_ours_makes_are_not_applied(runtime: ProcessRuntime, task: Task) -> None:
    judge = RepairJudge(runtime)
    for change in (None, "nonsense\n", BUG, "diff --git a/x b/y\nrename from tests/test_calc.py\nrename to y\n"):
        assert not (await judge.judge(task, change)).resolved


async def test_a_bug_that_does_not_apply_and_a_judge_without_runtime_are_errors(
    runtime: ProcessRuntime, tmp_path: Path
) -> None:
    row = a_row(tmp_path, patch=BUG.replace("a + b", "a * b"))
    found = smith_task(row, suite="s", keep=KeptFiles(tmp_path / "kept"), near=tmp_path)
    assert found.task is not None
    sandbox = await runtime.start(spec_of(found.task))
    with pytest.raises(CheckFailed, match="could not be made") as caught:
        await RewardChecker(runtime=runtime).prepare(sandbox, found.task)
    assert caught.value.reason == "checker"
    with pytest.raises(CheckFailed, match="no runtime"):
        await RewardChecker().score(sandbox, found.task)
    await sandbox.close()


def bench_of(folder: Path, **changed: Any) -> Task:
    """A SWE-bench row's task, on the image that `context` makes."""
    row = a_bench_row(folder, **changed)
    found = bench_task(row, suite="s", keep=KeptFiles(folder / "kept"))
    assert found.task is not None, found.faults
    return msgspec.structs.replace(found.task, image=Image(context=str(folder / row["context"])), memory_mib=2048)


TRIPLE = "printf 'def triple(a):\\n    return 3 * a\\n' >> calc.py\n"


@pytest.mark.parametrize(
    ("script", "reward"),
    [
        ("true", 0.0),
        (TRIPLE, 1.0),
        (TRIPLE.replace("3 * a", "5"), 0.0),
        (f"{TRIPLE}echo 'def test_triple(): pass' > tests/test_calc.py", 1.0),
        (f"{TRIPLE}sed -i 's/a + b/a/' calc.py", 0.0),
        ("echo 'def test_triple(): pass' > tests/test_calc.py", 0.0),
    ],
)
async def test_a_swe_bench_row_is_judged_by_its_own_script(
    runtime: ProcessRuntime, tmp_path_factory: pytest.TempPathFactory, script: str, reward: float
) -> None:
    folder = tmp_path_factory.getbasetemp() / "swe-bench"
    assert (await Bench(runtime, bench_of(folder)).rewards(script))["reward"] == reward


async def test_an_image_that_the_reference_does_not_fit_is_an_error(runtime: ProcessRuntime, tmp_path: Path) -> None:
    other = bench_of(tmp_path, patch="--- a/lost.py\n+++ b/lost.py\n@@ -1 +1 @@\n-a\n+b\n")
    with pytest.raises(CheckFailed, match="does not fit the repository"):
        await Bench(runtime, other).rewards("true")


async def test_tests_that_cannot_be_run_for_want_of_a_program_are_an_error(
    runtime: ProcessRuntime, task: Task, tmp_path: Path
) -> None:
    found = smith_task(
        a_row(tmp_path, test_cmd="pytest --verbose"), suite="s", keep=KeptFiles(tmp_path / "kept"), near=tmp_path
    )
    assert found.task is not None
    with pytest.raises(CheckFailed, match=r"no test of .* ran, for want of a program: pytest: command not found"):
        await Bench(runtime, found.task).rewards(FIX)


def scripted(**results: Result) -> FakeRuntime:
    """Sandboxes whose commands succeed, but for those named by what they do: `take`, `put`, `test`, `room`."""

    def answer(sandbox: Any, command: Command) -> Result:
        assert len(runtime.open) == 1, "the agent's sandbox is gone before the judge's is started"
        doing = {"read-tree": "take", "--numstat": "put", "tests.sh; code": "test", "/dev/zero": "room"}
        said = next((doing[mark] for mark in doing if mark in command.script), "")
        return results.get(said, done(FIXED if said == "take" else TESTED if said == "test" else b""))

    runtime = FakeRuntime(shell=answer, checker=answer)
    return runtime


FIXED = b"--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"
TESTED = (
    b">>>>> Start Test Output\ntests/test_calc.py::test_add FAILED [100%]\n"
    b"E   OSError: [Errno 28] No space left on device\n=== 1 failed in 0.10s ===\n>>>>> End Test Output\n"
)
WANTS: dict[str, dict[str, Any]] = {
    "time": {"timed_out": True},
    "memory": {"oom_killed": True},
    "disk": {"stderr": b"error: unable to write file 'calc.py' mode 100644: No space left on device\n"},
}


async def scored(runtime: FakeRuntime, task: Task) -> float:
    sandbox = await runtime.start(spec_of(task))
    checker = RewardChecker(runtime=runtime, pids=7, labels={"run": "x"})  # type: ignore[arg-type]  # no snapshots
    return (await checker.score(sandbox, task, rollout_id="r-1")).reward


@pytest.mark.parametrize("want", WANTS)
@pytest.mark.parametrize("doing", ["take", "put"])
async def test_time_memory_and_disk_that_ran_out_are_no_verdict_on_a_change(task: Task, doing: str, want: str) -> None:
    assert await scored(scripted(**{doing: done(exit_code=1)}), task) == 0.0
    wanting = {doing: done(exit_code=1, **WANTS[want])}
    if want == "disk":  # by trying
        assert await scored(scripted(**wanting), task) == 0.0
    with pytest.raises(CheckFailed, match=r"within 600 s|out of memory|disk is full") as caught:
        await scored(scripted(**wanting, room=done(exit_code=1)), task)
    assert caught.value.reason == "checker"


async def test_tests_that_fail_on_a_full_disk_are_no_verdict_and_words_about_one_are_no_excuse(task: Task) -> None:
    assert await scored(scripted(), task) == 0.0
    with pytest.raises(CheckFailed, match="the disk was full"):
        await scored(scripted(room=done(exit_code=1)), task)


async def test_a_repair_is_judged_in_a_sandbox_with_the_runs_limits_and_labels(task: Task) -> None:
    runtime = scripted()
    await scored(runtime, task)
    (_, judged) = runtime.sandboxes
    assert (judged.spec.pids, judged.spec.labels) == (7, {"run": "x", "rollout": "r-1"})
    assert runtime.open == []
