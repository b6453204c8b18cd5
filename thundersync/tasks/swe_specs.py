"""How a SWE-bench row's tests are run: the row's own script (version 5), or one built here for a classic row.

Classic rows leave this to tables of the official package's versions before 5. What is here is what the twelve
repositories of Verified share between versions; where a row brings a script, the row's is used. Refuses to know the
sandbox and the log.
"""

import re

from thundersync.tasks.repair import files_of_patch, terminated
from thundersync.tasks.rows import Row

PYTEST = "pytest -rA"
_COMMANDS = {
    "django/django": "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
    "sympy/sympy": "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose",
    "sphinx-doc/sphinx": "tox --current-env -epy39 -v --",
    "mwaskom/seaborn": "pytest --no-header -rA",
    "astropy/astropy": "pytest -rA -vv -o console_output_style=classic --tb=no",
}
_INSTALLS = {
    "astropy/astropy": "python -m pip install -e .[test] --verbose",
    "sphinx-doc/sphinx": "python -m pip install -e .[test]",
    "scikit-learn/scikit-learn": "python -m pip install -v --no-use-pep517 --no-build-isolation -e .",
    "psf/requests": "python -m pip install .",
}
_PARSERS = {
    "django/django": "parse_log_django",
    "sympy/sympy": "parse_log_sympy",
    "mwaskom/seaborn": "parse_log_seaborn",
    "psf/requests": "parse_log_pytest_options",
    "pylint-dev/pylint": "parse_log_pytest_options",
    "matplotlib/matplotlib": "parse_log_matplotlib",
    "astropy/astropy": "parse_log_pytest_v2",
    "scikit-learn/scikit-learn": "parse_log_pytest_v2",
    "sphinx-doc/sphinx": "parse_log_pytest_v2",
}
_END = re.compile(r"^: '>>>>> End Test Output'$", re.MULTILINE)
_END_WITH_CODE = "thundersync_code=$?\n: '>>>>> End Test Output'\n: \">>>>> Test Exit Code: $thundersync_code\""


def eval_script(row: Row, faults: list[str]) -> str:
    """Bash that runs a row's tests and prints their output between two marks, and the test command's exit code."""
    script = row.get("eval_script")
    if not script:
        script = _classic(row, faults)
    elif not isinstance(script, str) or not _END.search(script):
        faults.append("eval_script does not print `>>>>> End Test Output`: its results cannot be read")
        return ""
    if "Test Exit Code" in script:
        return script
    return _END.sub(lambda _: _END_WITH_CODE, script)


def parser_name(row: Row, faults: list[str]) -> str:
    """The name of the official function that reads this row's log."""
    found = row.get("log_parser") or _PARSERS.get(str(row.get("repo")), "parse_log_pytest")
    if not isinstance(found, str):
        faults.append("log_parser is not the name of a function")
        return ""
    return found


def _classic(row: Row, faults: list[str]) -> str:
    base, test_patch, repo = str(row.get("base_commit") or ""), str(row.get("test_patch") or ""), str(row.get("repo"))
    if not re.fullmatch(r"[0-9a-f]{7,40}", base):
        faults.append(f"base_commit {base!r} is not a commit")
        return ""
    old = _old_files(test_patch)
    files = " ".join(old)
    mark = "END_OF_TEST_PATCH"
    while mark in test_patch:
        mark += "_"
    restore = f"git checkout {base} {files}" if old else ":"
    lines = [
        *("#!/bin/bash", "set -uxo pipefail", "source /opt/miniconda3/bin/activate", "conda activate testbed"),
        *("cd /testbed", "git config --global --add safe.directory /testbed"),
        *(_INSTALLS.get(repo, "python -m pip install -e ."), restore),
        f"git apply -v - <<'{mark}'\n{terminated(test_patch)}{mark}",
        *(": '>>>>> Start Test Output'", f"{_COMMANDS.get(repo, PYTEST)} {' '.join(_directives(repo, test_patch))}"),
        *(": '>>>>> End Test Output'", restore),
    ]
    return "\n".join(lines) + "\n"


def _old_files(test_patch: str) -> list[str]:
    """Files that the patch changes and does not make."""
    return re.findall(r"^--- a/(\S+)", test_patch, re.MULTILINE)


def _directives(repo: str, test_patch: str) -> list[str]:
    """What is run: the test files of the patch, in the form the repository's test command takes."""
    data = (".json", ".png", ".csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
    files = [path for path in files_of_patch(test_patch) if not path.endswith(data)]
    if repo != "django/django":
        return files
    return [path.removesuffix(".py").removeprefix("tests/").replace("/", ".") for path in files]
