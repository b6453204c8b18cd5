"""What a loader found: a task, or why there is none. Between the formats' readers and whoever wants tasks or a report.

Refuses to know any format. Every fault is a sentence that begins with the file or key it is about.
"""

from collections.abc import Iterable

from msgspec import Struct

from thundersync.core.types import Task
from thundersync.errors import TaskError

_SHOWN_FAULTS = 40


class Found(Struct, frozen=True, kw_only=True):
    """One task of some format, usable or not."""

    task_id: str
    suite: str
    format: str
    task: Task | None
    faults: list[str] = []

    @property
    def key(self) -> str:
        """Unlike the id, unique among several sets."""
        return f"{self.suite}/{self.task_id}"


def usable(path: str, found: Iterable[Found]) -> list[Task]:
    """All tasks. Raises: TaskError with every fault of every task that is not usable."""
    tasks: list[Task] = []
    faults: list[str] = []
    for each in found:
        faults += [f"{each.task_id}/{fault}" for fault in each.faults]
        if each.task is not None:
            tasks.append(each.task)
    if faults:
        raise TaskError(
            listed(f"{path} holds tasks that cannot be used", faults),
            remedy="Complete them, or name some: env.ids, env.checked, or a task_filter.txt beside task folders.",
        )
    return tasks


def escaped(text: str) -> str:
    """`text` with what cannot be written as UTF-8, such as bytes of a file's name that are none, escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def listed(head: str, faults: list[str]) -> str:
    """`head`, and the faults below it, the first forty."""
    shown = [f"  {fault}" for fault in faults[:_SHOWN_FAULTS]]
    if len(faults) > _SHOWN_FAULTS:
        shown.append(f"  and {len(faults) - _SHOWN_FAULTS} more")
    return "\n".join([head + ":", *shown])
