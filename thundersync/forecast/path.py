"""What a simulated step waited for, from its end back to its beginning: the chain that a faster part would shorten."""

from typing import Literal, TypeAlias

from thundersync.forecast.simulate import Interval, StepForecast
from thundersync.forecast.trace import RolloutTrace, StepTrace

Part: TypeAlias = Literal["generating", "tools", "learning", "after"]
INSTANT_S = 1e-9


def critical_path(trace: StepTrace, forecast: StepForecast) -> dict[Part, float]:
    """Seconds of the step by kind; they add up to it.

    Back from the last backward: the passes that followed each other without a pause, on whichever worker, to the
    release that the first of them waited for; that release's own seconds are generating, tools and checkers. `trace`
    is the one that was simulated, of the colocated arm the one with its devices. `after`: commit and publish.
    """
    work = [interval for interval in forecast.intervals if interval.what != "commit"]
    began_s = _chain(work, forecast.learned_s)
    rollout = min(trace.rollouts, key=lambda each: abs(_release(each, began_s) - began_s))
    share = min(1.0, rollout.generate_s / rollout.release_s) if rollout.release_s else 0.0
    return {
        "generating": share * began_s,
        "tools": (1.0 - share) * began_s,
        "learning": forecast.learned_s - began_s,
        "after": forecast.step_s - forecast.learned_s,
    }


def _chain(work: list[Interval], end_s: float) -> float:
    """When the unbroken work that ended at `end_s` began; `end_s` itself if the step ended with a release."""
    began_s = end_s
    for interval in sorted(work, key=lambda each: -each.end_s):
        if abs(interval.end_s - began_s) <= INSTANT_S:
            began_s = interval.start_s
    return began_s


def _release(rollout: RolloutTrace, at_s: float) -> float:
    """Of its releases, the one nearest to a moment."""
    return min([rollout.release_s, *(turn.release_s for turn in rollout.turns)], key=lambda each: abs(each - at_s))
