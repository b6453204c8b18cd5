"""A small repository with a bug, as a SWE-smith row, in a world that needs nothing from outside."""

import shutil
import textwrap
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

_PYTEST = ("pytest", "pluggy", "iniconfig", "packaging")
CALC = "def add(a, b):\n    return a + b\n# twice\ndef double(a):\n    return add(a, a)\n"
BUG = textwrap.dedent(
    """\
    --- a/calc.py
    +++ b/calc.py
    @@ -1,4 +1,4 @@
     def add(a, b):
    -    return a + b
    +    return a - b
     # twice
     def double(a):
    """
)
TEST = "from calc import add, double\n\n\ndef test_add():\n    assert add(1, 2) == 3\n\n\n"
TEST += "def test_double():\n    assert double(2) == 4\n"
OTHER = "import pytest\n\n\ndef test_says(capsys):\n    print('1 failed')\n\n\n@pytest.mark.parametrize('a', [1, 2])\n"
OTHER += "def test_is(a):\n    assert a\n"


def a_row(folder: Path, **changed: Any) -> dict[str, Any]:
    """A row whose `context` is made in `folder`."""
    context = folder / "context"
    if not context.is_dir():
        _write(context / "testbed", {"calc.py": CALC, "tests/test_calc.py": TEST, "tests/test_other.py": OTHER})
        _write(context, {"Dockerfile": "FROM debian\nCOPY testbed /testbed\nCOPY pylib /opt/pylib\n"})
        for name in _PYTEST:
            for file in distribution(name).files or []:
                if not file.parts[0].startswith("..") and "__pycache__" not in file.parts:
                    target = context / "pylib" / file
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(str(file.locate()), target)
    return {
        "instance_id": "pypi__calc.00000000.func_pm_op_change__abcdefgh",
        "repo": "swesmith/pypi__calc.00000000",
        "patch": BUG,
        "FAIL_TO_PASS": ["tests/test_calc.py::test_add", "tests/test_calc.py::test_double"],
        "PASS_TO_PASS": [
            "tests/test_other.py::test_says",
            "tests/test_other.py::test_is[1]",
            "tests/test_other.py::test_is[2]",
        ],
        "problem_statement": "add(1, 2) is -1.",
        "context": "context",
        "test_cmd": "PYTHONPATH=/opt/pylib:/testbed python3 -m pytest --disable-warnings --color=no --tb=no --verbose",
        **changed,
    }


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


GOLD = "--- a/calc.py\n+++ b/calc.py\n@@ -3,3 +3,6 @@\n # twice\n def double(a):\n     return add(a, a)\n"
GOLD += "+# thrice\n+def triple(a):\n+    return a + a + a\n"
TEST_PATCH = textwrap.dedent(
    """\
    --- a/tests/test_calc.py
    +++ b/tests/test_calc.py
    @@ -7,2 +7,6 @@
     def test_double():
         assert double(2) == 4
    +def test_triple():
    +    import calc
    +    assert calc.triple(2) == 6
    +    print('FAILED tests/test_calc.py::test_triple')
    """
)


def a_bench_row(folder: Path, **changed: Any) -> dict[str, Any]:
    """A SWE-bench row of version 5 over the same repository, and the folder of its image's Dockerfile, as `context`."""
    smith = a_row(folder)
    script = f"""#!/bin/bash
set -uxo pipefail
cd /testbed
git config --global --add safe.directory /testbed
git status
git apply -v - <<'EOF_1'
{TEST_PATCH}EOF_1
: '>>>>> Start Test Output'
PYTHONPATH=/opt/pylib:/testbed python3 -m pytest -rA tests/test_calc.py
: '>>>>> End Test Output'
"""
    return {
        "instance_id": "owner__calc-1",
        "repo": "owner/calc",
        "base_commit": "0" * 40,
        "patch": GOLD,
        "test_patch": TEST_PATCH,
        "problem_statement": "There is no triple.",
        "FAIL_TO_PASS": '["tests/test_calc.py::test_triple"]',
        "PASS_TO_PASS": '["tests/test_calc.py::test_add", "tests/test_calc.py::test_double"]',
        "eval_script": script,
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "context": smith["context"],
        **changed,
    }
