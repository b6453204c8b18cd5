"""What it takes to judge a repair: the facts of one SWE-smith or SWE-bench row, in one form.

Written by the loaders into the folder that the task's checker names, read by `score.repairs`. Refuses to know the
sandbox. `is_surface` says which files of a repository belong to its judge.
"""

import fnmatch
import posixpath
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

FILE = "repair.json"

_JUDGES: tuple[str, ...] = (
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "tox.ini",
    "setup.cfg",
    "pyproject.toml",
    "noxfile.py",
)
_JUDGES += ("sitecustomize.py", "usercustomize.py", "*.pth", "*.pyc", "*.pyo", ".coveragerc", "*.egg-link")
# At the top of the repository or of its source folder these would be imported instead of the test framework's own.
_SHADOWS = re.compile(
    r"(src/|lib/)?(pytest|_pytest|py|pluggy|iniconfig|exceptiongroup|unittest|xdist|pytest_\w+)(\.py|/.*)"
)
_FILE_OF_ID = re.compile(r"^([^\s:\[]+\.py)(::|$)")


class Repair(Struct, frozen=True, kw_only=True):
    """Paths are relative to `repo_dir`, patches as `git apply` takes them."""

    instance_id: str
    repo_dir: str = "/testbed"
    bug: str = ""
    """Applied to the image's repository, it makes the state that the agent starts from; empty: that is the image's."""
    gold: str
    """The reference change."""
    gold_reversed: bool = False
    """The reference change is to undo `gold`."""
    hidden: list[str] = []
    """Test files that are absent while the agent acts."""
    restored: list[str] = []
    """Test files that must be as in the start state when the tests run."""
    script: str
    """Bash; runs the tests. Its output after the line `>>>>> Start Test Output` is read."""
    parser: str
    """As in `score.test_logs`."""
    fail_to_pass: list[str]
    pass_to_pass: list[str]
    fail_only: bool = False
    """A listed test that the log does not name has passed (`eval_type = "fail_only"`)."""
    skipped_holds: bool = False
    """A skipped test of `pass_to_pass` is as good as before (SWE-bench); else it is not passed (SWE-smith)."""

    has_issue: bool = True
    """The row itself says what is wrong."""

    @property
    def test_count(self) -> int:
        return len(self.fail_to_pass) + len(self.pass_to_pass)


def load_repair(folder: str) -> Repair:
    """What a loader wrote. Raises: OSError, msgspec.DecodeError."""
    return msgspec.json.decode((Path(folder) / FILE).read_bytes(), type=Repair)


def files_of_tests(test_ids: Iterable[str]) -> list[str]:
    """The files that pytest ids name, each once, in order."""
    found: dict[str, None] = {}
    for test_id in test_ids:
        if match := _FILE_OF_ID.match(test_id):
            found[match[1]] = None
    return list(found)


def files_of_patch(patch: str) -> list[str]:
    """The files a patch touches, by its headers, each once."""
    found: dict[str, None] = {}
    for line in patch.splitlines():
        if match := re.match(r"(?:---|\+\+\+) (?:[ab]/)?([^\t\r]+)", line):
            if match[1] != "/dev/null":
                found[match[1].strip()] = None
        elif match := re.match(r"diff --git a/(.+) b/\1$", line):
            found[match[1]] = None
    return list(found)


def is_surface(path: str, repair: Repair) -> bool:
    """Whether a change of `path` would change the judge and not the judged.

    Test files of the task, and whatever configures or replaces the test framework, unless the reference changes it.
    """
    listed = {*repair.restored, *repair.hidden}
    if path in listed or any(test.startswith(f"{path}/") for test in listed):
        return True
    if path in files_of_patch(repair.gold):
        return False
    name = posixpath.basename(path)
    return any(fnmatch.fnmatchcase(name, judge) for judge in _JUDGES) or _SHADOWS.fullmatch(path) is not None


def terminated(patch: str) -> str:
    """The patch with a final newline, without which git calls it corrupt."""
    return patch if not patch or patch.endswith("\n") else patch + "\n"


def apply_script(patch: str, *, folder: str, reverse: bool) -> str:
    """A bash script that applies `patch`: the reference solution of a repair."""
    mark = "END_OF_PATCH"
    while mark in patch:
        mark += "_"
    flag = " -R" if reverse else ""
    git = f"git -c safe.directory='*' apply{flag} --whitespace=nowarn -"
    return f"#!/bin/bash\nset -e\ncd {folder}\n{git} <<'{mark}'\n{terminated(patch)}{mark}\n"
