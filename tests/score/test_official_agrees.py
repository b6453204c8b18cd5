"""One instance of SWE-bench Verified and one of SWE-smith, rebuilt here, are judged by us as by the official packages.

The repositories come from their source distributions; the published images cannot be had everywhere. Each change is
judged by this project, and the log of the same tests on the same change by the official package.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sandboxes import Command, ProcessRuntime
from tests.boxes import process_runtime
from thundersync.core.types import Image, Task
from thundersync.score.repairs import RepairJudge, prepare_repair, spec_of
from thundersync.tasks.kept import KeptFiles
from thundersync.tasks.package import PackageFailed, make_package
from thundersync.tasks.repair import load_repair
from thundersync.tasks.swe import END, START, bench_task, smith_task

pytestmark = pytest.mark.slow
SHARED = Path(os.environ.get("THUNDERSYNC_TASKS", Path(__file__).parents[3] / "shared" / "tasks"))
FLASK = "Flask==2.3.0"
BESIDE_FLASK = (
    *("Werkzeug==2.3.0", "Jinja2==3.1.2", "itsdangerous==2.1.2", "click==8.1.3", "blinker==1.6.2"),
    *("MarkupSafe==2.1.2", "pytest==7.3.0", "pluggy==1.0.0", "iniconfig==2.0.0", "packaging==23.1"),
)
NOTE = "--- /dev/null\n+++ b/NOTE.txt\n@@ -0,0 +1 @@\n+a note\n"
BREAKS_FLASK = """--- a/src/flask/blueprints.py
+++ b/src/flask/blueprints.py
@@ -1 +1,2 @@
+def broken(:
 from __future__ import annotations
"""


@pytest.fixture(scope="module")
async def runtime() -> AsyncIterator[ProcessRuntime]:
    runtime = await process_runtime()
    yield runtime
    await runtime.close()


def official(name: str, install: str) -> Any:
    """A module of the official package; its test is skipped loudly where it cannot be imported."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # versions that do not fit each other fail in many ways
        pytest.skip(f"NOT COMPARED WITH THE OFFICIAL PACKAGE ({install}): {type(error).__name__}: {error}")


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        pytest.skip(f"NOT COMPARED, THE PACKAGE INDEX CANNOT BE REACHED: {done.stderr[-300:]}")


def row_of(file: str, *, instance_id: str = "", repo: str = "") -> dict[str, Any]:
    """The first row that is named so, or comes from such a repository."""
    if not SHARED.is_dir():
        pytest.skip("the published tasks are not here (THUNDERSYNC_TASKS)")
    text = (SHARED / file).read_text()
    rows = json.loads(text) if file.endswith(".json") else map(json.loads, text.splitlines())
    return next(row for row in rows if row["instance_id"] == instance_id or (repo and repo in row["repo"]))


def apply(folder: Path, patch: str, *flags: str) -> None:
    command = ["git", "apply", "--whitespace=nowarn", *flags, "-"]
    subprocess.run(command, input=patch.encode(), cwd=folder, check=True)


def flask_image(folder: Path, row: dict[str, Any]) -> Image:
    """The row's image, as far as its script looks at it: the repository before the repair, and an environment."""
    pip("download", "--no-binary=flask", "--dest", str(folder / "sdist"), FLASK)
    with tarfile.open(next((folder / "sdist").iterdir())) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    testbed = folder / "context" / "testbed"
    shutil.move(next((folder / "unpacked").iterdir()), testbed)
    apply(testbed, row["patch"], "-R")
    apply(testbed, row["test_patch"], "-R")
    who = ["-c", "user.name=s", "-c", "user.email=s@s"]
    for arguments in (["init", "-q"], ["add", "-f", "."], [*who, "commit", "-qm", "base"]):
        subprocess.run(["git", *arguments], cwd=testbed, check=True)
    pip("install", "--target", str(folder / "context" / "site"), *BESIDE_FLASK)
    programs = folder / "context" / "bin"
    programs.mkdir()
    for name, text in {
        "python": 'case "$*" in "-m pip"*) exit 0 ;; esac\nexec python3 "$@"',
        "pytest": 'exec python3 -m pytest "$@"',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    (folder / "context" / "activate").write_text("conda() { :; }\n")
    (folder / "context" / "Dockerfile").write_text(
        "FROM debian\nCOPY site /opt/site\nCOPY bin /opt/bin\nCOPY activate /opt/miniconda3/bin/activate\n"
        "COPY testbed /testbed\nENV PYTHONPATH=/testbed/src:/opt/site PATH=/opt/bin:$PATH\n"
    )
    return Image(context=str(folder / "context"))


async def log_of(runtime: ProcessRuntime, task: Task, change: str) -> str:
    """What the row's tests print on `change`, as the official harness would have it."""
    repair = load_repair(task.checker.tests)
    sandbox = await runtime.start(spec_of(task))
    try:
        await prepare_repair(sandbox, repair, for_agent=False)
        await sandbox.write("/tmp/change", change.encode())
        await sandbox.write("/tmp/eval.sh", repair.script.encode())
        done = await sandbox.run(
            Command(
                script="git -c safe.directory='*' apply --whitespace=nowarn /tmp/change; exec 2>&1; bash /tmp/eval.sh",
                timeout_s=300,
                cwd=repair.repo_dir,
                user="root",
                output_limit_bytes=1 << 24,
            )
        )
        return done.stdout.decode(errors="replace")
    finally:
        await sandbox.close()


async def test_a_swe_bench_instance_is_judged_as_by_the_official_package(
    runtime: ProcessRuntime, tmp_path: Path
) -> None:
    grading = official("swebench.harness.grading", "pip install 'swebench>=5'")
    utils = official("swebench.harness.utils", "pip install 'swebench>=5'")
    if not hasattr(utils, "make_test_spec"):
        pytest.skip("NOT COMPARED WITH THE OFFICIAL PACKAGE (pip install 'swebench>=5'): this one is older")
    row = row_of("swebench/verified_v5.jsonl", instance_id="pallets__flask-5014")
    found = bench_task(row, suite="s", keep=KeptFiles(tmp_path / "kept"))
    assert found.task is not None, found.faults
    task = msgspec.structs.replace(found.task, image=flask_image(tmp_path, row))
    judged: dict[str, tuple[bool, bool]] = {}
    for name, change in {
        "gold": row["patch"],
        "note": NOTE,
        "both": row["patch"] + NOTE,
        "broken": BREAKS_FLASK,
    }.items():
        ours = await RepairJudge(runtime).judge(task, change)
        log = tmp_path / f"{name}.log"
        log.write_text(await log_of(runtime, task, change))
        prediction = {"instance_id": row["instance_id"], "model_patch": change, "model_name_or_path": "m"}
        report = grading.get_eval_report(utils.make_test_spec(row), prediction, str(log), True)[row["instance_id"]]
        if name in ("gold", "note"):
            assert report["patch_successfully_applied"], name
            status = report["tests_status"]
            assert ours.rewards["fixed"] == float(bool(status["FAIL_TO_PASS"]["success"]))
            assert ours.rewards["kept"] == len(status["PASS_TO_PASS"]["success"]) / 59
        judged[name] = (ours.resolved, report["resolved"])
    assert judged == {"gold": (True, True), "note": (False, False), "both": (True, True), "broken": (False, False)}


async def test_a_swe_smith_instance_is_judged_as_by_the_official_package(
    runtime: ProcessRuntime, tmp_path: Path
) -> None:
    grading = official("swesmith.harness.grading", "pip install swesmith 'swebench<5'")
    rows = "swesmith/generated.json"
    row = row_of(rows, repo="addict")
    first = row["instance_id"]
    sources = json.loads((SHARED / "swesmith" / "sources.json").read_text())["addict"]
    # What it knows of a repository that is not one of its own: how every Python log is read.
    profiles = official("swesmith.profiles.python", "pip install swesmith 'swebench<5'")
    profiles.registry.data[row["repo"]] = profiles.PythonProfile
    try:
        package = make_package(sources["sdist"], tmp_path, beside=(), base_image="debian")
    except PackageFailed as error:
        pytest.skip(f"NOT COMPARED, THE PACKAGE INDEX CANNOT BE REACHED: {error.message}")
    assert package.commit == sources["base_commit"], "the very repository that the row was made from"
    here = {**row, "context": package.context.name, "test_cmd": package.test_cmd}
    found = smith_task(here, suite="s", keep=KeptFiles(tmp_path / "kept"), near=tmp_path)
    assert found.task is not None, found.faults
    gold = reversed_patch(tmp_path, package.repository, row["patch"])
    judged: dict[str, tuple[bool, bool]] = {}
    for name, change in {"gold": gold, "note": NOTE, "both": gold + NOTE}.items():
        ours = await RepairJudge(runtime).judge(found.task, change)
        log = tmp_path / f"{name}.log"
        text = await log_of(runtime, found.task, change)
        for mark in (START, END):  # its own harness lets `set -x` print them
            text = text.replace(mark, f"+ : '{mark}'")
        log.write_text(text)
        prediction = {"instance_id": first, "model_patch": change, "model_name_or_path": "m"}
        report = grading.get_eval_report(prediction, row, str(log))
        judged[name] = (ours.resolved, report["resolved"])
    assert judged == {"gold": (True, True), "note": (False, False), "both": (True, True)}


def reversed_patch(folder: Path, repository: Path, bug: str) -> str:
    """What undoes `bug`, as a patch of its own."""
    copy = folder / "copy"
    shutil.copytree(repository, copy)
    apply(copy, bug)
    who = ["-c", "user.name=s", "-c", "user.email=s@s"]
    subprocess.run(["git", *who, "commit", "-qam", "bug"], cwd=copy, check=True)
    apply(copy, bug, "-R")
    return subprocess.run(["git", "diff"], cwd=copy, check=True, capture_output=True, text=True).stdout
