"""Logs of test runs, honest and forged, read as their framework meant them."""

import json
import os
from pathlib import Path

import pytest

from thundersync.score.repairs import grade
from thundersync.score.test_logs import END, START, TestLog, merged, read_log, summary_lines, totals
from thundersync.tasks.repair import Repair


def log_of(text: str, parser: str = "parse_log_pytest", *, code: int | None = 0) -> TestLog:
    after = "" if code is None else f"+ : '>>>>> Test Exit Code: {code}'\n"
    log = read_log(f"noise PASSED a\n+ : '{START}'\n{text}\n+ : '{END}'\n{after}", parser)
    assert log is not None
    return log


SUMMARY = """PASSED tests/before.py::printed
=================================== PASSES ===================================
----------------------------- Captured stdout call -----------------------------
=========================== short test summary info ============================
FAILED tests/inner.py::printed - by a test
============================== 1 failed in 0.01s ===============================
=========================== short test summary info ============================
PASSED tests/a.py::test_one
PASSED tests/a.py::test_two[a b - c]
SKIPPED [1] tests/a.py:5: not today
XFAIL tests/a.py::test_known - a reason
FAILED tests/a.py::test_bad[x] - assert 1 == 2
ERROR tests/b.py
===== 1 failed, 2 passed, 1 skipped, 1 xfailed, 2 warnings, 1 error in 1.20s =====
"""


def test_the_last_summary_is_read_and_what_tests_print_is_not() -> None:
    log = log_of(SUMMARY, code=1)
    assert log.statuses == {
        "tests/a.py::test_one": "PASSED",
        "tests/a.py::test_two[a b - c]": "PASSED",
        "[1] tests/a.py:5: not today": "SKIPPED",
        "tests/a.py::test_known": "XFAIL",
        "tests/a.py::test_bad[x]": "FAILED",
        "tests/b.py": "ERROR",
    }
    assert log.totals == {"failed": 1, "passed": 2, "skipped": 1, "xfailed": 1, "error": 1}
    assert (log.exit_code, log.contradiction) == (1, "")


def test_ids_that_were_cut_at_a_space_are_found_and_progress_marks_are_taken_literally() -> None:
    log = log_of("PASSED [100%]\n" + SUMMARY, code=1)
    assert log.status("tests/a.py::test_two[a") == "PASSED"
    assert log.status("tests/a.py::test_tw") is None
    assert (log.status("[100%]"), log.status("[ 50%]")) == ("PASSED", None)


def test_of_two_answers_for_one_test_the_worse_counts() -> None:
    assert merged([("a", "FAILED"), ("a", "PASSED"), ("b", "PASSED"), ("b", "PASSED")]) == {
        "a": "FAILED",
        "b": "PASSED",
    }
    assert merged([("a", "PASSED"), ("a", "SKIPPED")]) == {"a": "SKIPPED"}


LINES = "tests/a.py::test_one PASSED [ 50%]\ntests/a.py::test_bad[x] FAILED   [100%]\n"


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        (LINES + "=== 1 failed, 1 passed in 0.1s ===", 1, ""),
        (LINES + "1 failed, 1 passed in 0.10s", 1, ""),
        (LINES + "Results (0.77s):\n    1 passed\n    1 failed", 1, ""),
        (LINES, 0, "no totals"),
        (LINES + "=== 1 failed in 0.1s ===", 1, "1 tests are named PASSED, and the run counted 0"),
        (LINES.splitlines()[0] + "\n=== 1 passed in 0.1s ===", 2, "ended with 2"),
        ("=== no tests ran in 0.01s ===", 5, "ended with 5"),
    ],
)
def test_a_log_that_contradicts_itself_is_told(text: str, code: int, told: str) -> None:
    assert (told in (found := log_of(text, "pytest_lines", code=code).contradiction)) and bool(found) == bool(told)


def test_totals_are_the_frameworks_own() -> None:
    assert totals("1 failed\nprinted 3 failed\n=== 2 passed, 1 warnings in 0.50 seconds ===\n1 failed\n") == {
        "passed": 2
    }
    assert totals("nothing") is None


def test_no_tests_without_the_mark_where_they_begin() -> None:
    assert read_log("PASSED a\n", "pytest_lines") is None


def test_terminal_bench_reads_below_the_first_header_to_the_end() -> None:
    both = (
        "=== short test summary info ===\nFAILED a.py::x - no\n== 1 failed in 1s ==\n=== short test summary info ===\n"
    )
    assert summary_lines(both + "PASSED script\n", first=True) == [("a.py::x", "FAILED"), ("script", "PASSED")]
    assert summary_lines(both + "PASSED script\n") == [("script", "PASSED")]


