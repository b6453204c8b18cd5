"""What a bench found: each arm's seconds, what they were spent on, and each arm against the lazy one and its forecast.

Plain values; `report` and `chart` show them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from thundersync.bench.arms import Measured
from thundersync.bench.pairs import Pair
from thundersync.bench.protocol import Measurements
from thundersync.bench.statistics import Spread, spread
from thundersync.bench.workload import StepWork, Workload
from thundersync.config import BenchArm
from thundersync.core.advantage import is_flat


class ArmResult(Struct, frozen=True, kw_only=True):
    """One arm. Medians over its repeats, unless said."""

    step_s: Spread
    sampled_tokens_per_s: float
    """Over the whole step."""
    trained_tokens_per_s: float
    """Over the whole step; a prompt that rollouts share is not counted."""
    useful_gflops: float
    """10^9 floating-point operations a second that the step's work needs, in every arm alike: 2 per parameter and token
    forward, 6 with its backward, attention left out, each prompt once."""
    trainer_busy: float
    """Share of the step, the commit included."""
    engine_busy: float
    """Share of the step with a turn in an engine."""
    passes: float
    queue_wait_s: float
    """Mean over a step's pieces, from reward to the start of their pass."""
    commit_s: float
    publish_s: float
    restart_s: float
    """From the last backward's end to the first prompt of a step that begins at once."""
    loop_lag_max_ms: float
    """The event loop's worst moment in any repeat."""
    trainer_peak_gib: float
    """0: not known here."""
    cpu_s: dict[str, float]
    """Processor seconds of a step: coordinator, trainer, engine."""


class Results(Struct, frozen=True, kw_only=True):
    """Everything that a bench tells."""

    name: str
    work: str
    source: str
    model: str
    parameters: int
    machine: str
    placement: str
    repeats: int
    arms: dict[BenchArm, ArmResult]
    speedup: dict[str, float]
    """`stream_over_lazy` and so on: lazy seconds / the arm's, median over pairs."""
    speedup_spread: dict[str, Spread]
    forecast: dict[str, float]
    """`stream_error`: by which share the streamed step exceeded its forecast from the lazy step beside it, median over
    pairs; `stream_own_error`: the same from its own trace; `speedup_error`: how far speed-ups were from their forecast,
    mean over pairs of all arms."""
    pairs: list[Pair]


def results_of(
    measurements: Measurements,
    pairs: Sequence[Pair],
    workload: Workload,
    *,
    name: str,
    model: str,
    parameters: int,
    machine: str,
    placement: str,
    distils: bool,
) -> Results:
    """`distils`: every turn has a gradient, whatever its rollout's reward."""
    by_arm: dict[BenchArm, list[Pair]] = {}
    for pair in pairs:
        by_arm.setdefault(pair.arm, []).append(pair)
    speedups = {f"{arm}_over_lazy": spread([pair.speedup for pair in of_arm]) for arm, of_arm in by_arm.items()}
    forecast: dict[str, float] = {}
    for arm, of_arm in by_arm.items():
        if (errors := [pair.error for pair in of_arm if pair.error is not None]) and arm != "async":
            forecast[f"{arm}_error"] = statistics.median(errors)
        if own := [pair.own_error for pair in of_arm if pair.own_error is not None]:
            forecast[f"{arm}_own_error"] = statistics.median(own)
    if wrong := [pair.speedup_error for pair in pairs if pair.speedup_error is not None]:
        forecast["speedup_error"] = statistics.fmean(wrong)
    return Results(
        name=name,
        work=workload.sentence(),
        source=workload.source,
        model=model,
        parameters=parameters,
        machine=machine,
        placement=placement,
        repeats=len(next(iter(measurements.steps.values()))),
        arms={
            arm: _arm(
                steps,
                lambda each: operations(
                    workload.of_replay(each.number), workload.shared_tokens, parameters, distils=distils
                ),
                lag_s=measurements.lag_s[arm],
                peak_gib=measurements.peak_gib[arm],
            )
            for arm, steps in measurements.steps.items()
        },
        speedup={key: value.median for key, value in speedups.items()},
        speedup_spread=speedups,
        forecast=forecast,
        pairs=list(pairs),
    )


def operations(step: StepWork, shared_tokens: int, parameters: int, *, distils: bool = False) -> float:
    """Floating-point operations that a step's work needs: whatever has a gradient, and each prompt once."""
    prompts = shared_tokens + sum(group.prompt_tokens - shared_tokens for group in step.groups)
    generated = prompts + sum(rollout.own_tokens for rollout in step.rollouts)
    learned = shared_tokens
    for group in step.groups:
        members = [rollout for rollout in group.rollouts if rollout.reward is not None or distils]
        if distils or not is_flat([rollout.reward or 0.0 for rollout in members]):
            learned += group.prompt_tokens - shared_tokens + sum(rollout.own_tokens for rollout in members)
    return parameters * (2.0 * generated + 6.0 * learned)


def _arm(
    measured: Sequence[Measured], operations_of: Callable[[Measured], float], *, lag_s: float, peak_gib: float
) -> ArmResult:
    def median(of: Callable[[Measured], float]) -> float:
        return statistics.median(map(of, measured))

    cpu: Mapping[str, Callable[[Measured], float]] = {
        "coordinator": lambda each: each.cpu.coordinator_s,
        "trainer": lambda each: each.cpu.trainer_s,
        "engine": lambda each: each.cpu.engine_s,
    }
    return ArmResult(
        step_s=spread([each.step_s for each in measured]),
        sampled_tokens_per_s=median(lambda each: each.sampled_tokens / each.step_s),
        trained_tokens_per_s=median(lambda each: each.metrics["tokens_trained"] / each.step_s),
        useful_gflops=median(lambda each: operations_of(each) / each.step_s) / 1e9,
        trainer_busy=median(lambda each: each.metrics["trainer_busy"]),
        engine_busy=median(lambda each: each.engine_busy),
        passes=median(lambda each: each.metrics["passes"]),
        queue_wait_s=median(lambda each: each.metrics["queue_wait_s"]),
        commit_s=median(lambda each: each.metrics["commit_s"]),
        publish_s=median(lambda each: each.metrics["publish_s"]),
        restart_s=median(lambda each: each.restart_s),
        loop_lag_max_ms=lag_s * 1000,
        trainer_peak_gib=peak_gib,
        cpu_s={name: median(of) for name, of in cpu.items()},
    )
