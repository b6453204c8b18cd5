"""What an evaluation came to, as tables for people. Knows `report.Report`, and nothing of how it came about."""

from __future__ import annotations

import math

from rich.markup import escape
from rich.table import Table

from thundersync.evaluate.figures import Estimate, some_k
from thundersync.evaluate.report import Report

_WIDEST_REWARDS = 8


def suite_table(report: Report) -> Table:
    """Per suite: pass@k and mean reward with their intervals, over how many tasks, and what failed."""
    who = report.model if report.agent == "policy" else report.agent
    shown = Table(title=f"{escape(who)}, {report.samples} per task", title_justify="left", box=None, pad_edge=False)
    for name in ("suite", "", "mean", "95 %", "tasks"):
        shown.add_column(name, justify="left" if name in ("suite", "") else "right", overflow="fold")
    for suite in report.suites:
        rows = [(f"pass@{k}", suite.pass_at[str(k)]) for k in some_k(report.samples)]
        for index, (name, estimate) in enumerate([*rows, ("reward", suite.reward)]):
            shown.add_row(escape(suite.suite) if index == 0 else "", name, *_cells(estimate))
        if suite.failed:
            left_out = f", {suite.unscored_tasks} tasks unscored" if suite.unscored_tasks else ""
            shown.add_row("", f"failed: {suite.failed} samples, in no mean{left_out}", "", "", "")
    return shown


def task_table(report: Report) -> Table:
    """One row per task."""
    shown = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("task", "passed", "mean", "rewards", "failed"):
        shown.add_column(name, justify="left" if name in ("task", "rewards") else "right", overflow="fold")
    several = len({task.suite for task in report.tasks}) > 1
    for task in report.tasks:
        rewards = [f"{reward:g}" for reward in task.rewards]
        more = f" +{len(rewards) - _WIDEST_REWARDS}" if len(rewards) > _WIDEST_REWARDS else ""
        shown.add_row(
            escape(f"{task.suite}/{task.task_id}" if several else task.task_id),
            f"{task.passed}/{len(task.rewards)}",
            f"{math.fsum(task.rewards) / len(task.rewards):.2f}" if task.rewards else "-",
            " ".join(rewards[:_WIDEST_REWARDS]) + more,
            str(task.failed) if task.failed else "",
        )
    return shown


def _cells(estimate: Estimate) -> tuple[str, str, str]:
    value = "-" if math.isnan(estimate.value) else f"{estimate.value:.3f}"
    between = "-" if math.isnan(estimate.low) else f"{estimate.low:.3f} to {estimate.high:.3f}"
    return value, between, str(estimate.tasks)
