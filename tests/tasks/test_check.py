"""`tasks check` over real boxes: each kind of broken task is told from a good one, and a report is continued."""

import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from sandboxes import ProcessRuntime, RuntimeUnavailable
from sandboxes.errors import BuildFailed, DaemonGone, DiskFull, FileRefused, ImageMissing, SandboxGone
from tests.boxes import process_runtime
from tests.fakes import FakeRuntime
from tests.tasks.folders import TOML, make_folder
from tests.tasks.repairs import CALC, a_row
from thundersync.config import EnvConfig
from thundersync.core.types import Image
from thundersync.errors import TaskError
from thundersync.tasks.check import TaskCheck, TaskReport
from thundersync.tasks.command import check_all
from thundersync.tasks.found import Found
from thundersync.tasks.harbor import find_harbor
from thundersync.tasks.kept import KeptFiles
from thundersync.tasks.load import find_all, load_env
from thundersync.tasks.report import ReportFile, read_report
from thundersync.tasks.standin import StandIn
from thundersync.tasks.swe import smith_task

WRITE = "mkdir -p /logs/verifier; echo {} > /logs/verifier/reward.txt\n"


@pytest.fixture(scope="module")
async def runtime() -> AsyncIterator[ProcessRuntime]:
    runtime = await process_runtime()
    yield runtime
    await runtime.close()


async def check(runtime: ProcessRuntime | FakeRuntime, found: Found) -> TaskReport:
    return await TaskCheck(runtime, jobs=1).check(found)


def the(folder: Path) -> Found:
    (found,) = find_harbor(str(folder))
    return found


async def test_a_good_task_is_ok(runtime: ProcessRuntime, tmp_path: Path) -> None:
    report = await check(runtime, the(make_folder(tmp_path)))
    assert (report.state, report.empty, report.solved, report.runtime) == ("ok", 0.0, 1.0, "process")


async def test_a_solution_finds_its_own_env(runtime: ProcessRuntime, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, toml=TOML + '[solution.env]\nNAME = "hello.txt"\n')
    (folder / "solution" / "solve.sh").write_text('touch "$NAME"\n')
    assert (await check(runtime, the(folder))).state == "ok"


@pytest.mark.parametrize(
    ("name", "text", "state", "reason"),
    [
        ("tests/test.sh", WRITE.format(1), "empty_scores", "does nothing scores 1"),
        ("tests/test.sh", WRITE.format(0), "unsolved", "scores 0 (the script ended with 0"),
        ("tests/test.sh", "true\n", "broken", "wrote no reward"),
        ("tests/test.sh", WRITE.format("''"), "broken", "is empty"),
        (
            "tests/test.sh",
            f"echo 'curl: (6) Could not resolve host: astral.sh'; {WRITE.format(0)}",
            "needs_network",
            "astral.sh",
        ),
        ("solution/solve.sh", "echo 'Could not resolve host: github.com'; exit 1\n", "needs_network", "github.com"),
        (
            "solution/solve.sh",
            "echo nothing done; exit 3\n",
            "unsolved",
            "ended with 3, its last words: 'nothing done'",
        ),
        ("environment/Dockerfile", "FROM x\nRUN exit 7\n", "build_failed", "ended with 7"),
        ("environment/Dockerfile", "FROM x\nRUN curl https://a.invalid\n", "needs_network", "Could not resolve host"),
        ("task.toml", "[environment]\ngpus = 1\n", "refused", "gpus = 1"),
    ],
)
async def test_what_is_wrong_with_a_task_is_told(
    runtime: ProcessRuntime, tmp_path: Path, name: str, text: str, state: str, reason: str
) -> None:
    folder = make_folder(tmp_path)
    (folder / name).write_text(text)
    report = await check(runtime, the(folder))
    assert (report.state, reason in report.reason) == (state, True), report


async def test_without_a_solution_only_the_empty_attempt_is_made(runtime: ProcessRuntime, tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / "solution" / "solve.sh").unlink()
    report = await check(runtime, the(folder))
    assert (report.state, report.empty, report.solved) == ("no_solution", 0.0, None)


async def test_a_repair_is_judged_with_no_change_and_with_its_reference(
    runtime: ProcessRuntime, tmp_path: Path
) -> None:
    found = smith_task(a_row(tmp_path), suite="s", keep=KeptFiles(tmp_path / "kept"), near=tmp_path)
    report = await check(runtime, found)
    assert (report.state, report.empty, report.solved) == ("ok", 0.0, 1.0), report.reason
    harmless = (
        "--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,3 @@\n def add(a, b):\n     return a + b\n+# nothing\n # twice\n"
    )
    assert "# twice" in CALC
    row = a_row(tmp_path, patch=harmless.replace("1,2 +1,3", "1,3 +1,4"))
    found = smith_task(row, suite="s", keep=KeptFiles(tmp_path / "kept"), near=tmp_path)
    assert (await check(runtime, found)).state == "empty_scores"


@pytest.mark.parametrize(
    ("failing", "state"),
    [
        ({"prepare": ImageMissing("image x is not here")}, "needs_network"),
        ({"prepare": BuildFailed("pull access denied for ubuntu, repository does not exist")}, "needs_network"),
        ({"prepare": BuildFailed("it broke")}, "build_failed"),
        ({"start": SandboxGone("a", "no reason")}, "broken"),
        ({"put_tree": OSError("torn")}, "broken"),
    ],
)
async def test_a_sandbox_that_fails_is_an_answer_too(tmp_path: Path, failing: dict[str, Exception], state: str) -> None:
    report = await check(FakeRuntime(failing=failing), the(make_folder(tmp_path)))
    assert report.state == state


