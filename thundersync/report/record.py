"""A run as its folder tells it: read once, in order, keeping what a report needs and where each step's events lie.

Between the files of a run and everything that is drawn of it. Events of turns and commands, nearly all of a big run,
are passed over here: `step_events` reads those of one step when they are asked for, so memory follows the number of
rollouts and never that of events. Knows nothing of pages, charts or traces.
"""

from __future__ import annotations

import contextlib
import math
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from thundersync.errors import ThundersyncError
from thundersync.monitor.events import (
    AnyEvent,
    Audited,
    EvalFinished,
    RolloutFailed,
    RolloutScored,
    RunFinished,
    RunStarted,
    StepCommitted,
    StepOpened,
    Warned,
    from_line,
)

PASSED_OVER = frozenset(
    b"turn_started turn_generated turn_aborted tool_started tool_finished turn_scored scoring_started rollout_started "
    b"pass_started pass_done rollout_skipped group_closed gauges".split()
)
"""Kinds that only a step's own timeline needs."""
MOST_TEXTS = 200
"""Distinct warnings, and examples of failures, that are kept."""


class NoRun(ThundersyncError):
    """A folder holds no run that could be reported on."""


class ReportTooLong(ThundersyncError):
    """Reading the run took longer than it was given."""


class ScoredRollout(msgspec.Struct, frozen=True):
    """What the choice of rollouts to show needs."""

    rollout_id: str
    task_id: str
    reward: float
    turns: int
    stop: str


@dataclass
class StepRecord:
    """One step: where its events lie in `events.jsonl`, and what it came to."""

    opened: StepOpened
    begin: int
    """Bytes before its first event."""
    end: int
    """Bytes before the first event that is not its own; the file's end for a step that was never committed."""
    committed: StepCommitted | None = None
    scored: list[ScoredRollout] = field(default_factory=list)
    failed: int = 0
    """Rollouts that failed for good."""


class Evaluation(msgspec.Struct, frozen=True):
    """One evaluation, and how many steps the policy it judged had learned from."""

    after: int
    finished: EvalFinished


@dataclass
class Failure:
    """All failures of one kind."""

    attempts: int = 0
    final: int = 0
    """Of them, those that were not tried again."""
    details: Counter[str] = field(default_factory=Counter)
    example: str = ""
    """Id of the first rollout it happened to."""


@dataclass
class RunRecord:
    """A run, live or over."""

    folder: Path
    name: str
    """As a reader is told it: the folder's, with its parent's where two runs have the same."""
    started: RunStarted | None = None
    """The latest start."""
    finished: RunFinished | None = None
    began_s: float = 0.0
    ended_s: float = 0.0
    """Unix times of the first and the last event."""
    starts: int = 0
    steps: dict[int, StepRecord] = field(default_factory=dict)
    evals: list[Evaluation] = field(default_factory=list)
    audits: list[Audited] = field(default_factory=list)
    failures: dict[str, Failure] = field(default_factory=dict)
    warnings: Counter[str] = field(default_factory=Counter)
    unreadable: int = 0
    """Lines of `events.jsonl` that could not be read, e.g. one that a killed run left torn."""
    rows: dict[int, dict[str, float]] = field(default_factory=dict)
    """By step: its metrics, as committed."""
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def commits(self) -> list[StepRecord]:
        """Steps that were committed, in order."""
        return [step for _, step in sorted(self.steps.items()) if step.committed is not None]

    def series(self, metric: str) -> list[tuple[float, float]]:
        """(step, value) of one metric; steps that do not tell it, or not as a finite number, are left out."""
        values = [(float(step), row.get(metric, math.nan)) for step, row in sorted(self.rows.items())]
        return [(step, value) for step, value in values if math.isfinite(value)]


def read_run(folder: Path, *, deadline_s: float = math.inf, clock: Callable[[], float] = time.monotonic) -> RunRecord:
    """Read what `folder` tells, at most until `clock()` is `deadline_s`.

    Raises: NoRun without a readable `events.jsonl`; ReportTooLong.
    """
    record = RunRecord(folder=folder, name=folder.absolute().name)
    try:
        reader = _Reader(record)
        if not (folder / "events.jsonl").is_file():  # a device would be read for ever
            raise FileNotFoundError("there is no file events.jsonl in it")
        with (folder / "events.jsonl").open("rb") as file:
            at = 0
            for number, line in enumerate(file):
                reader.line(line, at)
                at += len(line)
                if not number % 10_000 and clock() > deadline_s:
                    raise ReportTooLong(
                        f"the {(folder / 'events.jsonl').stat().st_size / 2**20:.0f} MiB of {folder}/events.jsonl were "
                        "not read in the time given",
                        remedy=f"Without a limit: python -m thundersync report {folder}",
                    )
            reader.end(at)
    except OSError as error:
        raise NoRun(
            f"{folder} holds no run: {error}",
            remedy="Give the folder of a run, the one with events.jsonl in it, e.g. runs/NAME.",
        ) from error
    if record.started is None and not record.steps and not record.evals:
        raise NoRun(
            f"{folder}/events.jsonl tells of no run that began",
            remedy="See the folder's logs/ for what kept it from starting.",
        )
    record.rows = _rows(record)
    record.config = _config(folder)
    with contextlib.suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
        record.environment = msgspec.json.decode((folder / "environment.json").read_bytes(), type=dict[str, str])
    return record


