"""All formats behind one door: a configured path in, `Task` values out.

The first stage of a run. `load_env` is for runs and wants every task usable; `find_all` is for `tasks check` and tells
of each. Refuses to know what is inside a format, and opens no sandbox.
"""

import fnmatch
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import msgspec

from thundersync.config import EnvConfig, EnvType
from thundersync.core.types import Task
from thundersync.errors import TaskError
from thundersync.tasks.baked import baked
from thundersync.tasks.checked import CheckedTasks
from thundersync.tasks.found import Found, escaped, listed, usable
from thundersync.tasks.functions import find_function_tasks, is_function_path
from thundersync.tasks.harbor import find_harbor, resolve
from thundersync.tasks.kept import KeptFiles
from thundersync.tasks.prompts import looks_like_prompt, prompt_task
from thundersync.tasks.repair import load_repair
from thundersync.tasks.rows import SUFFIXES, USUAL_SPLIT, Row, is_hub_id, read_rows
from thundersync.tasks.swe import iter_swe, kind_of, looks_like_bench, looks_like_smith
from thundersync.tasks.terminal_bench import find_terminal_bench

_DEPTH = 3
_REPAIRS = ("swe_smith", "swe_bench")


Say: TypeAlias = Callable[[str], None]


def load_env(
    env: EnvConfig,
    *,
    variables: Mapping[str, str] | None = None,
    keep: KeptFiles | None = None,
    say: Say = lambda text: None,
) -> list[Task]:
    """The tasks that `env` names, after its filters, in their format's order. Reads files: call it in a thread.

    `say` is told where something else is read than what was named, and what `env.checked` leaves out.
    Raises: TaskError with every fault of every task, or when no task is left.
    """
    keep = keep if keep is not None else KeptFiles()
    checked = CheckedTasks(env.checked) if env.checked else None
    found = list(_filtered(_writable(_found(env, variables, keep, say)), env, checked))
    tasks = usable(env.path, found)
    if checked is not None:
        _tell_left_out(env, checked, tasks, say)
    if not tasks:
        raise TaskError(
            f"no tasks at {env.path}" + (" pass the filters of [env]" if _filters(env) else ""),
            remedy="Correct the path, or widen env.ids, env.kinds, env.max_tests and env.issue_text.",
        )
    if env.bake_tools:
        tasks = [baked(task, keep) for task in tasks]
    if env.reward == "task":
        return tasks
    return [_shaped(task, env) for task in tasks]


def find_all(
    path: str,
    *,
    split: str = USUAL_SPLIT,
    variables: Mapping[str, str] | None = None,
    keep: KeptFiles | None = None,
    say: Say = lambda text: None,
) -> list[Found]:
    """Every task at `path`, and, of a folder of several sets, in all that lies up to three folders below.

    `split`, of a data set from the hub, and `say` are as for `load_env`.
    Raises: TaskError where there is nothing that looks like a task.
    """
    keep = keep if keep is not None else KeptFiles()
    root = resolve(path)
    if not root.is_dir() or _folder_type(root) is not None:
        return list(_writable(_found(EnvConfig(path=path, split=split), variables, keep, say)))
    found = list(_writable(_below(root, root, variables, keep, _DEPTH)))
    if not found:
        raise TaskError(f"no tasks in {root}", remedy="docs/tasks.md lists the formats that are known.")
    return found


def detect(path: str, *, split: str = USUAL_SPLIT) -> EnvType:
    """The format of what lies at `path`; `split`: of a data set from the hub. Raises: TaskError if it is none."""
    if is_function_path(path):
        return "python"
    root = resolve(path)
    if root.is_dir():
        if (kind := _folder_type(root)) is not None:
            return kind
        if not any(each.suffix in SUFFIXES for each in root.iterdir()):
            return "harbor"  # whose own reader says best what a task folder needs
    elif not root.is_file() and not is_hub_id(path):
        return "harbor"
    first = next(read_rows(path, split=split), None)
    kind = _row_type(first) if first is not None else None
    if kind is None:
        raise TaskError(
            f"the rows of {path} are of no format that is known",
            remedy="Rows have prompt and checker, or the columns of SWE-smith or SWE-bench (docs/tasks.md).",
        )
    return kind


def _found(
    env: EnvConfig, variables: Mapping[str, str] | None, keep: KeptFiles, say: Say = lambda text: None
) -> Iterator[Found]:
    kind = detect(env.path, split=env.split) if env.type == "auto" else env.type
    match kind:
        case "python":
            return iter(find_function_tasks(env.path, keep=keep))
        case "terminal_bench":
            return iter(find_terminal_bench(resolve(env.path), keep=keep))
        case "swe_smith" | "swe_bench" | "prompts":
            return _rows(env.path, read_rows(env.path, split=env.split, say=say), keep)
        case "verifiers":
            raise TaskError(
                f"the environment {env.path} brings its own agent and rewards: there are no tasks without it",
                remedy="Train with it: `thundersync run`, or an Engine of your own.",
            )
        case _:
            return iter(find_harbor(env.path, variables=variables))


def _rows(path: str, rows: Iterator[Row], keep: KeptFiles) -> Iterator[Found]:
    suite = Path(path).stem if Path(path).exists() else path
    near = Path(path).parent if Path(path).is_file() else Path(path)
    first = next(rows, None)
    if first is None:
        return iter(())
    rows = itertools.chain([first], rows)
    if looks_like_prompt(first):
        return (prompt_task(row, suite=suite, keep=keep) for row in rows)
    return iter_swe(rows, suite=suite, keep=keep, near=near)


