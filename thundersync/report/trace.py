"""A step, or a whole run, as Chrome trace events: what Perfetto (ui.perfetto.dev) and chrome://tracing open.

Takes timelines, gives the events of one JSON file. Processes of the trace are the engines, the groups, the teacher, the
trainer and the step itself; their threads are replicas, rollouts, workers. On one thread slices never overlap, whatever
the run's events say. Format: "Trace Event Format" (Google, 2016): X = a slice, C = a counter, i = an instant, M = a
name; times are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec

from thundersync.report.timeline import StepTimeline, running

T = TypeVar("T")
TraceEvent: TypeAlias = dict[str, Any]
STEPS, ENGINES, TRAINER, TEACHER, GROUPS = 1, 2, 3, 4, 100
"""Process ids of the trace; group i of a step is process `GROUPS` + i."""
CLOSE = 100_000
"""Thread id of a group's close, beyond all its rollouts."""
NAMES = {
    "prepare": "sandbox",
    "generate": "generation",
    "tool": "tool",
    "score": "scoring",
    "queue": "waiting for the trainer",
    "retry": "pause before another attempt",
    "teacher": "teacher",
}


def write_trace(timelines: Iterable[StepTimeline], path: Path) -> int:
    """Write the trace event by event, so that a whole run needs the memory of one step; returns the events written."""
    count, names = 0, _Names()
    draft = path.with_name(f".{path.name}.tmp")
    with draft.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for timeline in timelines:
            for event in trace_events(timeline, names):
                file.write((b",\n" if count else b"") + msgspec.json.encode(event))
                count += 1
        file.write(b"\n]}\n")
    draft.replace(path)
    return count


def trace_events(timeline: StepTimeline, names: _Names | None = None) -> Iterator[TraceEvent]:
    """A step's events, at Unix time in microseconds; those of one thread are in the order of time."""
    names = names or _Names()
    at_us = int(timeline.opened_s * 1e6)
    yield from _step(timeline, names, at_us)
    yield from names.process(ENGINES, "engines")
    for engine, spans in timeline.engines.items():
        for at_s, count in running(spans):
            counter = {"ph": "C", "pid": ENGINES, "tid": engine, "name": f"engine {engine}: turns being generated"}
            yield counter | {"ts": at_us + _us(at_s), "args": {"turns": count}}
    yield from names.process(TRAINER, "trainer")
    for worker, passes in sorted(timeline.workers.items()):
        yield from names.thread(TRAINER, worker, f"worker {worker}")
        for start, length, work in _apart((work.start_s, work.end_s, work) for work in passes):
            name = f"pass over {len(work.rollout_ids)} rollout{'s' * (len(work.rollout_ids) != 1)}"
            arguments = {"tokens": work.tokens, "rollouts": work.rollout_ids}
            yield _slice(TRAINER, worker, name, at_us + start, length, "backward", arguments)
    yield from _teacher(timeline, names, at_us)
    yield from _groups(timeline, names, at_us)


def _step(timeline: StepTimeline, names: _Names, at_us: int) -> Iterator[TraceEvent]:
    yield from names.process(STEPS, "steps")
    yield from names.thread(STEPS, 0, "steps")
    name = f"step {timeline.step + 1}{'' if timeline.committed else ', never committed'}"  # as people count
    arguments = {"policy_version": timeline.policy_version, "rollouts": len(timeline.lanes)}
    yield _slice(STEPS, 0, name, at_us, _us(timeline.seconds), "step", arguments)
    yield from names.thread(STEPS, 1, "commit and publish")
    phases = [("commit", timeline.commit), ("publish", timeline.publish)]
    for start, length, name in _apart((*span, name) for name, span in phases if span is not None):
        yield _slice(STEPS, 1, name, at_us + start, length, "commit", {})


def _groups(timeline: StepTimeline, names: _Names, at_us: int) -> Iterator[TraceEvent]:
    index = {group.group_id: number for number, group in enumerate(timeline.groups)}
    for lane in timeline.lanes:
        process = GROUPS + index[lane.group_id]
        yield from names.process(process, f"group {index[lane.group_id]}: rollouts and their sandboxes")
        member = int(lane.rollout_id.rpartition("-")[2])
        yield from names.thread(process, member, f"rollout {member}")
        for start, length, span in _apart((span.start_s, span.end_s, span) for span in lane.spans):
            arguments = {"rollout": lane.rollout_id, "task": lane.task_id, "note": span.note}
            yield _slice(process, member, NAMES[span.kind], at_us + start, length, span.kind, arguments)
    for group in timeline.groups:
        if group.closed_s is not None:
            process, how = GROUPS + index[group.group_id], "flat" if group.flat else "dropped" if group.dropped else ""
            yield from names.thread(process, CLOSE, "close")
            instant = {"ph": "i", "s": "p", "pid": process, "tid": CLOSE, "ts": at_us + _us(group.closed_s)}
            yield instant | {"name": f"group closes{f' ({how})' if how else ''}"}


def _teacher(timeline: StepTimeline, names: _Names, at_us: int) -> Iterator[TraceEvent]:
    """Requests run side by side: each goes to the first row that is free."""
    asked = sorted((span.start_s, span.end_s, lane, span) for lane in timeline.lanes for span in lane.teacher)
    free: list[int] = []
    for start_s, end_s, lane, span in asked:
        start, end = _us(start_s), _us(end_s)
        row = next((row for row, until in enumerate(free) if until <= start), len(free))
        free[row : row + 1] = [end]
        yield from names.process(TEACHER, "teacher")
        yield from names.thread(TEACHER, row, f"request {row}")
        arguments = {"rollout": lane.rollout_id, "note": span.note}
        yield _slice(TEACHER, row, NAMES["teacher"], at_us + start, end - start, "teacher", arguments)


def _apart(spans: Iterable[tuple[float, float, T]]) -> Iterator[tuple[int, int, T]]:
    """(start, length, what) in microseconds, in order and never one over another: a later one ends its predecessor."""
    ordered = sorted(((_us(start), _us(end), what) for start, end, what in spans), key=lambda span: span[:2])
    for (start, end, what), following in zip_longest(ordered, ordered[1:]):
        length = (end if following is None else min(end, following[0])) - start
        if length > 0:
            yield start, length, what


def _slice(
    process: int, thread: int, name: str, at_us: int, length_us: int, category: str, arguments: dict[str, Any]
) -> TraceEvent:
    place = {"ph": "X", "pid": process, "tid": thread, "ts": at_us, "dur": length_us}
    return place | {"name": name, "cat": category, "args": arguments}


def _us(seconds: float) -> int:
    return int(seconds * 1e6)


class _Names:
    """Processes and threads are named once in a file, and shown in the order of their ids."""

    def __init__(self) -> None:
        self._told: set[tuple[int, int]] = set()

    def process(self, process: int, name: str) -> Iterator[TraceEvent]:
        yield from self._name(process, -1, name)

    def thread(self, process: int, thread: int, name: str) -> Iterator[TraceEvent]:
        yield from self._name(process, thread, name)

    def _name(self, process: int, thread: int, name: str) -> Iterator[TraceEvent]:
        if (process, thread) in self._told:
            return
        self._told.add((process, thread))
        what, order = ("process", process) if thread < 0 else ("thread", thread)
        place = {"ph": "M", "pid": process, "tid": max(thread, 0), "ts": 0}
        yield place | {"name": f"{what}_name", "args": {"name": name}}
        yield place | {"name": f"{what}_sort_index", "args": {"sort_index": order}}