def step_events(record: RunRecord, step: int) -> Iterator[AnyEvent]:
    """Every event between a step's opening and its commit, in order. Raises: NoRun for a step the run does not have."""
    found = record.steps.get(step)
    if found is None:
        known = f"steps {min(record.steps) + 1} to {max(record.steps) + 1}" if record.steps else "no step at all"
        raise NoRun(f"{record.folder} has no step {step + 1}", remedy=f"It has {known}.")
    with (record.folder / "events.jsonl").open("rb") as file:
        file.seek(found.begin)
        left = found.end - found.begin
        for line in file:
            left -= len(line)
            if left < 0:
                return
            event = _read(line)
            if event is not None:
                yield event


class _Reader:
    """Takes line after line; a resumed run forgets the steps that it makes again."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._open: StepRecord | None = None
        self._tasks: dict[str, str] = {}
        """Of the open step: its groups' tasks."""

    def line(self, line: bytes, at: int) -> None:
        kind = line[9 : line.find(b'"', 9)] if line.startswith(b'{"kind":"') else b""
        if kind in PASSED_OVER:
            return
        event = _read(line)
        if event is None:
            self._record.unreadable += kind == b"" and bool(line.strip())
            return
        record = self._record
        record.began_s = record.began_s or event.at_s
        record.ended_s = max(record.ended_s, event.at_s)
        match event:
            case RunStarted():
                self._start(event, at)
            case StepOpened():
                self._close(at)
                self._open = record.steps[event.step] = StepRecord(opened=event, begin=at, end=at)
                self._tasks = dict(zip(event.group_ids, event.task_ids, strict=False))
            case StepCommitted():
                if self._open is not None and self._open.opened.step == event.step:
                    self._open.committed = event
                    self._close(at + len(line))
            case RolloutScored():
                self._scored(event)
            case RolloutFailed():
                self._failed(event)
            case EvalFinished():
                record.evals.append(Evaluation(self._steps_made(), event))
            case Audited():
                record.audits.append(event)
            case Warned(text=text):
                if text in record.warnings or len(record.warnings) < MOST_TEXTS:
                    record.warnings[text] += 1
            case RunFinished():
                record.finished = event
            case _:
                pass

    def end(self, at: int) -> None:
        self._close(at)

    def _start(self, event: RunStarted, at: int) -> None:
        self._close(at)
        record = self._record
        record.started, record.finished = event, None
        record.starts += 1
        for step in [step for step in record.steps if step >= event.start_step]:
            del record.steps[step]
        record.evals = [each for each in record.evals if each.after <= event.start_step]
        record.audits = [each for each in record.audits if each.step < event.start_step]

    def _steps_made(self) -> int:
        begun = self._record.started.start_step if self._record.started is not None else 0
        return max([begun, *(step + 1 for step, found in self._record.steps.items() if found.committed is not None)])

    def _close(self, at: int) -> None:
        if self._open is not None:
            self._open.end = at
            self._open = None

    def _scored(self, event: RolloutScored) -> None:
        if (task := self._task(event.group_id)) is not None and self._open is not None:
            reward = event.reward
            self._open.scored.append(ScoredRollout(event.rollout_id, task, reward, event.turns, event.stop))

    def _failed(self, event: RolloutFailed) -> None:
        failure = self._record.failures.setdefault(event.failure, Failure(example=event.rollout_id))
        failure.attempts += 1
        failure.final += not event.will_retry
        detail = event.detail[:500]
        if detail in failure.details or len(failure.details) < MOST_TEXTS:
            failure.details[detail] += 1
        if not event.will_retry and self._open is not None and self._task(event.group_id) is not None:
            self._open.failed += 1

    def _task(self, group_id: str) -> str | None:
        """The task of a group of the open step; None for an evaluation's."""
        return self._tasks.get(group_id) if self._open is not None else None


def _read(line: bytes) -> AnyEvent | None:
    with contextlib.suppress(msgspec.DecodeError):  # torn, or of a newer schema
        return from_line(line)
    return None


def _rows(record: RunRecord) -> dict[int, dict[str, float]]:
    """The commits' metrics, and what `metrics.jsonl` adds to them."""
    rows = {step.opened.step: dict(step.committed.metrics) for step in record.commits if step.committed is not None}
    with contextlib.suppress(OSError):
        for line in (record.folder / "metrics.jsonl").read_bytes().splitlines():
            with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError, ValueError):
                row = msgspec.json.decode(line)
                known = rows.get(int(row["step"]))
                if known is not None:
                    known.update({name: float(value) for name, value in row.items() if isinstance(value, int | float)})
    return rows


def _config(folder: Path) -> dict[str, Any]:
    """The resolved configuration, by dotted key; empty where there is none."""
    with contextlib.suppress(OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        return dict(_dotted(tomllib.loads((folder / "config.toml").read_text()), ""))
    return {}


def _dotted(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _dotted(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for index, inner in enumerate(value):
            yield from _dotted(inner, f"{name}[{index}]")
    else:
        yield name, value
