"""When streaming is worth what: a grid of steps through the forecast's own simulator, paired with lazy steps.

    python tools/study.py [--json study.json] [--picture docs/study.svg]

Every step of the grid is made by three seeds: releases are lognormal about a mean of 100 s with the given coefficient
of variation (a rollout of several turns sums as many draws), the work of a rollout has a coefficient of variation of
0.25 and sums to `balance` x the last release. The ledger and the queue that order the work are a run's. Beside each
pair stands a forecast that knows when rewards landed but takes the mean work for everyone's: how far it is off says how
well the costs of a trace must be known. Nothing here is measured on a machine: `bench` does that.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from html import escape
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from thundersync.bench.workload import lognormal
from thundersync.core.objective import Objective
from thundersync.forecast import RolloutTrace, StepTrace, TurnTrace, bound, simulate

SEEDS = (42, 43, 44)
MEAN_S = 100.0
WORK_SPREAD = 0.25


class Setting(Struct, frozen=True, kw_only=True, order=True):
    """One configuration of the grid."""

    spread: float
    """Coefficient of variation of the rollouts' times."""
    balance: float
    """Seconds of learning over seconds of generating."""
    group_size: int
    prompts: int
    commit: float = 0.02
    """Commit and publish, over seconds of generating."""
    turns: int = 1
    distils: bool = False
    """Every turn is released by itself."""
    workers: int = 1
    per_pass: float = 0.0
    """What every pass costs anyway, in the mean work of a rollout."""


class Outcome(Struct, frozen=True, kw_only=True):
    """Medians over the seeds."""

    setting: Setting
    speedup: float
    """Lazy seconds over streamed seconds."""
    group_speedup: float
    bound_speedup: float
    """No order of the same work gains more."""
    forecast_error: float
    """|forecast / simulated speed-up - 1| of a forecast that takes the mean work for everyone's."""


def grid() -> list[Setting]:
    """588 steps of one worker and one turn, and beside them turns, workers, commits and passes that cost."""
    base = [
        Setting(spread=spread, balance=balance, group_size=size, prompts=prompts, per_pass=per_pass)
        for spread, balance, size, prompts, per_pass in itertools.product(
            (0.0, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0),
            (0.25, 0.5, 0.75, 1.0, 1.33, 2.0, 4.0),
            (4, 8, 16),
            (4, 16),
            (0.0, 0.1),
        )
    ]
    middle = [
        Setting(spread=spread, balance=balance, group_size=8, prompts=8)
        for spread, balance in itertools.product((0.25, 0.5, 1.0), (0.64, 1.0, 1.55))
    ]
    changed = [
        structs.replace(setting, **{key: value})
        for setting in middle
        for key, values in {"turns": (4, 20), "workers": (2, 4, 8), "commit": (0.0, 0.1, 0.2)}.items()
        for value in values
    ]
    turns = [structs.replace(setting, distils=True) for setting in changed if setting.turns > 1]
    return sorted({*base, *middle, *changed, *turns})


def outcome(setting: Setting) -> Outcome:
    rows = [_pair(step(setting, random.Random(seed))) for seed in SEEDS]
    return Outcome(setting=setting, **{key: statistics.median(row[key] for row in rows) for key in rows[0]})


def _pair(trace: StepTrace) -> dict[str, float]:
    lazy_s, stream_s = (simulate(trace, arm).step_s for arm in ("lazy", "stream"))
    flat = levelled(trace)
    foretold = simulate(flat, "lazy").step_s / simulate(flat, "stream").step_s
    return {
        "speedup": lazy_s / stream_s,
        "group_speedup": lazy_s / simulate(trace, "group").step_s,
        "bound_speedup": lazy_s / bound(trace),
        "forecast_error": abs(foretold / (lazy_s / stream_s) - 1.0),
    }