@pytest.mark.parametrize(
    "failing",
    [
        {"start": DaemonGone("the Docker daemon went away")},
        {"prepare": DiskFull("the Docker daemon's disk is full")},
        {"put_tree": DiskFull("the sandbox's disk is full")},
        {"put_tree": OSError(errno.ENOSPC, "No space left on device")},
        {"put_tree": SandboxGone("a", "no answer"), "check": RuntimeUnavailable("no daemon answers")},
    ],
)
async def test_a_machine_that_fails_ends_the_check_and_what_was_checked_stays(
    tmp_path: Path, failing: dict[str, Exception]
) -> None:
    *_, error = failing.values()
    runtime = FakeRuntime(verdict=b"1\n")
    first, second, third = (the(make_folder(tmp_path / "set", name)) for name in ("a", "b", "c"))
    reports: list[TaskReport] = []

    def done(report: TaskReport) -> None:
        reports.append(report)
        runtime.failing.update(failing)

    with pytest.raises(ExceptionGroup) as caught:
        await TaskCheck(runtime, jobs=1).run([first, second, third], done=done)
    assert caught.value.exceptions == (error,)
    assert [report.key for report in reports] == ["set/a"]
    assert runtime.open == []


async def test_a_small_box_that_is_full_is_the_tasks_affair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRuntime, "name", "process")
    report = await check(FakeRuntime(failing={"put_tree": DiskFull("full")}), the(make_folder(tmp_path)))
    assert report.state == "broken"


async def test_a_tasks_own_disk_that_is_full_is_its_affair(tmp_path: Path) -> None:
    found = the(make_folder(tmp_path))
    assert found.task is not None
    bound = msgspec.structs.replace(found, task=msgspec.structs.replace(found.task, disk_mib=64))
    assert (await check(FakeRuntime(failing={"put_tree": DiskFull("full")}), bound)).state == "broken"


async def test_a_check_reports_continues_and_checks_again(runtime: ProcessRuntime, tmp_path: Path) -> None:
    root, json = tmp_path / "set", tmp_path / "deep" / "report.jsonl"
    make_folder(root, "good")
    bad = make_folder(root, "bad")
    (bad / "solution" / "solve.sh").write_text("true\n")
    console = Console(record=True, width=80)

    async def run(*, again: bool = False) -> list[str]:
        found: list[str] = []
        await check_all(
            str(root),
            runtime="process",
            docker_host="",
            jobs=2,
            json=json,
            again=again,
            network="off",
            stand_in="",
            variables={},
            console=console,
            bad=found,
        )
        return found

    assert await run() == ["set/bad"]
    lines = json.read_text().splitlines()
    assert len(lines) == 2
    json.write_text("\n".join(lines) + '\n{"key":"torn')
    assert await run() == ["set/bad"]
    assert json.read_text().splitlines() == lines
    make_folder(root, "bad")
    assert await run(again=True) == []
    assert {msgspec.json.decode(line)["state"] for line in json.read_text().splitlines()} == {"ok"}
    said = console.export_text()
    assert "2 of 2 tasks to check" in said and "0 of 2" in said and "1 of 2" in said
    assert "1 unsolved: its reference solution does not score full" in said


async def test_names_that_are_no_text_are_told_and_end_no_check(tmp_path: Path) -> None:
    report = ReportFile(tmp_path / "report.jsonl")
    folder = make_folder(tmp_path / "set", os.fsdecode(b"caf\xe9"))
    (found,) = find_all(str(tmp_path / "set"))
    assert (found.key, found.faults) == ("set/caf\\udce9", ["has a name that is not UTF-8"])
    report.add(await check(FakeRuntime(), found))
    lost = FileRefused(f"neither file, folder nor link: {folder}")
    report.add(await check(FakeRuntime(failing={"put_tree": lost}), the(make_folder(tmp_path / "other"))))
    report.close()
    assert [(each.key, each.state) for each in read_report(tmp_path / "report.jsonl")] == [
        ("set/caf\\udce9", "refused"),
        ("other/say-hello", "broken"),
    ]
    with pytest.raises(TaskError, match="has a name that is not UTF-8"):
        load_env(EnvConfig(path=str(tmp_path / "set")))


def test_a_file_that_is_no_report_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    for text in ("mine\n", "mine", '{"model": "mine"}'):
        other.write_text(text)
        with pytest.raises(TaskError, match="line 1 is no line of a report"):
            ReportFile(other)
        assert other.read_text() == text
    other.write_text('{"k')
    assert ReportFile(other).known == {}


def test_a_stand_in_replaces_base_images_and_not_stages(tmp_path: Path) -> None:
    stand_in = StandIn("here:1", tmp_path / "out")
    dockerfile = (
        "FROM --platform=linux/amd64 a:1 AS one\nRUN true\nfrom b\nFROM one\nFROM scratch\nCOPY --from=one x y\n"
    )
    assert stand_in.rewritten(dockerfile) == (
        "FROM here:1 AS one\nRUN true\nFROM here:1\nFROM one\nFROM scratch\nCOPY --from=one x y\n"
    )
    found = the(make_folder(tmp_path / "set", toml=TOML + 'docker_image = "far/away"\n'))
    assert found.task is not None
    placed = stand_in.place(found.task)
    assert placed.image.name == ""
    assert (Path(placed.image.context) / "Dockerfile").read_text().startswith("FROM here:1\n")
    bare = msgspec.structs.replace(found.task, image=Image(name="far/away"))
    assert stand_in.place(bare).image == Image(name="here:1")
