"""The report of `tasks check` as a filter of a run's tasks: what it did not find good is left out, and counted.

Between the formats' readers and a run. Only `ok` counts: of a task that needs root, or has no solution to try, nobody
knows that an agent, an ordinary user, can solve it. Refuses to check anything.
"""

from collections import Counter, defaultdict
from pathlib import Path

from thundersync.errors import TaskError
from thundersync.tasks.check import TaskReport
from thundersync.tasks.found import Found
from thundersync.tasks.report import read_report


class CheckedTasks:
    """One report. `passes` is asked of each task once, `left_out` then tells what became of those that do not pass."""

    def __init__(self, path: str) -> None:
        """Raises: TaskError for a file that cannot be read or is no report."""
        file = Path(path).expanduser()
        try:
            reports = read_report(file)
        except OSError as error:
            raise TaskError(
                f"env.checked: {path} cannot be read: {error}",
                remedy=f"Make it: python -m thundersync tasks check PATH --json {path}",
            ) from error
        self._by_key = {each.key: each for each in reports}
        self._by_name = defaultdict[str, list[TaskReport]](list)
        for each in self._by_key.values():
            self._by_name[_name(each.key)].append(each)
        self._left_out: Counter[str] = Counter()
        self.stand_ins: set[str] = set()
        """Images that took the place of the own ones of tasks that passed."""
        self.baked = False
        """Whether tasks passed whose checkers' tools were baked in."""

    def passes(self, found: Found) -> bool:
        report = self._report(found)
        if report is None or report.state != "ok":
            self._left_out[report.state if report is not None else "not in it"] += 1
            return False
        self.baked |= report.baked
        if report.stand_in:
            self.stand_ins.add(report.stand_in)
        return True

    def _report(self, found: Found) -> TaskReport | None:
        """A set may be a part of what was checked, or have been checked file by file: then its name is another one.
        Of several reports on tasks of this id it is one that is not good, if any is.
        """
        if (known := self._by_key.get(found.key)) is not None:
            return known
        alike = [each for each in self._by_name[_name(found.key)] if each.key.endswith(f"/{found.task_id}")]
        return next((each for each in alike if each.state != "ok"), alike[0] if alike else None)

    @property
    def left_out(self) -> str:
        """E.g. `2 unsolved, 1 not in it`; empty if all have passed."""
        return ", ".join(f"{count} {state}" for state, count in self._left_out.most_common())


def _name(key: str) -> str:
    return key.rpartition("/")[2]
