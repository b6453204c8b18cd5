"""What an evaluation came to, as files for other programs: `results.json`, and `predictions.jsonl` for repairs.

Works on figures and rollouts that are there; runs nothing. Predictions are in SWE-bench's own form, so that its
official harness can judge the same patches again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from thundersync.core.types import Failed, Rollout, Scored, Task
from thundersync.evaluate.figures import METHOD, SuiteFigures, TaskFigures, suite_figures
from thundersync.rundir import write_whole

RESULTS = "results.json"
ALL = "all"


class Report(Struct, frozen=True, kw_only=True):
    """`results.json`."""

    agent: str
    """`policy`, or who took its place: `oracle`, `idle`."""
    model: str
    samples: int
    """Per task."""
    temperature: float
    seed: int
    """Of the intervals' resamples."""
    suites: list[SuiteFigures]
    """One each, and where there are several one of `all` tasks."""
    tasks: list[TaskFigures]
    failures: dict[str, int]
    """Failed samples by kind."""
    method: str = METHOD


def make_report(
    tasks: Sequence[TaskFigures],
    rollouts: Sequence[Rollout],
    *,
    agent: str,
    model: str,
    samples: int,
    temperature: float,
    seed: int,
) -> Report:
    """`tasks` in the order of their suites."""
    by_suite: dict[str, list[TaskFigures]] = {}
    for task in tasks:
        by_suite.setdefault(task.suite, []).append(task)
    suites = [suite_figures(name, each, samples=samples, seed=seed) for name, each in by_suite.items()]
    if len(suites) > 1:
        suites.append(suite_figures(ALL, tasks, samples=samples, seed=seed))
    failures: dict[str, int] = {}
    for rollout in rollouts:
        if isinstance(rollout.outcome, Failed):
            failures[rollout.outcome.reason] = failures.get(rollout.outcome.reason, 0) + 1
    return Report(
        agent=agent,
        model=model,
        samples=samples,
        temperature=temperature,
        seed=seed,
        suites=suites,
        tasks=list(tasks),
        failures=failures,
    )


def write_report(folder: Path, report: Report) -> Path:
    """Write `results.json`; what cannot be told (NaN) is null there."""
    path = folder / RESULTS
    write_whole(path, msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return path


def write_predictions(
    folder: Path, rollouts: Sequence[Rollout], tasks: Mapping[str, Task], *, model: str
) -> list[Path]:
    """The repairs among `rollouts` as SWE-bench's harness reads them, one file per sample of a task; empty if there
    are none. `tasks` are by group. An instance whose sample failed has no line: it was never answered."""
    files: dict[int, list[str]] = {}
    for rollout in rollouts:
        task = tasks[rollout.group_id]
        if task.checker.verdict == "repair" and isinstance(rollout.outcome, Scored):
            line = {
                "instance_id": task.task_id,
                "model_name_or_path": model,
                "model_patch": rollout.outcome.change,
            }
            files.setdefault(int(rollout.rollout_id.rpartition("-")[2]), []).append(json.dumps(line) + "\n")
    paths = []
    for sample, lines in sorted(files.items()):
        path = folder / ("predictions.jsonl" if sample == 0 else f"predictions-{sample}.jsonl")
        write_whole(path, "".join(lines).encode())
        paths.append(path)
    return paths