def step(setting: Setting, chance: random.Random) -> StepTrace:
    """One step, drawn."""
    count = setting.group_size * setting.prompts
    times = [[_draw(chance, setting.spread) / setting.turns for _ in range(setting.turns)] for _ in range(count)]
    ends = [MEAN_S * sum(of_rollout) for of_rollout in times]
    work = [_draw(chance, WORK_SPREAD) for _ in range(count)]
    scale = setting.balance * max(ends) * setting.workers / sum(work)
    rollouts = []
    for index in range(count):
        passed = list(itertools.accumulate(MEAN_S * seconds for seconds in times[index]))
        cost_s = work[index] * scale
        turns = [TurnTrace(release_s=at_s, cost_s=cost_s / setting.turns) for at_s in passed] if setting.distils else []
        rollouts.append(
            RolloutTrace(
                rollout_id=str(index),
                group_id=str(index // setting.group_size),
                release_s=ends[index],
                reward=chance.random(),  # dense: no group is flat, so that balance is what it says
                cost_s=cost_s,
                turns=turns,
            )
        )
    return StepTrace(
        rollouts=rollouts,
        commit_s=setting.commit * max(ends),
        publish_s=0.0,
        workers=setting.workers,
        pass_s=setting.per_pass * scale,
        max_tokens=8,  # pieces of a pass: each piece counts as one token here
        objective=Objective(rule=None, distils=True) if setting.distils else Objective(),
    )


def levelled(trace: StepTrace) -> StepTrace:
    """The same releases, and the mean work for every rollout."""
    mean_s = statistics.fmean(rollout.cost_s for rollout in trace.rollouts)
    return structs.replace(
        trace,
        rollouts=[
            structs.replace(
                rollout,
                cost_s=mean_s,
                turns=[structs.replace(turn, cost_s=mean_s / len(rollout.turns)) for turn in rollout.turns],
            )
            for rollout in trace.rollouts
        ],
    )


def _draw(chance: random.Random, spread: float) -> float:
    return lognormal(min(max(chance.random(), 1e-9), 1.0 - 1e-9), 1.0, spread)


def report(outcomes: list[Outcome]) -> str:
    speedups = sorted(found.speedup for found in outcomes)
    errors = [found.forecast_error for found in outcomes]
    return (
        f"{len(outcomes)} configurations, seeds {', '.join(map(str, SEEDS))}\n"
        f"speed-up over lazy: {speedups[0]:.2f} to {speedups[-1]:.2f}, median {statistics.median(speedups):.2f}; "
        f"above 1 in {_share(value > 1.0001 for value in speedups)}, "
        f"below 1 in {_share(value < 0.9999 for value in speedups)}\n"
        f"forecast with mean work: {statistics.fmean(errors):.1%} off on average, {max(errors):.1%} at most\n\n"
        + table(outcomes)
    )


def table(outcomes: list[Outcome]) -> str:
    """Means by spread and balance, of steps of one worker and one turn without costs of passes."""
    plain = [found for found in outcomes if _plain(found.setting)]
    spreads, balances = ([*sorted({getattr(f.setting, name) for f in plain})] for name in ("spread", "balance"))
    lines = ["| spread / balance | " + " | ".join(f"{balance:g}" for balance in balances) + " |"]
    lines.append("|---" * (len(balances) + 1) + "|")
    for spread in spreads:
        means = [_mean(plain, spread, balance) for balance in balances]
        lines.append(f"| {spread:g} | " + " | ".join("" if m is None else f"{m:.2f}" for m in means) + " |")
    return "\n".join(lines)


def _plain(setting: Setting) -> bool:
    return (setting.turns, setting.workers, setting.per_pass, setting.commit) == (1, 1, 0.0, 0.02)


def _mean(outcomes: list[Outcome], spread: float, balance: float) -> float | None:
    found = [f.speedup for f in outcomes if (f.setting.spread, f.setting.balance) == (spread, balance)]
    return statistics.fmean(found) if found else None


def _share(holds: Iterable[bool]) -> str:
    found = list(holds)
    return f"{sum(found) / len(found):.1%}"


WIDTH, HEIGHT, LEFT, BOTTOM = 900, 420, 60, 52
LINES = ["#d1d9e0", "#a9c4f5", "#5b8def", "#2f6fde", "#c9701a", "#8250df", "#1a7f37"]


def picture(outcomes: list[Outcome]) -> str:
    """Speed-up over balance, a line for each spread."""
    plain = [found for found in outcomes if _plain(found.setting)]
    spreads = [s for s in sorted({f.setting.spread for f in plain}) if _mean(plain, s, 0.25) is not None]
    balances = [b for b in sorted({f.setting.balance for f in plain}) if _mean(plain, 0.0, b) is not None]

    def place(index: int, speedup: float) -> tuple[float, float]:
        across = (WIDTH - LEFT - 130) / (len(balances) - 1)
        return LEFT + index * across, HEIGHT - BOTTOM - (speedup - 1.0) * (HEIGHT - BOTTOM - 40)

    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(16, 22, "Speed-up of streaming over lazy steps, simulated", size=15),
        _text(WIDTH / 2 - 40, HEIGHT - 10, "seconds of learning / seconds of generating", anchor="middle"),
    ]
    for tick in range(0, 11, 2):
        _, y = place(0, 1.0 + tick / 10)
        drawn.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - 130}" stroke="#e6eaef"/>')
        drawn.append(_text(LEFT - 8, y + 4, f"{1.0 + tick / 10:.1f}x", anchor="end"))
    for index, balance in enumerate(balances):
        drawn.append(_text(place(index, 1.0)[0], HEIGHT - BOTTOM + 20, f"{balance:g}", anchor="middle"))
    for colour, spread in zip(LINES, spreads, strict=False):
        points = [place(i, _mean(plain, spread, b) or 1.0) for i, b in enumerate(balances)]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        drawn.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
    for index, (colour, spread) in enumerate(zip(LINES, spreads, strict=False)):
        y = 60 + index * 20
        drawn.append(f'<path d="M{WIDTH - 118} {y - 4}h22" stroke="{colour}" stroke-width="2.5"/>')
        drawn.append(_text(WIDTH - 90, y, f"spread {spread:g}"))
    return "\n".join([*drawn, "</svg>", ""])


def _text(x: float, y: float, said: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="#1f2328" text-anchor="{anchor}">{escape(said)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="every configuration and what it gains")
    parser.add_argument("--picture", type=Path, help="an SVG: speed-up over balance, a line for each spread")
    parser.add_argument("--processes", type=int, help="by default one for each core")
    asked = parser.parse_args()
    with ProcessPoolExecutor(asked.processes) as pool:
        outcomes = list(pool.map(outcome, grid(), chunksize=8))
    if asked.json:
        asked.json.write_bytes(msgspec.json.encode(outcomes))
    if asked.picture:
        asked.picture.write_text(picture(outcomes))
    print(report(outcomes))


if __name__ == "__main__":
    main()
