"""Each measured step beside the lazy one of the same work: its speed-up, and what was forecast of it.

The forecast of an arm is made from the lazy step alone: when its rewards landed, what its passes took. Nothing of the
arm itself goes into it. Its *own* forecast, from its own rewards and passes, leaves only what the schedule lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, structs

from thundersync.bench.arms import Measured
from thundersync.config import BenchArm
from thundersync.forecast import Arm, StepTrace, simulate
from thundersync.forecast.recorded import read_traces
from thundersync.placement import Placement

FORECAST: dict[BenchArm, Arm] = {"stream": "stream", "group": "group", "colocated": "colocated"}
OWN: dict[BenchArm, Arm] = {"stream": "stream", "group": "group", "lazy": "lazy", "colocated": "lazy"}
"""A colocated step's trace has its own devices already."""


class Pair(Struct, frozen=True, kw_only=True):
    """One repeat of an arm, and the lazy step of the same work beside it. None: the arm has no forecast."""

    arm: BenchArm
    number: int
    step_s: float
    lazy_s: float
    speedup: float
    forecast_s: float | None = None
    error: float | None = None
    """By which share the step exceeded that."""
    forecast_speedup: float | None = None
    speedup_error: float | None = None
    """How far the speed-up was from that, as a share."""
    own_forecast_s: float | None = None
    own_error: float | None = None


def pairs_of(steps: Mapping[BenchArm, Sequence[Measured]], rules: StepTrace) -> list[Pair]:
    """In order of arms and replays; none without a lazy arm."""
    if "lazy" not in steps:
        return []
    lazy = {step.number: step for step in steps["lazy"]}
    recorded = traces(steps["lazy"], rules)
    return [
        _pair(step, lazy[step.number], recorded.get(step.number), own.get(step.number))
        for arm, of_arm in steps.items()
        if arm != "lazy"
        for own in [traces(of_arm, rules)]
        for step in of_arm
    ]


def engine_devices(placement: Placement, engines: int) -> int:
    """Devices that generate, each as large as a trainer worker: on cores that is as many as it has."""
    if placement.on_gpus:
        return engines
    learning = {cpu for place in placement.trainers for cpu in place.cpus}
    return max(1, round(len(placement.engine.cpus) * len(placement.trainers) / len(learning)))


def traces(steps: Sequence[Measured], rules: StepTrace) -> dict[int, StepTrace]:
    """Of one arm's steps, by replay; what passes cost is told from all of them together.

    Its own crew is what worked them: a colocated one has a single worker, however many the run has."""
    rules = structs.replace(rules, workers=len(steps[0].timeline.passes))
    read = read_traces([event for step in steps for event in step.events], rules)
    return {trace.step: trace for trace in read.steps}


def _pair(step: Measured, lazy: Measured, recorded: StepTrace | None, own: StepTrace | None) -> Pair:
    speedup = lazy.step_s / step.step_s
    pair = Pair(arm=step.arm, number=step.number, step_s=step.step_s, lazy_s=lazy.step_s, speedup=speedup)
    if step.arm not in FORECAST or recorded is None or own is None:
        return pair
    forecast_s = simulate(recorded, FORECAST[step.arm]).step_s
    own_s = simulate(own, OWN[step.arm]).step_s
    forecast_speedup = simulate(recorded, "lazy").step_s / forecast_s
    return Pair(
        arm=step.arm,
        number=step.number,
        step_s=step.step_s,
        lazy_s=lazy.step_s,
        speedup=speedup,
        forecast_s=forecast_s,
        error=step.step_s / forecast_s - 1.0,
        forecast_speedup=forecast_speedup,
        speedup_error=abs(forecast_speedup / speedup - 1.0),
        own_forecast_s=own_s,
        own_error=step.step_s / own_s - 1.0,
    )
