"""Repairs made of a package are what they say: its tests notice the bug, and nothing but a repair is worth anything."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from sandboxes import ProcessRuntime
from tests.boxes import process_runtime
from tests.tasks.toy import toy_package
from thundersync.config import EnvConfig
from thundersync.score.test_logs import END, START, read_log
from thundersync.tasks.check import TaskCheck
from thundersync.tasks.kept import KeptFiles
from thundersync.tasks.load import find_all, load_env
from thundersync.tasks.make_command import make_all
from thundersync.tasks.make_repairs import Attempt, Clean, Journal, Made, RepairMaker
from thundersync.tasks.mutations import Mutation
from thundersync.tasks.package import Package, PackageFailed, make_package
from thundersync.tasks.repair import load_repair


@pytest.fixture(scope="module")
async def runtime() -> AsyncIterator[ProcessRuntime]:
    runtime = await process_runtime()
    yield runtime
    await runtime.close()


async def make(packages: list[str], out: Path, **changed: Any) -> list[Made]:
    console = Console(record=True, width=200)
    asked: dict[str, Any] = {"count": 1, "seed": 3, "jobs": 1, "timeout_s": 600.0, "beside": (), "base_image": "b:1"}
    return await make_all(packages, out, runtime="process", docker_host="", console=console, **{**asked, **changed})


async def test_a_package_becomes_repairs_that_a_solution_solves_and_idleness_does_not(
    runtime: ProcessRuntime, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    (made,) = await make([str(toy_package(tmp_path))], out)
    assert [row["instance_id"].partition(".")[0] for row in made.rows] == ["local__purse"]
    (file,) = out.glob("*.jsonl")
    assert [json.loads(line) for line in file.read_text().splitlines()] == made.rows
    tasks = load_env(EnvConfig(path=str(out)), keep=KeptFiles(tmp_path / "kept"))
    assert [task.task_id for task in tasks] == [row["instance_id"] for row in made.rows]
    repair = load_repair(tasks[0].checker.tests)
    assert len(repair.fail_to_pass) + len(repair.pass_to_pass) == 5
    (found, *_) = find_all(str(out), keep=KeptFiles(tmp_path / "kept"))
    report = await TaskCheck(runtime, jobs=1).check(found)
    assert (report.state, report.empty, report.solved) == ("ok", 0.0, 1.0), report.reason
    # Everything that was found is kept: a second search runs nothing but the clean tests, and finds the same.
    journal = next((out / ".attempts").iterdir())
    lines = journal.read_bytes()
    journal.write_bytes(lines + b'{"world": "torn')
    (again,) = await make([str(tmp_path / "Purse")], out)
    assert again.rows == made.rows
    assert journal.read_bytes() == lines


class Scripted(RepairMaker):
    """Tests whose statuses are told in advance: by clean run, then by bug and run."""

    def __init__(self, journal: Journal, runs: dict[str, list[str]], **fields: Any) -> None:
        self.tried: list[Attempt] = []
        super().__init__(
            Nothing(),
            journal=journal,
            jobs=1,
            timeout_s=1.0,
            done=self.tried.append,
            **fields,  # type: ignore[arg-type]
        )
        self._runs = {patch: list(given) for patch, given in runs.items()}

    async def _run(self, world: Any, patch: str, files: Any) -> Any:
        said = self._runs[patch].pop(0)
        if said.startswith("!"):
            return said[1:]
        names = dict(pair.split("=") for pair in said.split())
        words = {"P": "PASSED", "F": "FAILED", "E": "ERROR", "S": "SKIPPED"}
        lines = [f"t.py::{name} {words[word]} [ 9%]" for name, word in names.items()]
        counts = f"{sum(word == 'P' for word in names.values())} passed, 1 failed in 0.1s"
        return read_log("\n".join([START, *lines, counts, END, ""]), "pytest_lines")


def a_package(folder: Path) -> Package:
    (folder / "Dockerfile").write_text("FROM b\n")
    return Package(name="n", owner="o", context=folder, commit="0" * 40, test_cmd="pytest")


class Nothing:
    name = "none"

    async def prepare(self, spec: Any) -> None:
        pass


async def test_a_bug_is_kept_only_if_tests_tell_it_every_time(tmp_path: Path) -> None:
    clean = ["a=P b=P c=P d=S e=P", "a=P b=P c=F d=S e=P"]
    runs = {
        "valid": ["a=F b=P e=P", "a=F b=P e=F"],
        "survived": ["a=P b=P e=P"],
        "broken": ["a=E b=P e=P"],
        "no pass": ["a=F b=F e=F"],
        "flaky": ["a=F b=P e=P", "a=P b=P e=P"],
        "late": ["!they ran past their limit"],
        "unfit": ["!error: corrupt patch"],
        "never tried": [],
    }
    journal = Journal(tmp_path / "journal")
    bugs = [Mutation(kind="func_pm_x", path="t.py", patch=patch) for patch in runs]
    order = ["survived", "broken", "no pass", "flaky", "late", "unfit", "valid", "never tried"]
    bugs.sort(key=lambda bug: order.index(bug.patch))
    maker = Scripted(journal, {"": clean, **runs})
    made = await maker.make(a_package(tmp_path), bugs, count=1)
    assert [(each.state, each.why) for each in maker.tried] == [
        ("survived", ""),
        ("broken", ""),
        ("broken", ""),
        ("flaky", ""),
        ("timeout", "they ran past their limit"),
        ("unfit", "error: corrupt patch"),
        ("valid", ""),
    ]
    (row,) = made.rows
    assert (row["FAIL_TO_PASS"], row["PASS_TO_PASS"]) == (["t.py::a"], ["t.py::b"])
    assert made.clean.passing == ["t.py::a", "t.py::b", "t.py::e"] and made.clean.left_out == 2
    journal.close()


async def test_packages_that_cannot_be_used_say_why(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(PackageFailed, match="git commit"):
        make_package(str(empty), tmp_path / "out", beside=(), base_image="b")
    (empty / "notes.txt").write_text("hi\n")
    with pytest.raises(PackageFailed, match="no Python modules"):
        make_package(str(empty), tmp_path / "out", beside=(), base_image="b")
    with pytest.raises(PackageFailed, match="not-installed-here is not installed") as caught:
        make_package(str(toy_package(tmp_path)), tmp_path / "out", beside=["not-installed-here"], base_image="b")
    assert caught.value.remedy == "pip install not-installed-here"
    with pytest.raises(PackageFailed, match="msgspec is not pure Python"):
        make_package(str(toy_package(tmp_path)), tmp_path / "out", beside=["msgspec"], base_image="b")
    assert not list((tmp_path / "out").glob(".partial-*"))
    journal = Journal(tmp_path / "journal")
    for said, why in (("a=F b=S", "no test of n passes: .*t.py::a FAILED"), ("!no pytest", "cannot be run: no pytest")):
        with pytest.raises(PackageFailed, match=why):
            await Scripted(journal, {"": [said, said]}).make(a_package(tmp_path), [], count=1)
    journal.close()


async def test_an_image_without_git_is_told_before_any_bug_is_tried(runtime: ProcessRuntime, tmp_path: Path) -> None:
    world = make_package(str(toy_package(tmp_path)), tmp_path / "out", beside=(), base_image="b")
    file = world.context / "Dockerfile"
    without = "RUN mkdir /opt/no && printf 'exit 127' > /opt/no/git && chmod 755 /opt/no/git\nENV PATH=/opt/no:$PATH\n"
    file.write_text(file.read_text() + without)
    journal = Journal(tmp_path / "journal")
    with pytest.raises(PackageFailed, match="cannot be run") as caught:
        await RepairMaker(runtime, journal=journal, jobs=1, timeout_s=60.0).make(world, [], count=1)
    assert "--base-image" in caught.value.remedy and not journal.known
    journal.close()


async def test_what_was_tried_in_another_world_is_tried_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    bug = Mutation(kind="func_pm_x", path="t.py", patch="bug")
    runs = {"": ["a=P b=P", "a=P b=P"], "bug": ["!error: no git"]}
    assert (await Scripted(journal, runs).make(a_package(tmp_path), [bug], count=1)).rows == []
    world = a_package(tmp_path)
    (tmp_path / "Dockerfile").write_text("FROM better\n")
    runs["bug"] = ["a=F b=P", "a=F b=P"]
    assert len((await Scripted(journal, runs).make(world, [bug], count=1)).rows) == 1
    journal.close()


async def test_no_repairs_at_all_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = Clean(passing=["t.py::a"], left_out=0, seconds=1.0)

    async def make_none(maker: RepairMaker, world: Package, candidates: Any, *, count: int) -> Made:
        return Made(world=world, clean=clean, candidates=len(candidates), rows=[], states={"survived": len(candidates)})

    monkeypatch.setattr(RepairMaker, "make", make_none)
    with pytest.raises(PackageFailed, match=r"none of the bugs .* was kept"):
        await make([str(toy_package(tmp_path))], tmp_path / "out")


def test_a_packages_world_is_the_same_wherever_it_is_made(tmp_path: Path) -> None:
    first = make_package(str(toy_package(tmp_path)), tmp_path / "one", beside=(), base_image="b:2")
    again = make_package(str(tmp_path / "Purse"), tmp_path / "two", beside=(), base_image="b:2")
    assert first.stem == again.stem and first.commit == again.commit
    assert first.sources() == ["src/purse.py"], "though .gitignore names its folder"
    assert (first.context / "Dockerfile").read_text().startswith("FROM b:2\nCOPY pylib /opt/pylib\n")
    assert "/testbed/src" in first.test_cmd
    assert (first.context / "pylib" / "pytest").is_dir()


def test_a_torn_journal_goes_on_after_its_last_whole_line(tmp_path: Path) -> None:
    one = Attempt(world="w", instance_id="a", kind="k", state="survived")
    (tmp_path / "journal").write_bytes(msgspec.json.encode(one) + b'\n{"world": "w", "inst')
    journal = Journal(tmp_path / "journal")
    journal.add(msgspec.structs.replace(one, instance_id="b"))
    journal.close()
    assert set(Journal(tmp_path / "journal").known) == {("w", "a"), ("w", "b")}
