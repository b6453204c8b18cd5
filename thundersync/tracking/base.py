"""What a tracker of experiments is told, and the one protocol that each of them implements.

Between `tracker`, in the run's process, and `child`, in one process per tracker: these structs go down its standard
input, one JSON object a line. Knows no tracker.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Comes first, once."""

    name: str
    folder: str
    """Of the run; a tracker writes in a folder of its own below it."""
    project: str
    """How it is called where runs are gathered; empty where a tracker gathers none."""
    config: dict[str, Any]
    first_step: int
    """0, or the commits already made when resumed: what the tracker knows from there on is replaced."""


class Metrics(msgspec.Struct, frozen=True, kw_only=True, tag="metrics"):
    step: int
    """Commits made, this one included: so training and evaluations are over the same axis."""
    at_s: float
    row: dict[str, float | None]
    """None where the value is not finite."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation"):
    step: int
    """Commits that the policy it judged had learned from."""
    at_s: float
    row: dict[str, float | None]


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag="finish"):
    """Comes last; a tracker that hears the end of its input without it belongs to a run that was killed."""


Told: TypeAlias = Start | Metrics | Evaluation | Finish


class Sink(Protocol):
    """A tracker. Any call may block or raise: it has a process to itself, and nobody waits for it."""

    def start(self, config: dict[str, Any], run: Start) -> None:
        """Once, before everything else."""

    def metrics(self, step: int, row: dict[str, float], at_s: float) -> None:
        """A commit's row, the `step`-th; values are finite. `at_s` is Unix time."""

    def evaluation(self, step: int, row: dict[str, float], at_s: float) -> None:
        """An evaluation's row, after `step` commits."""

    def finish(self) -> None:
        """Once, last; everything is to be on disk, or sent, when it returns."""


def own_folder(run: Start, name: str) -> Path:
    """The tracker's folder in the run's, made if it is missing."""
    folder = Path(run.folder) / name
    folder.mkdir(exist_ok=True)
    return folder
