"""A step's trace under one arm: the clock and the workers of a discrete-event simulation.

| arm | learning |
|---|---|
| `stream` | a piece may start once it is released |
| `group` | a group's pieces may start once its last piece is released |
| `lazy` | all pieces may start once the step's last piece is released |
| `colocated` | all devices generate, then all learn: `lazy` with more workers and sooner releases |

Work of zero advantage is skipped in every arm as soon as it is known to be that; commit and publish follow the last
backward in every arm. What is worked next is decided by the run's own queue (`books`).
"""

import heapq
from typing import Literal, TypeAlias

from msgspec import Struct

from thundersync.core.types import StreamMode
from thundersync.forecast.books import Book, Job, JobKind, RewardBook, TurnBook
from thundersync.forecast.change import generated_by
from thundersync.forecast.trace import StepTrace, UnusableTrace, check_trace

Arm: TypeAlias = Literal["stream", "group", "lazy", "colocated"]


class Interval(Struct, frozen=True, kw_only=True):
    """What a worker did, from when to when, in seconds since the step opened."""

    worker: int
    what: JobKind | Literal["commit"]
    start_s: float
    end_s: float
    rollout_ids: list[str]
    """Of a closing: its groups."""


class StepForecast(Struct, frozen=True, kw_only=True):
    """What a step would take."""

    arm: Arm
    step_s: float
    released_s: float
    """The last piece was released; after it nothing is generated."""
    learned_s: float
    """The last backward ended; commit and publish follow."""
    workers: int
    passes: int
    busy_s: list[float]
    """Of each worker, passes and closings."""
    wasted_s: float
    """Of that, on pieces that turned out to weigh nothing, summed over workers."""
    trainer_busy: float
    """Share of the step that the trainer devices work, the commit included, as the run's metric of that name."""
    engine_busy: float
    """Share of the step in which engines still have something to generate; colocated, of the shared devices."""
    intervals: list[Interval]

    @property
    def trainer_idle(self) -> float:
        return 1.0 - self.trainer_busy

    @property
    def engine_idle(self) -> float:
        return 1.0 - self.engine_busy


def simulate(trace: StepTrace, arm: Arm, *, workers: int | None = None) -> StepForecast:
    """What the step takes under `arm` with `workers` trainer devices (the trace's own by default).

    Deterministic. Raises: UnusableTrace.
    """
    check_trace(trace)
    if arm == "colocated":
        devices = trace.engines + (trace.workers if workers is None else workers)
        trace, workers = generated_by(trace, devices), devices
    count = trace.workers if workers is None else workers
    mode: StreamMode = "lazy" if arm == "colocated" else arm
    book: Book = (TurnBook if trace.distils else RewardBook)(trace, mode=mode, workers=count)
    intervals = _run(book, count)
    learned_s = max([trace.released_s, *(interval.end_s for interval in intervals)])
    busy_s = [sum(i.end_s - i.start_s for i in intervals if i.worker == worker) for worker in range(count)]
    step_s = learned_s + trace.after_s
    wasted = set(book.wasted())
    whole_s = step_s or 1.0
    commits = [
        Interval(worker=w, what="commit", start_s=learned_s, end_s=learned_s + trace.commit_s, rollout_ids=[])
        for w in range(count if trace.commit_s else 0)
    ]
    return StepForecast(
        arm=arm,
        step_s=step_s,
        released_s=trace.released_s,
        learned_s=learned_s,
        workers=count,
        passes=sum(interval.what != "close" for interval in intervals),
        busy_s=busy_s,
        wasted_s=sum(rollout.cost_s for rollout in trace.rollouts if rollout.rollout_id in wasted),
        trainer_busy=(sum(busy_s) / count + trace.commit_s) / whole_s,
        engine_busy=min(trace.generated_s, step_s) / whole_s,
        intervals=intervals + commits,
    )


def _run(book: Book, workers: int) -> list[Interval]:
    """Passes and closings in the order in which they begin. Raises: UnusableTrace when the queue gets stuck."""
    arrivals = sorted(book.arrivals, key=lambda arrival: -arrival.at_s)
    running: list[tuple[float, int, Job]] = []
    free = set(range(workers))
    intervals = []
    now_s = 0.0
    while True:
        while arrivals and arrivals[-1].at_s <= now_s:
            arrivals.pop().land()
        for worker in sorted(free):
            if (job := book.next(worker)) is not None:
                free.remove(worker)
                end_s = now_s + job.seconds
                heapq.heappush(running, (end_s, worker, job))
                intervals.append(
                    Interval(
                        worker=worker, what=job.what, start_s=now_s, end_s=end_s, rollout_ids=list(job.rollout_ids)
                    )
                )
        coming = [running[0][0]] if running else []
        coming += [arrivals[-1].at_s] if arrivals else []
        if not coming:
            if book.settled:
                return intervals
            raise UnusableTrace(
                f"the schedule of this step gets stuck; it owes {book.owes()}", remedy="Report it with the run folder."
            )
        now_s = min(coming)
        while running and running[0][0] <= now_s:
            _, worker, job = heapq.heappop(running)
            free.add(worker)
            job.done()
