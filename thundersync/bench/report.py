"""A bench as tables for people, and as one JSON object for programs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from thundersync.bench.results import ArmResult, Results
from thundersync.bench.statistics import Spread
from thundersync.config import BenchArm
from thundersync.errors import ConfigError
from thundersync.rundir import write_whole


def tables(results: Results) -> RenderableType:
    """Work and machine, each arm, each arm against the lazy one."""
    title = Text.assemble(("Bench", "bold"), f": {results.model}, {results.parameters / 1e6:.1f} million parameters")
    work = [
        f"work: {results.work}",
        f"      {results.source}; {results.repeats} repeats, the arms in turns, warm-up steps left out",
        f"machine: {results.machine}",
        f"         {results.placement}",
    ]
    parts: list[RenderableType] = [title, *(Text(line, "dim") for line in work), _arms(results)]
    if results.speedup:
        parts += [_against_lazy(results), *(Text(line, "dim") for line in _below(results))]
    return Group(*parts)


def write_json(results: Results, path: Path) -> None:
    """Raises: ConfigError when the file cannot be written."""
    write(path, msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n", "--json")


def write(path: Path, data: bytes, option: str) -> None:
    """Raises: ConfigError when the file cannot be written; `option` names it."""
    try:
        write_whole(path, data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}", remedy=f"Give {option} another file.") from error


def _arms(results: Results) -> Table:
    lazy = results.arms.get("lazy")
    return _side_by_side("arm", {arm: _measures(found, lazy) for arm, found in results.arms.items()})


def _measures(found: ArmResult, lazy: ArmResult | None) -> dict[str, str]:
    measures = {
        "step": f"{found.step_s.median:.2f} s",
        "quartiles": f"{found.step_s.low:.2f}..{found.step_s.high:.2f}",
        "tokens sampled": f"{found.sampled_tokens_per_s:.0f}/s",
        "tokens trained": f"{found.trained_tokens_per_s:.0f}/s",
        "useful": f"{found.useful_gflops:.1f} GFLOP/s",
        "trainer busy": f"{found.trainer_busy:.0%}",
        "engines busy": f"{found.engine_busy:.0%}",
        "passes": f"{found.passes:.0f}",
        "commit": f"{found.commit_s:.2f} s",
        "publish": f"{found.publish_s:.2f} s",
        "restart": f"{found.restart_s:.2f} s",
        "trainer's peak memory": f"{found.trainer_peak_gib:.2f} GiB" if found.trainer_peak_gib else "?",
    }
    if found.trainer_peak_gib and lazy is not None and lazy.trainer_peak_gib:
        measures["  over lazy"] = f"{found.trainer_peak_gib / lazy.trainer_peak_gib:.2f}x"
    return measures


def _against_lazy(results: Results) -> Table:
    found = {arm: results.speedup_spread.get(f"{arm}_over_lazy") for arm in results.arms}
    columns = {arm: _speedup(results, arm, spread) for arm, spread in found.items() if spread is not None}
    return _side_by_side("lazy /", columns)


def _speedup(results: Results, arm: BenchArm, found: Spread) -> dict[str, str]:
    foretold = sorted(p.forecast_speedup for p in results.pairs if p.arm == arm and p.forecast_speedup is not None)
    error, own = results.forecast.get(f"{arm}_error"), results.forecast.get(f"{arm}_own_error")
    return {
        "speed-up": f"{found.median:.3f}x",
        "quartiles": f"{found.low:.3f}..{found.high:.3f}",
        "95 % of the median": f"{found.median_low:.3f}..{found.median_high:.3f}",
        "forecast": f"{foretold[len(foretold) // 2]:.3f}x" if foretold else "",
        "behind forecast": f"{error:+.1%}" if error is not None else "",
        "behind own trace": f"{own:+.1%}" if own is not None else "",
    }


def _side_by_side(corner: str, columns: Mapping[BenchArm, Mapping[str, str]]) -> Table:
    """A column for each arm: all arms fit on 80 characters."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(corner)
    for arm in columns:
        table.add_column(arm, justify="right")
    for name in next(iter(columns.values())):
        table.add_row(name, *(column.get(name, "") for column in columns.values()))
    return table


def _below(results: Results) -> list[str]:
    lines = [
        "behind forecast: the arm's step against what the lazy step beside it foretold from its rewards and passes;",
        "behind own trace: against the same schedule of its own rewards and passes; medians over pairs",
    ]
    if (wrong := results.forecast.get("speedup_error")) is not None:
        lines.append(f"forecast speed-ups were {wrong:.1%} off the measured ones, mean over pairs of all arms")
    return lines
