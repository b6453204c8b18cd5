"""SWE-smith and SWE-bench rows in every shape they are published in."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.repairs import BUG, a_row
from thundersync.tasks.kept import KeptFiles
from thundersync.tasks.repair import Repair, files_of_patch, files_of_tests, is_surface, load_repair
from thundersync.tasks.swe import bench_task, iter_swe, kind_of, smith_task

BENCH: dict[str, Any] = {
    "instance_id": "pallets__flask-5014",
    "repo": "pallets/flask",
    "base_commit": "7ee9ceb71e868944a46e1ff00b506772a53a4f1d",
    "patch": "--- a/src/flask/b.py\n+++ b/src/flask/b.py\n@@ -1 +1 @@\n-a\n+b",
    "test_patch": "--- a/tests/test_b.py\n+++ b/tests/test_b.py\n@@ -1 +1 @@\n-a\n+b\n",
    "problem_statement": "An empty name is taken.\n",
    "FAIL_TO_PASS": '["tests/test_b.py::test_empty"]',
    "PASS_TO_PASS": "[]",
}
V5_SCRIPT = (
    "set -x\n: '>>>>> Start Test Output'\npytest -rA tests/test_b.py\n: '>>>>> End Test Output'\ngit checkout x\n"
)


def repair_of(found: Any) -> Repair:
    assert found.task is not None, found.faults
    return load_repair(found.task.checker.tests)


@pytest.fixture
def keep(tmp_path: Path) -> KeptFiles:
    return KeptFiles(tmp_path / "kept")


def test_a_smith_row_becomes_a_task_without_its_tests_and_with_its_bug(tmp_path: Path, keep: KeptFiles) -> None:
    found = smith_task(a_row(tmp_path), suite="s", keep=keep, near=tmp_path)
    repair, task = repair_of(found), found.task
    assert task is not None
    assert (task.instruction, task.workdir, task.checker.verdict) == ("add(1, 2) is -1.", "/testbed", "repair")
    assert task.image.context == str(tmp_path / "context")
    assert (repair.bug, repair.gold_reversed) == (BUG, True)
    assert repair.hidden == ["tests/test_calc.py"]
    assert repair.restored == ["tests/test_calc.py", "tests/test_other.py"]
    assert "apply -R" in Path(task.solution).read_text()


def test_the_rows_image_wins_and_else_the_id_says_which(keep: KeptFiles, tmp_path: Path) -> None:
    row = a_row(tmp_path, context="", instance_id="Owner__name.01234567.pr_5")
    named = smith_task({**row, "image_name": "a/b"}, suite="s", keep=keep)
    classic = smith_task(row, suite="s", keep=keep)
    assert named.task is not None and classic.task is not None
    assert (named.task.image.name, classic.task.image.name) == (
        "a/b",
        "jyangballin/swesmith.x86_64.owner_1776_name.01234567",
    )
    assert smith_task({**row, "instance_id": "x"}, suite="s", keep=keep).faults


def test_a_row_without_issue_text_gets_one_that_names_the_failing_tests(keep: KeptFiles, tmp_path: Path) -> None:
    found = smith_task(a_row(tmp_path, problem_statement=""), suite="s", keep=keep, near=tmp_path)
    assert found.task is not None
    assert "2 test(s) that used to pass now fail, tests/test_calc.py::test_add and 1 more" in found.task.instruction
    assert not repair_of(found).has_issue


def test_faults_of_rows_are_told_together(keep: KeptFiles) -> None:
    found = smith_task(
        {"instance_id": "x", "patch": "", "FAIL_TO_PASS": "no", "PASS_TO_PASS": []}, suite="s", keep=keep
    )
    text = "; ".join(found.faults)
    assert "patch is not a text, or empty" in text
    assert "FAIL_TO_PASS is not a list" in text
    assert "image_name is missing" in text
    (neither,) = iter_swe(iter([{"instance_id": "x"}]), suite="s", keep=keep)
    assert "neither a SWE-smith nor a SWE-bench row" in neither.faults[0]


def test_a_classic_bench_row_gets_a_script_and_lists_in_text_are_read(keep: KeptFiles) -> None:
    found = bench_task(BENCH, suite="s", keep=keep)
    repair = repair_of(found)
    assert found.task is not None
    assert found.task.image.name == "swebench/sweb.eval.x86_64.pallets_1776_flask-5014:latest"
    assert (repair.fail_to_pass, repair.pass_to_pass) == (["tests/test_b.py::test_empty"], [])
    assert repair.gold.endswith("+b\n"), "a patch without a final newline is completed"
    assert repair.restored == ["tests/test_b.py"]
    assert (repair.parser, repair.skipped_holds, repair.fail_only) == ("parse_log_pytest", True, False)
    for line in ("git checkout 7ee9ceb71e868944a46e1ff00b506772a53a4f1d tests/test_b.py", "pytest -rA tests/test_b.py"):
        assert f"\n{line}\n" in repair.script
    assert "thundersync_code=$?" in repair.script


def test_a_version_5_row_brings_its_own_image_script_and_parser(keep: KeptFiles) -> None:
    row = {**BENCH, "image": "i", "eval_script": V5_SCRIPT, "log_parser": "parse_log_x", "eval_type": "fail_only"}
    found = bench_task(row, suite="s", keep=keep)
    repair = repair_of(found)
    assert found.task is not None and found.task.image.name == "i"
    assert (repair.parser, repair.fail_only) == ("parse_log_x", True)
    assert repair.script.startswith("set -x\n") and "Test Exit Code: $thundersync_code" in repair.script
    assert bench_task({**row, "eval_script": "pytest"}, suite="s", keep=keep).faults


def test_django_runs_modules_and_not_files(keep: KeptFiles) -> None:
    patch = BENCH["test_patch"].replace("tests/test_b.py", "tests/a/test_b.py")
    found = bench_task({**BENCH, "repo": "django/django", "test_patch": patch}, suite="s", keep=keep)
    assert "--parallel 1 a.test_b\n" in repair_of(found).script


def test_kinds_are_read_of_ids() -> None:
    ids = ("a__b.01234567.func_pm_op_change__abcdefgh", "a__b.c.01234567.lm_rewrite__x1", "a__b.01234567.pr_53652", "x")
    assert [kind_of(each) for each in ids] == ["func_pm_op_change", "lm_rewrite", "pr_53652", ""]


def test_files_are_read_of_ids_and_patches() -> None:
    assert files_of_tests(["a/b.py::T::t[x::y z]", "a/b.py::u", "test_x (m.T)", "c.py"]) == ["a/b.py", "c.py"]
    patch = "diff --git a/x.bin b/x.bin\nGIT binary patch\n--- a/old\t2020\n+++ b/new\r\n--- /dev/null\n+++ made\n"
    assert files_of_patch(patch) == ["x.bin", "old", "new", "made"]


@pytest.mark.parametrize(
    ("path", "surface"),
    [
        ("tests/test_b.py", True),
        ("tests", True),
        ("deep/conftest.py", True),
        ("setup.cfg", True),
        ("pytest.ini", True),
        ("src/pytest/__init__.py", True),
        ("pytest.py", True),
        ("x/__pycache__/a.cpython-311.pyc", True),
        ("evil.pth", True),
        ("tests/test_new.py", False),
        ("src/flask/b.py", False),
        ("src/flask/testing.py", False),
        ("docs/pytest.rst", False),
        ("tox.ini", False),
    ],
)
def test_the_judges_files_are_known_unless_the_reference_changes_them(
    path: str, surface: bool, keep: KeptFiles
) -> None:
    patch = BENCH["patch"] + "\n--- a/tox.ini\n+++ b/tox.ini\n@@ -1 +1 @@\n-a\n+b\n"
    assert is_surface(path, repair_of(bench_task({**BENCH, "patch": patch}, suite="s", keep=keep))) is surface


def test_equal_rows_share_their_files_and_texts_survive(tmp_path: Path, keep: KeptFiles) -> None:
    text = "caf\udce9\r\n"  # a byte that is no text, as patches hold
    first, second = keep.keep({"a/b": text}), KeptFiles(tmp_path / "kept").keep({"a/b": text})
    assert first == second
    assert (first / "a" / "b").read_bytes() == b"caf\xe9\r\n"
    assert keep.keep({"a/b": "other"}) != first
    assert json.dumps(sorted(path.name for path in first.rglob("*"))) == '["a", "b"]'