def _below(
    root: Path, folder: Path, variables: Mapping[str, str] | None, keep: KeptFiles, depth: int
) -> Iterator[Found]:
    if _folder_type(folder) is not None:
        yield from _renamed(_found(EnvConfig(path=str(folder)), variables, keep), folder.relative_to(root).as_posix())
        return
    for child in sorted(folder.iterdir()):
        if child.name.startswith("."):
            continue
        if child.is_dir() and depth > 0:
            yield from _below(root, child, variables, keep, depth - 1)
        elif child.suffix in SUFFIXES:
            first = _first(child)
            if first is not None and _row_type(first) is not None:
                suite = child.relative_to(root).with_suffix("").as_posix()
                yield from _renamed(_found(EnvConfig(path=str(child)), variables, keep), suite)


def _renamed(found: Iterable[Found], suite: str) -> Iterator[Found]:
    return (msgspec.structs.replace(each, suite=suite) for each in found)


def _writable(found: Iterable[Found]) -> Iterator[Found]:
    """Every record of a run names its task: one whose name is no text has a fault, and a name that can be written."""
    for each in found:
        if (suite := escaped(each.suite)) != each.suite or escaped(each.task_id) != each.task_id:
            fault = "has a name that is not UTF-8"
            yield Found(task_id=escaped(each.task_id), suite=suite, format=each.format, task=None, faults=[fault])
        else:
            yield each


def _first(path: Path) -> Row | None:
    """The first row of a file that may hold anything at all."""
    try:
        return next(read_rows(str(path)), None)
    except TaskError:
        return None


def _folder_type(folder: Path) -> EnvType | None:
    """Of a task folder, or a folder of task folders."""
    for name, kind in (("task.toml", "harbor"), ("task.yaml", "terminal_bench")):
        if (folder / name).is_file() or any(folder.glob(f"*/{name}")):
            return kind  # type: ignore[return-value]
    return None


def _row_type(row: Row) -> EnvType | None:
    if looks_like_prompt(row):
        return "prompts"
    if looks_like_bench(row):
        return "swe_bench"
    return "swe_smith" if looks_like_smith(row) else None


def _filters(env: EnvConfig) -> bool:
    return bool(env.ids or env.kinds or env.max_tests or env.issue_text)


def _filtered(found: Iterator[Found], env: EnvConfig, checked: CheckedTasks | None) -> Iterator[Found]:
    """Faults of tasks left out by ids or report are nobody's concern; the last filters need a task that was read."""
    wanted = _ids(env.ids) if env.ids else None
    seen: set[str] = set()
    for each in found:
        if wanted is not None:
            if each.task_id not in wanted:
                continue
            seen.add(each.task_id)
        if env.kinds and not any(_is_kind(each.task_id, kind) for kind in env.kinds):
            continue
        if checked is not None and not checked.passes(each):
            continue
        if each.task is None or _passes(each.task, env):
            yield each
    if wanted is not None and (lost := sorted(wanted - seen)):
        raise TaskError(
            listed(f"{env.ids} names tasks that are not at {env.path}", lost), remedy="Correct the ids, one a line."
        )


def _tell_left_out(env: EnvConfig, checked: CheckedTasks, tasks: list[Task], say: Say) -> None:
    if checked.left_out and not tasks:
        raise TaskError(
            f"no task of {env.path} is left; not `ok` in {env.checked}: {checked.left_out}",
            remedy=f"Check them: python -m thundersync tasks check {env.path} --json {env.checked}; or name those to "
            "use in a file of env.ids, and leave out env.checked.",
        )
    if checked.left_out:
        say(f"{env.path}: left out what is not `ok` in {env.checked}: {checked.left_out}")
    if checked.baked and not env.bake_tools:
        say(f"{env.path}: what {env.checked} says was found with --bake-tools, and env.bake_tools is off")
    if checked.stand_ins:
        stand_ins = ", ".join(sorted(checked.stand_ins))
        say(f"{env.path}: what {env.checked} says was found on {stand_ins}, not on the tasks' own images")


def _is_kind(task_id: str, kind: str) -> bool:
    found = kind_of(task_id)
    return fnmatch.fnmatchcase(found, kind) or fnmatch.fnmatchcase(found.partition("_")[0], kind)


def _passes(task: Task, env: EnvConfig) -> bool:
    if task.checker.verdict != "repair" or not (env.max_tests or env.issue_text):
        return True
    repair = load_repair(task.checker.tests)
    if env.max_tests and repair.test_count > env.max_tests:
        return False
    return not env.issue_text or repair.has_issue


def _ids(path: str) -> set[str]:
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"env.ids: {path} cannot be read: {error}", remedy="A text file, one id a line.") from error
    return {line.strip() for line in lines if line.strip() and not line.startswith("#")}


def _shaped(task: Task, env: EnvConfig) -> Task:
    if task.checker.verdict in ("repair", "swebench_results") or task.stages:
        raise TaskError(
            f"env.reward = {env.reward!r} needs the results of single tests, and {task.task_id} is not judged so",
            remedy='Set env.reward = "task".',
        )
    checker = msgspec.structs.replace(task.checker, shaping=env.reward)
    return msgspec.structs.replace(task, checker=checker)