def test_other_frameworks_logs() -> None:
    sympy = "test_a ok\ntest_b F\ntest_c E\ntest_d s\n____ sympy/x.py:test_e ____\n[OK]"
    assert log_of(sympy, "parse_log_sympy").statuses == {
        "test_a": "PASSED",
        "test_b": "FAILED",
        "test_c": "ERROR",
        "test_d": "SKIPPED",
        "test_e": "FAILED",
    }
    django = (
        "test_a (m.T) ... ok\nA docstring of it. ... FAIL\ntest_c (m.T) ... skipped 'why'\ntest_d (m.T) ...\n"
        "printed\nok\ntest_e (m.T) ... printed ok\nERROR: test_f (m.T)\nRan 6 tests in 1s\n"
    )
    assert log_of(django, "parse_log_django", code=1).statuses == {
        "test_a (m.T)": "PASSED",
        "A docstring of it.": "FAILED",
        "test_c (m.T)": "SKIPPED",
        "test_d (m.T)": "PASSED",
        "test_e (m.T)": "PASSED",
        "test_f (m.T)": "ERROR",
    }
    options = "=== short test summary info ===\nPASSED t.py::x[/a/b/c.txt]\nPASSED t.py::y[//z]\n== 2 passed in 1s =="
    assert list(log_of(options, "parse_log_pytest_options").statuses) == ["t.py::x[/c.txt]", "t.py::y[//z]"]


def repair(**changed: object) -> Repair:
    fields = {"instance_id": "i", "gold": "", "script": "", "parser": "pytest_lines"}
    fields |= {"fail_to_pass": ["a.py::f"], "pass_to_pass": ["a.py::p", "a.py::s"]}
    return Repair(**{**fields, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lines", "changed", "resolved"),
    [
        (("f PASSED", "p PASSED", "s PASSED"), {}, True),
        (("f XFAIL", "p PASSED", "s XFAIL"), {}, True),
        (("f PASSED", "p PASSED", "s SKIPPED"), {}, False),
        (("f PASSED", "p PASSED", "s SKIPPED"), {"skipped_holds": True}, True),
        (("f SKIPPED", "p PASSED", "s PASSED"), {"skipped_holds": True}, False),
        (("f PASSED", "p PASSED"), {}, False),
        (("f PASSED", "p PASSED"), {"fail_only": True}, True),
        (("f PASSED", "p FAILED", "s PASSED"), {"fail_only": True}, False),
        (("f ERROR", "p PASSED", "s PASSED"), {}, False),
        (("f PASSED",), {"pass_to_pass": []}, True),
    ],
)
def test_only_a_test_that_passed_has_passed(lines: tuple[str, ...], changed: dict[str, object], resolved: bool) -> None:
    passed = sum("PASSED" in line for line in lines)
    failed = any("FAILED" in line or "ERROR" in line for line in lines)
    text = "\n".join(f"a.py::{line}" for line in lines) + f"\n== {passed} passed in 1s =="
    verdict = grade(repair(**changed), log_of(text, "pytest_lines", code=int(failed)))
    assert verdict.resolved is resolved


REAL = Path(os.environ.get("THUNDERSYNC_TASKS", Path(__file__).parents[3] / "shared" / "tasks")) / "swesmith" / "real"


@pytest.mark.skipif(not REAL.is_dir(), reason="the published grading logs are not here (THUNDERSYNC_TASKS)")
@pytest.mark.parametrize("name", ["pandas-dev__pandas.95280573.pr_53652", "pydantic__pydantic.acb0f10f.pr_8316"])
def test_published_logs_are_graded_as_published(name: str) -> None:
    report = json.loads((REAL / name / "report.json").read_text())
    log = read_log((REAL / name / "test_output.txt").read_text(), "pytest_lines")
    assert log is not None
    tests = {kind: [*found["success"], *found["failure"]] for kind, found in report["tests_status"].items()}
    verdict = grade(repair(fail_to_pass=tests["FAIL_TO_PASS"], pass_to_pass=tests["PASS_TO_PASS"]), log)
    assert verdict.resolved is report["resolved"], verdict.why


@pytest.mark.skipif(not REAL.is_dir(), reason="the published grading logs are not here (THUNDERSYNC_TASKS)")
def test_a_published_log_before_and_after_the_reference() -> None:
    expected = json.loads((REAL / "run_validation" / "report.json").read_text())
    for name, resolved in (("test_output.txt", False), ("test_output_pre_gold.txt", True)):
        log = read_log((REAL / "run_validation" / name).read_text(), "pytest_lines")
        assert log is not None
        tests = {"fail_to_pass": expected["FAIL_TO_PASS"], "pass_to_pass": expected["PASS_TO_PASS"]}
        assert grade(repair(**tests), log).resolved is resolved
