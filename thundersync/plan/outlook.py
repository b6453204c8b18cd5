"""Everything a plan says of recorded steps, as numbers: what was measured, what was forecast, what would change it."""

import statistics
from collections.abc import Sequence

from msgspec import Struct

from thundersync.forecast.bound import bound
from thundersync.forecast.change import even_costs
from thundersync.forecast.path import Part, critical_path
from thundersync.forecast.simulate import Arm, StepForecast, simulate
from thundersync.forecast.split import Split, WhatIf, one_more, splits, what_ifs
from thundersync.forecast.trace import StepTrace
from thundersync.monitor.events import RunStarted
from thundersync.plan.runs import RecordedRun

MOST_ROLLOUTS, MOST_CHANGED = 6000, 1500
"""Of the steps that are simulated in every arm, and of those that are under every change: a plan takes seconds, or a
minute or two where steps have a thousand rollouts."""
ARMS: tuple[Arm, ...] = ("lazy", "group", "stream", "colocated")


class ArmOutlook(Struct, frozen=True, kw_only=True):
    """Means over the steps."""

    step_s: float
    speedup: float
    """Over `lazy`."""
    trainer_busy: float
    engine_busy: float
    wasted_s: float
    """Worked on pieces that turned out to weigh nothing."""


class Outlook(Struct, frozen=True, kw_only=True):
    """Of the steps of one run; seconds are means over them."""

    run: str
    mode: Arm
    """The arm that was run."""
    steps: int
    """Looked at, evenly spread over the `usable` ones."""
    usable: int
    warmup: int
    left_out: list[str]
    engines: int
    trainers: int
    on_gpus: bool
    measured_s: float
    forecast_s: float
    behind: float
    """By which share the measured steps exceed their forecast, over all steps together."""
    error: float
    """Mean over steps of |measured / forecast - 1|."""
    even_error: float
    """The same for a forecast that gives every token the run's mean cost."""
    pass_error: float
    """Of the formula of a pass's cost, over the run's passes."""
    bound_s: float
    arms: dict[Arm, ArmOutlook]
    path: dict[Part, float]
    """What the step waited for, in seconds that add up to its forecast."""
    limit: Part
    """The longest of them."""
    sampled: int
    """How many of the steps, evenly spread, everything below was told from."""
    splits: list[Split]
    """Of the same number of devices, best first; none where a worker has several cores, for which no one core of an
    engine can be exchanged."""
    more: list[Split]
    """One engine more, and one trainer more."""
    what_ifs: list[WhatIf]


def look(run: RecordedRun) -> Outlook:
    """Simulates each step under every arm and change. Raises: UnusableTrace."""
    steps, started = _sample(run.steps, MOST_ROLLOUTS), run.traces.started
    mode: Arm = run.config.stream.mode
    forecasts = {arm: [simulate(step, arm) for step in steps] for arm in ARMS}
    planned = [forecast.step_s for forecast in forecasts[mode]]
    lazy_s = statistics.fmean(forecast.step_s for forecast in forecasts["lazy"])
    measured_s = statistics.fmean(step.measured_s for step in steps)
    forecast_s = statistics.fmean(planned)
    sample = _sample(steps, MOST_CHANGED)
    unit = run.config.engine.tensor_parallel_size
    paths = [critical_path(step, found) for step, found in zip(steps, forecasts[mode], strict=True)]
    path = {part: statistics.fmean(each[part] for each in paths) for part in paths[0]}
    return Outlook(
        run=run.folder.name,
        mode=mode,
        steps=len(steps),
        usable=len(run.steps),
        warmup=run.warmup,
        left_out=run.traces.left_out,
        engines=steps[0].engines,
        trainers=steps[0].workers,
        on_gpus=started is not None and started.on_gpus,
        measured_s=measured_s,
        forecast_s=forecast_s,
        behind=measured_s / forecast_s - 1.0,
        error=_error(steps, planned),
        even_error=_error(steps, [simulate(step, mode).step_s for step in even_costs(steps)]),
        pass_error=run.traces.cost.error if run.traces.cost is not None else 0.0,
        bound_s=statistics.fmean(bound(step) for step in steps),
        arms={arm: _arm(found, lazy_s) for arm, found in forecasts.items()},
        path=path,
        limit=max(path, key=lambda part: path[part]),
        sampled=len(sample),
        splits=splits(sample, mode, unit=unit) if _exchangeable(started) else [],
        more=one_more(sample, mode, unit=unit),
        what_ifs=what_ifs(sample, mode),
    )


def _sample(steps: Sequence[StepTrace], most_rollouts: int) -> list[StepTrace]:
    """At least one of them, evenly spread."""
    rollouts = statistics.fmean(len(step.rollouts) for step in steps)
    count = min(len(steps), max(1, int(most_rollouts / rollouts)))
    return [steps[index * len(steps) // count] for index in range(count)]


def _exchangeable(started: RunStarted | None) -> bool:
    return started is None or started.on_gpus or started.trainer_devices == started.trainer_workers


def _arm(forecasts: Sequence[StepForecast], lazy_s: float) -> ArmOutlook:
    step_s = statistics.fmean(forecast.step_s for forecast in forecasts)
    return ArmOutlook(
        step_s=step_s,
        speedup=lazy_s / step_s,
        trainer_busy=statistics.fmean(forecast.trainer_busy for forecast in forecasts),
        engine_busy=statistics.fmean(forecast.engine_busy for forecast in forecasts),
        wasted_s=statistics.fmean(forecast.wasted_s for forecast in forecasts),
    )


def _error(steps: Sequence[StepTrace], forecasts: Sequence[float]) -> float:
    return statistics.fmean(
        abs(step.measured_s / forecast - 1.0) for step, forecast in zip(steps, forecasts, strict=True)
    )
