"""The report of `tasks check`: JSON lines in a file, which a later check continues, and a table for people."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

import msgspec
from rich.markup import escape
from rich.table import Table

from thundersync.errors import TaskError
from thundersync.tasks.check import GOOD, MEANINGS, TaskReport

_REASON_CHARS = 160
_BEGIN = b'{"key":'
"""Of each line of a report."""


class ReportFile:
    """One JSON object a line, each written as its task ends: what a killed check had found stays found."""

    def __init__(self, path: Path | None, *, again: bool = False) -> None:
        """`again`: of what the file holds, only good answers are kept. Raises: TaskError for another file's content."""
        self._path = path
        self.known: dict[str, TaskReport] = {}
        self._file: TextIO | None = None
        if path is None:
            return
        if path.exists():
            self.known = {each.key: each for each in read_report(path) if not again or each.state in GOOD}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in self.known.values()))
        partial.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def holds(self, key: str, *, runtime: str, stand_in: str, baked: bool = False) -> bool:
        """Whether there is an answer that was found in such sandboxes."""
        known = self.known.get(key)
        return (
            known is not None and known.runtime == runtime and known.stand_in in ("", stand_in) and known.baked == baked
        )

    def add(self, report: TaskReport) -> None:
        self.known[report.key] = report
        if self._file is not None:
            self._file.write(msgspec.json.encode(report).decode() + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_report(path: Path) -> list[TaskReport]:
    """The lines of a report. Raises: OSError, TaskError for another file's content."""
    found = []
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            found.append(msgspec.json.decode(line, type=TaskReport))
        except msgspec.DecodeError as error:
            if number == len(lines) and not line.endswith(b"\n") and (found or line.startswith(_BEGIN[: len(line)])):
                break  # a check was killed while it wrote its last line
            raise TaskError(
                f"{path}, line {number} is no line of a report: {error}", remedy="Give a new file, or remove this one."
            ) from error
    return found


def table(reports: Iterable[TaskReport]) -> Table:
    """All of them, by key."""
    shown = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("task", "state", "empty", "solved", "why"):
        number = name in ("empty", "solved")
        shown.add_column(name, overflow="fold", no_wrap=name != "why", justify="right" if number else "left")
    for each in sorted(reports, key=lambda report: report.key):
        colour = "green" if each.state in GOOD else "yellow" if each.state in ("needs_network", "refused") else "red"
        reason = " ".join(each.reason.split())
        shown.add_row(
            escape(each.key),
            f"[{colour}]{each.state}[/]",
            _number(each.empty),
            _number(each.solved),
            escape(reason[:_REASON_CHARS] + ("..." if len(reason) > _REASON_CHARS else "")),
        )
    return shown


def summary(reports: Iterable[TaskReport]) -> str:
    """How many are in which state, and what that means."""
    counts = Counter(each.state for each in reports)
    return "\n".join(f"{counts[state]:6} {state}: {meaning}" for state, meaning in MEANINGS.items() if counts[state])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"
