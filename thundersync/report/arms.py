"""What the same steps would have taken in another order: the forecasts a report compares a run's own time with.

From the run's recorded steps, through `forecast`; a run of which that cannot be told (too old a configuration, steps
without a pass) gets a reason instead of a number.
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Iterator, Sequence

import msgspec

from thundersync.config import Config
from thundersync.errors import ThundersyncError
from thundersync.forecast import Arm, StepForecast, StepTrace, bound, simulate
from thundersync.forecast.recorded import read_traces
from thundersync.monitor.events import AnyEvent
from thundersync.plan.runs import rules
from thundersync.report.record import RunRecord, step_events
from thundersync.report.timeline import TimeShares, both_of, length, union

MOST_ROLLOUTS = 6000
"""Of the steps that are simulated together."""


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the steps that could be simulated."""

    steps: list[int]
    arm: Arm
    """The order it is compared with: lazy, or for a lazy run streamed."""
    other: TimeShares
    bound_s: float
    """No order can be faster."""

    @property
    def other_s(self) -> float:
        return sum(self.other)


def compare(record: RunRecord, steps: Sequence[int]) -> Compared | None:
    """None where nothing can be simulated. `steps` come in the order of interest; the first that fit are taken."""
    try:
        config = msgspec.convert(tomllib.loads((record.folder / "config.toml").read_text()), Config)
        traces = read_traces(_events(record, sorted(_fitting(record, steps))), rules(config)).steps
        arm: Arm = "stream" if config.stream.mode == "lazy" else "lazy"
        forecasts = [simulate(trace, arm) for trace in traces]
        bounds = [bound(trace) for trace in traces]
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError, ThundersyncError):
        return None
    if not forecasts:
        return None
    told = [_shares(forecast, trace) for forecast, trace in zip(forecasts, traces, strict=True)]
    return Compared(
        steps=[trace.step for trace in traces], arm=arm, other=mean_shares(told), bound_s=statistics.fmean(bounds)
    )


def mean_shares(shares: Sequence[TimeShares]) -> TimeShares:
    return TimeShares(*(statistics.fmean(values) for values in zip(*shares, strict=True)))


def _fitting(record: RunRecord, steps: Sequence[int]) -> Iterator[int]:
    left = MOST_ROLLOUTS
    for step in steps:
        found = record.steps[step]
        left -= len(found.opened.group_ids) * found.opened.group_size
        if left < 0:
            return
        if found.committed is not None:
            yield step


def _events(record: RunRecord, steps: Sequence[int]) -> Iterator[AnyEvent]:
    if record.started is not None:
        yield record.started
    for step in steps:
        yield from step_events(record, step)


def _shares(forecast: StepForecast, trace: StepTrace) -> TimeShares:
    """The forecast's seconds under the names of `timeline.shares`; rollouts run until the last of them is released."""
    learning = union((each.start_s, each.end_s) for each in forecast.intervals if each.what != "commit")
    both = both_of([(0.0, forecast.released_s)], learning)
    learn_s = length(learning)
    busy = forecast.released_s + learn_s - both + trace.after_s
    return TimeShares(both, forecast.released_s - both, learn_s - both, trace.after_s, max(0.0, forecast.step_s - busy))
