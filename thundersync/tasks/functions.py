"""Tasks that a Python function makes: `module:function`, called without arguments, gives `Task` values or prompt rows.

For sets that are generated, or come from a library. Refuses to know what a task is.
"""

import importlib
from collections.abc import Iterable

from thundersync.core.types import Task
from thundersync.errors import TaskError
from thundersync.tasks.found import Found
from thundersync.tasks.kept import KeptFiles
from thundersync.tasks.prompts import prompt_task


def is_function_path(path: str) -> bool:
    """Whether `path` has the form `package.module:function`."""
    module, colon, name = path.partition(":")
    return bool(colon) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def find_function_tasks(path: str, *, keep: KeptFiles) -> list[Found]:
    """What the function gives. Raises: TaskError if it is not there, fails, or gives something else."""
    module, _, name = path.partition(":")
    try:
        given = getattr(importlib.import_module(module), name)()
    except Exception as error:  # the user's own code may raise anything
        raise TaskError(
            f"{path} gave no tasks: {type(error).__name__}: {error}",
            remedy="It must be importable where the run starts, and be callable without arguments.",
        ) from error
    if not isinstance(given, Iterable):
        raise TaskError(f"{path} gave {type(given).__name__}", remedy="Give a list of Task values or prompt rows.")
    found = []
    for index, each in enumerate(given):
        if isinstance(each, Task):
            found.append(Found(task_id=each.task_id, suite=each.suite, format="python", task=each))
        elif isinstance(each, dict):
            found.append(prompt_task(each, suite=module, keep=keep))
        else:
            raise TaskError(
                f"{path} gave {type(each).__name__} at place {index}", remedy="Give Task values or prompt rows."
            )
    return found
