"""Repairs from rows: SWE-smith, and SWE-bench (Verified) in its classic form and that of version 5.

Rows in, `Found` out. What judging needs is written into a kept folder, so that a task stays a small value however many
tests it has. Refuses to know how patches are applied and logs are read.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from thundersync.core.types import Checker, Image, Task
from thundersync.tasks.found import Found
from thundersync.tasks.kept import KeptFiles
from thundersync.tasks.repair import FILE, Repair, apply_script, files_of_patch, files_of_tests, terminated
from thundersync.tasks.rows import Row
from thundersync.tasks.swe_specs import eval_script, parser_name

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
SMITH_COMMAND = "pytest --disable-warnings --color=no --tb=no --verbose"
SMITH_TIMEOUT_S = 600.0
BENCH_TIMEOUT_S = 1800.0
MEMORY_MIB = 10 * 1024
_ACTIVATE = "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate; conda activate testbed; fi"
TEMPLATE = (
    "There is a regression in this package: {count} test(s) that used to pass now fail, {first}{more}.\n"
    "Find the cause in the source code (not in the tests) and fix it."
)


def looks_like_smith(row: Row) -> bool:
    """By the keys that only these rows have."""
    return {"instance_id", "patch", "FAIL_TO_PASS"} <= row.keys() and "test_patch" not in row


def looks_like_bench(row: Row) -> bool:
    return {"instance_id", "patch", "FAIL_TO_PASS", "test_patch"} <= row.keys()


def kind_of(instance_id: str) -> str:
    """How a SWE-smith bug was made, e.g. `func_pm_op_change` or `pr_53652`; empty if the id does not say."""
    last = instance_id.rpartition(".")[2]
    if last.startswith("pr_"):
        return last
    match = re.fullmatch(r"(\w+?)__\w+", last)
    return match[1] if match else ""


def smith_task(row: Row, *, suite: str, keep: KeptFiles, near: Path | None = None) -> Found:
    """One SWE-smith row, whose patch makes the bug. `near`: the folder that a row's `context` is relative to."""
    faults: list[str] = []
    row_id = _text(row, "instance_id", faults)
    patch = terminated(_text(row, "patch", faults))
    tests = [_tests(row, name, faults) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")]
    if not faults and not tests[0]:
        faults.append("FAIL_TO_PASS is empty: nothing tells a repair from the bug")
    image = _smith_image(row, row_id, near, faults)
    command = str(row.get("test_cmd") or SMITH_COMMAND)
    if faults:
        return Found(task_id=row_id or "?", suite=suite, format="swe_smith", task=None, faults=faults)
    files = files_of_tests([*tests[0], *tests[1]])
    lines = [_ACTIVATE, "cd /testbed", f"echo '{START}'", f"{command} {' '.join(map(_quoted, files))}"]
    issue = str(row.get("problem_statement") or "").strip()
    repair = Repair(
        instance_id=row_id,
        has_issue=bool(issue),
        bug=patch,
        gold=patch,
        gold_reversed=True,
        hidden=files_of_tests(tests[0]),
        restored=files,
        script="\n".join([*lines, "code=$?", f"echo '{END}'", "exit $code"]) + "\n",
        parser="pytest_lines",
        fail_to_pass=tests[0],
        pass_to_pass=tests[1],
    )
    return _found(repair, suite, "swe_smith", issue or _template(tests[0]), image, timeout_s=SMITH_TIMEOUT_S, keep=keep)


def bench_task(row: Row, *, suite: str, keep: KeptFiles) -> Found:
    """One SWE-bench row, whose patch is the repair and whose test_patch brings the tests."""
    faults: list[str] = []
    row_id = _text(row, "instance_id", faults)
    patch, test_patch = (terminated(_text(row, name, faults)) for name in ("patch", "test_patch"))
    tests = [_tests(row, name, faults) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")]
    issue = _text(row, "problem_statement", faults)
    script, parser = eval_script(row, faults), parser_name(row, faults)
    if faults:
        return Found(task_id=row_id or "?", suite=suite, format="swe_bench", task=None, faults=faults)
    name = str(row.get("image") or f"swebench/sweb.eval.x86_64.{row_id.replace('__', '_1776_').lower()}:latest")
    repair = Repair(
        instance_id=row_id,
        gold=patch,
        restored=files_of_patch(test_patch),
        script=script,
        parser=parser,
        fail_to_pass=tests[0],
        pass_to_pass=tests[1],
        fail_only=row.get("eval_type") == "fail_only",
        skipped_holds=True,
    )
    return _found(repair, suite, "swe_bench", issue.strip(), Image(name=name), timeout_s=BENCH_TIMEOUT_S, keep=keep)


def _found(
    repair: Repair, suite: str, format_name: str, issue: str, image: Image, *, timeout_s: float, keep: KeptFiles
) -> Found:
    judge = keep.keep({FILE: msgspec.json.encode(repair).decode()})
    solution = apply_script(repair.gold, folder=repair.repo_dir, reverse=repair.gold_reversed)
    task = Task(
        task_id=repair.instance_id,
        suite=suite,
        instruction=issue,
        image=image,
        checker=Checker(tests=str(judge), command="", timeout_s=timeout_s, verdict="repair"),
        workdir=repair.repo_dir,
        solution=str(keep.keep({"solve.sh": solution}) / "solve.sh"),
        memory_mib=MEMORY_MIB,
    )
    return Found(task_id=task.task_id, suite=suite, format=format_name, task=task)


def _smith_image(row: Row, row_id: str, near: Path | None, faults: list[str]) -> Image:
    """The row's image; or, in rows made on this machine, the folder of a Dockerfile."""
    context = str(row.get("context") or "")
    if context:
        folder = (near or Path()) / context
        if not (folder / "Dockerfile").is_file():
            faults.append(f"context {context!r}: there is no Dockerfile in {folder}")
        return Image(context=str(folder.absolute()))
    if name := str(row.get("image_name") or ""):
        return Image(name=name)
    match = re.fullmatch(r"(.+?)__(.+?)\.([0-9a-f]{8})\..+", row_id)
    if match is None:
        faults.append("image_name is missing, and the id does not say which image it needs")
        return Image()
    return Image(name=f"jyangballin/swesmith.x86_64.{match[1]}_1776_{match[2]}.{match[3]}".lower())


def _text(row: Row, name: str, faults: list[str]) -> str:
    found = row.get(name)
    if not isinstance(found, str) or not found.strip():
        faults.append(f"{name} is {'missing' if found is None else 'not a text, or empty'}")
        return ""
    return found


def _tests(row: Mapping[str, Any], name: str, faults: list[str]) -> list[str]:
    """Both ways these lists are published: a list, and a JSON text that holds one."""
    found = row.get(name)
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError:
            found = None
    found = found.tolist() if found is not None and hasattr(found, "tolist") else found  # a column of numpy arrays
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        faults.append(f"{name} is not a list of test ids")
        return []
    return found


def _template(failing: list[str]) -> str:
    more = f" and {len(failing) - 1} more" if len(failing) > 1 else ""
    return TEMPLATE.format(count=len(failing), first=failing[0], more=more)


def _quoted(path: str) -> str:
    return "'" + path.replace("'", "'\\''") + "'"


def iter_swe(rows: Iterator[Row], *, suite: str, keep: KeptFiles, near: Path | None = None) -> Iterator[Found]:
    """Rows of either family; a row of neither is a fault."""
    for row in rows:
        if looks_like_bench(row):
            yield bench_task(row, suite=suite, keep=keep)
        elif looks_like_smith(row):
            yield smith_task(row, suite=suite, keep=keep, near=near)
        else:
            named = str(row.get("instance_id") or "?")
            keys = ", ".join(sorted(row)[:8])
            faults = [f"is neither a SWE-smith nor a SWE-bench row: it has {keys}"]
            yield Found(task_id=named, suite=suite, format="swe_bench", task=None, faults=faults)
