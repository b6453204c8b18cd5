"""The next step's sandboxes, started while this step finishes; and what sandboxes cost, as figures.

Reads the step off its events: once every rollout of it has a sandbox, each one that ends makes room for one of the
next step's. There are never more of them than `most`, lent and waiting together. Knows nothing of what runs in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sandboxes import Pool, SandboxSpec
from thundersync.core.types import RolloutId, Task, rollout_id
from thundersync.monitor.events import (
    AnyEvent,
    RolloutFailed,
    RolloutScored,
    RolloutStarted,
    SandboxGauge,
    StepCommitted,
    StepOpened,
)

TOLD = ("start", "command", "close")


class Ahead:
    """Sees every event of a run."""

    def __init__(
        self,
        pool: Pool,
        *,
        tasks_of: Callable[[int], Sequence[Task]],
        spec_of: Callable[[Task], SandboxSpec],
        group_size: int,
        steps: int,
        most: int,
    ) -> None:
        """`tasks_of` gives a step's tasks, `spec_of` the sandbox of one; `steps` is how many the run has."""
        self._pool = pool
        self._tasks_of = tasks_of
        self._spec_of = spec_of
        self._group_size = group_size
        self._steps = steps
        self._most = most
        self._waiting: set[RolloutId] = set()
        self._live: set[RolloutId] = set()
        self._specs: list[SandboxSpec] | None = None
        """Of the next step, once they were asked for."""
        self._next = 0

    def see(self, event: AnyEvent) -> None:
        """Take one event. Never waits."""
        match event:
            case StepOpened():
                groups = event.group_ids
                self._waiting = {rollout_id(group, i) for group in groups for i in range(event.group_size)}
                self._live.clear()
                self._specs, self._next = None, event.step + 1
            case RolloutStarted():
                self._live.add(event.rollout_id)
                self._waiting.discard(event.rollout_id)
                self._prepare()
            case RolloutScored() | RolloutFailed():
                self._live.discard(event.rollout_id)
                self._prepare()
            case StepCommitted():
                self._live.clear()
                self._prepare()
            case _:
                pass

    def _prepare(self) -> None:
        if self._waiting or self._next == 0 or self._next >= self._steps:
            return
        if self._specs is None:
            tasks = self._tasks_of(self._next)
            self._specs = [self._spec_of(task) for task in tasks for _ in range(self._group_size)]
        # Also where there is less room than before, as in an evaluation between two steps: the rest is given up.
        self._pool.prepare_ahead(self._specs[: max(0, self._most - len(self._live))])


def sandbox_metrics(pool: Pool) -> dict[str, float]:
    """For a row of metrics: seconds of the latest calls by kind, and how many sandboxes were there when asked for."""
    metrics = {}
    for kind, latency in pool.latencies().items():
        if kind in TOLD:
            metrics[f"sandbox_{kind}_p50_s"] = latency.p50_s
            metrics[f"sandbox_{kind}_p95_s"] = latency.p95_s
            metrics[f"sandbox_{kind}_failed"] = float(latency.failed)
    state = pool.state()
    return metrics | {
        "sandboxes_from_stock": float(state.from_stock),
        "sandboxes_started_late": float(state.started_late),
    }


def sandbox_gauge(pool: Pool) -> SandboxGauge:
    """For the gauges."""
    state, latencies = pool.state(), pool.latencies()
    p95 = {kind: latencies[kind].p95_s if kind in latencies else 0.0 for kind in TOLD}
    return SandboxGauge(
        ready=state.ready,
        starting=state.starting,
        start_p95_s=p95["start"],
        command_p95_s=p95["command"],
        close_p95_s=p95["close"],
    )
