"""Other splits of the same devices between generating and learning, and what else would change a step's time.

All over the steps of a run: a mean of forecasts is compared with a mean of forecasts, never with one lucky step.
"""

import statistics
from collections.abc import Callable, Sequence

from msgspec import Struct, structs

from thundersync.forecast.change import fewer_turns, generated_by, spread_by
from thundersync.forecast.simulate import Arm, simulate
from thundersync.forecast.trace import StepTrace

AS_GOOD = 1.005


class Split(Struct, frozen=True, kw_only=True):
    """So many devices that generate and that learn, and the mean step under them."""

    engines: int
    trainers: int
    step_s: float
    engine_busy: float
    trainer_busy: float


class WhatIf(Struct, frozen=True, kw_only=True):
    """One change and the mean step under it."""

    change: str
    step_s: float
    speedup: float
    """Of `stream` over `lazy` under the same change."""


def mean_step(traces: Sequence[StepTrace], arm: Arm) -> float:
    """Seconds."""
    return statistics.fmean(simulate(trace, arm).step_s for trace in traces)


def split_of(traces: Sequence[StepTrace], arm: Arm, *, engines: int, trainers: int) -> Split:
    """The steps with these numbers of devices.

    Assumed: generating as in `change.generated_by`; each trainer device works one pass at a time, as fast as before;
    commit and publish take what they took, although more owners make an optimizer step shorter; memory is enough.
    """
    forecasts = [simulate(generated_by(trace, engines), arm, workers=trainers) for trace in traces]
    return Split(
        engines=engines,
        trainers=trainers,
        step_s=statistics.fmean(forecast.step_s for forecast in forecasts),
        engine_busy=statistics.fmean(forecast.engine_busy for forecast in forecasts),
        trainer_busy=statistics.fmean(forecast.trainer_busy for forecast in forecasts),
    )


def splits(traces: Sequence[StepTrace], arm: Arm, *, unit: int = 1) -> list[Split]:
    """Every split of the devices that the steps had, engines in multiples of `unit` (tensor parallel); best first.

    Of those that are as good as the best, the one that moves the fewest devices.
    """
    devices = traces[0].engines + traces[0].workers
    found = [
        split_of(traces, arm, engines=engines, trainers=devices - engines) for engines in range(unit, devices, unit)
    ]
    enough_s = AS_GOOD * min((split.step_s for split in found), default=0.0)
    now = traces[0].engines
    return sorted(found, key=lambda split: (max(enough_s, split.step_s), abs(split.engines - now)))


def one_more(traces: Sequence[StepTrace], arm: Arm, *, unit: int = 1) -> list[Split]:
    """One engine more, and one trainer more."""
    engines, trainers = traces[0].engines, traces[0].workers
    return [
        split_of(traces, arm, engines=engines + unit, trainers=trainers),
        split_of(traces, arm, engines=engines, trainers=trainers + 1),
    ]


def what_ifs(traces: Sequence[StepTrace], arm: Arm) -> list[WhatIf]:
    """What dispersion, turns and an earlier release are worth."""
    changes: list[tuple[str, Callable[[StepTrace], StepTrace]]] = [
        ("releases twice as spread before the last one", lambda trace: spread_by(trace, 2.0)),
        ("releases half as spread before the last one", lambda trace: spread_by(trace, 0.5)),
        ("a quarter fewer turns", lambda trace: fewer_turns(trace, 0.75)),
    ]
    if arm == "stream" and any(_may_hold(trace) for trace in traces):
        changes.append(('stream.release = "content"', lambda trace: structs.replace(trace, holds=True)))
    found = []
    for text, change in changes:
        changed = [change(trace) for trace in traces]
        step_s, lazy_s = mean_step(changed, arm), mean_step(changed, "lazy")
        found.append(WhatIf(change=text, step_s=step_s, speedup=lazy_s / mean_step(changed, "stream")))
    return found


def _may_hold(trace: StepTrace) -> bool:
    """Its checkers took time in which backwards could have run, and did not."""
    return not trace.holds and any(
        rollout.content_s is not None and rollout.content_s < rollout.release_s for rollout in trace.rollouts
    )
