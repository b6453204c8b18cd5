"""A run in sentences: what somebody who watched it would tell a colleague, and the few figures worth a glance.

From a record and where its steps' time went. Only what was measured is said; what is missing is not guessed at.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from thundersync.report.arms import Compared
from thundersync.report.chart import duration, written
from thundersync.report.record import RunRecord
from thundersync.report.timeline import TimeShares


class Figure(msgspec.Struct, frozen=True):
    """One number, with what it is and what it is to be compared with."""

    value: str
    name: str
    beside: str = ""


def story(record: RunRecord, spent: Sequence[TimeShares], compared: Compared | None) -> list[str]:
    """The summary, one sentence each. `spent` is of single steps; `compared`, where it could be forecast."""
    sentences = [_what(record), _learned(record), _time(record, spent)]
    sentences += [_order(compared, spent), _exactness(record), _trouble(record)]
    return [sentence for sentence in sentences if sentence]


def figures(record: RunRecord, spent: Sequence[TimeShares], compared: Compared | None) -> list[Figure]:
    """The few numbers at the top."""
    found = []
    if record.evals:
        first, last = record.evals[0].finished.reward_mean, record.evals[-1].finished.reward_mean
        several = len(record.evals) > 1
        found.append(Figure(f"{last:.2f}", "held-out reward", f"{first:.2f} before" if several else ""))
    rewards = [value for _, value in record.series("reward_mean")]
    if rewards:
        found.append(Figure(f"{statistics.fmean(rewards[-5:]):.2f}", "training reward", _last(len(rewards))))
    seconds = [value for _, value in record.series("step_s")]
    if seconds:
        found.append(
            Figure(
                duration(statistics.median(seconds)),
                "median step",
                f"of {len(seconds)} steps" if len(seconds) > 1 else "the only one",
            )
        )
    for metric, name in (("engine_busy", "engines busy"), ("trainer_busy", "trainer busy")):
        if (share := weighted(record, metric)) is not None:
            found.append(Figure(f"{share * 100:.0f} %", name, "of a step"))
    if both := _share(spent, 0):
        found.append(Figure(f"{both * 100:.0f} %", "learned meanwhile", "share of a step"))
    if compared is not None and compared.arm == "lazy" and spent:
        gain = compared.other_s / statistics.fmean(map(sum, spent))
        found.append(Figure(f"{gain:.2f} x", "as fast as lazy", "forecast from its trace"))
    return found


def weighted(record: RunRecord, metric: str) -> float | None:
    """A share over all steps, weighted by their seconds; None if none tells it."""
    shares = dict(record.series(metric))
    seconds = {step: value for step, value in record.series("step_s") if step in shares and value > 0.0}
    total = sum(seconds.values())
    return sum(shares[step] * value for step, value in seconds.items()) / total if total else None


def ending(record: RunRecord) -> str:
    """How it stands, in a few words."""
    if record.finished is None:
        return "has no end in its events: it was still going when this was written, or it was killed"
    if record.finished.ok:
        return "finished"
    return f"ended early: {record.finished.reason or 'no reason was told'}"


def _what(record: RunRecord) -> str:
    started, made = record.started, len(record.commits)
    took = f"in {duration(max(0.0, record.ended_s - record.began_s))}"
    if started is None:
        return f"{record.name}: {made} steps {took}."
    if not made and record.evals:
        return f"{record.name} evaluated {started.model} {took}."
    each, groups = started.prompts_per_step * started.group_size, started.prompts_per_step
    how = {"stream": "gradients streamed", "group": "learning group by group"}.get(started.mode, "learning lazily")
    again = f" It was started {record.starts} times." if record.starts > 1 else ""
    return (
        f"{record.name} trained {started.model} for {made} step{'s' * (made != 1)} of {each} rollouts "
        f"({groups} tasks x {started.group_size}) with {started.algo}, {how}, {took}; it {ending(record)}.{again}"
    )


def _learned(record: RunRecord) -> str:
    rewards = [value for _, value in record.series("reward_mean")]
    parts = []
    if len(record.evals) > 1:
        first, last = record.evals[0], record.evals[-1]
        verb = _verb(first.finished.reward_mean, last.finished.reward_mean)
        parts.append(
            f"Reward on held-out tasks {verb} {first.finished.reward_mean:.2f} to {last.finished.reward_mean:.2f} over "
            f"{last.after - first.after} steps"
        )
    elif record.evals:
        parts.append(f"Reward on held-out tasks was {record.evals[0].finished.reward_mean:.2f}")
    if len(rewards) >= 4:
        few = max(1, min(5, len(rewards) // 4))
        early, late = statistics.fmean(rewards[:few]), statistics.fmean(rewards[-few:])
        words = f"the first and the last {few} steps" if few > 1 else "the first and the last step"
        opening = "on the tasks it trained on" if parts else "Reward on the tasks it trained on"
        parts.append(f"{opening} it was {early:.2f} and {late:.2f} in {words}")
    return "; ".join(parts) + "." if parts else ""


def _time(record: RunRecord, spent: Sequence[TimeShares]) -> str:
    seconds = [value for _, value in record.series("step_s")]
    engines, trainer = weighted(record, "engine_busy"), weighted(record, "trainer_busy")
    if not seconds or engines is None or trainer is None:
        return ""
    sentence = (
        f"The median step took {duration(statistics.median(seconds))}; the engines were busy for {engines * 100:.0f} % "
        f"of the time and the trainer for {trainer * 100:.0f} %"
    )
    both = _share(spent, 0)
    if both is None:
        return f"{sentence}."
    if both < 0.005:
        return f"{sentence}, and nothing was learned while rollouts ran."
    total = sum(sum(each) for each in spent)
    return (
        f"{sentence}; for {both * 100:.0f} % of a step ({duration(both * total / len(spent))}) the trainer learned "
        "while rollouts ran."
    )


def _order(compared: Compared | None, spent: Sequence[TimeShares]) -> str:
    if compared is None or not spent:
        return ""
    own = statistics.fmean(map(sum, spent))
    how = "waited for all rollouts before it learned" if compared.arm == "lazy" else "learned as rewards landed"
    return (
        f"Had the trainer {how}, the mean step would have taken {duration(compared.other_s)} by forecast instead of "
        f"{duration(own)}; no order could have taken less than {duration(compared.bound_s)}."
    )


def _exactness(record: RunRecord) -> str:
    parts = []
    staleness = [value for _, value in record.series("staleness")]
    if staleness:
        parts.append("every token was trained on by the policy that sampled it" if max(staleness) == 0 else "")
    mean = [value for _, value in record.series("mismatch_mean")]
    most = [value for _, value in record.series("mismatch_max")]
    if mean and most:
        parts.append(
            f"engine and trainer differed by {written(statistics.fmean(mean), '')} in a token's log-probability in the "
            f"mean, by {written(max(most), '')} at most"
        )
    if record.audits:
        good = sum(audit.ok for audit in record.audits)
        worst = max(audit.relative_l2 for audit in record.audits)
        parts.append(
            f"{good} of {len(record.audits)} audited steps equalled their one-piece gradient within rounding (at most "
            f"{worst:.1e} apart)"
        )
    text = "; ".join(part for part in parts if part)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _trouble(record: RunRecord) -> str:
    parts = []
    attempts = sum(failure.attempts for failure in record.failures.values())
    if attempts:
        final = sum(failure.final for failure in record.failures.values())
        kinds = ", ".join(f"{failure.attempts} {kind}" for kind, failure in sorted(record.failures.items()))
        ended = f"{final} of them for good" if final else "each made good by another attempt"
        parts.append(f"{attempts} attempt{'s' * (attempts != 1)} failed ({kinds}), {ended}")
    empty = sum(step.committed is not None and step.committed.empty for step in record.commits)
    if empty:
        parts.append(f"{empty} step{'s' * (empty != 1)} had nothing to learn from and changed no weight")
    if record.warnings:
        count = len(record.warnings)
        parts.append(f"{count} warning{'s were' if count != 1 else ' was'} given")
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}." if text else "Nothing failed and nothing was warned about."


def _share(spent: Sequence[TimeShares], index: int) -> float | None:
    total = sum(sum(each) for each in spent)
    return sum(each[index] for each in spent) / total if total else None


def _verb(first: float, last: float) -> str:
    return "rose from" if last > first else "fell from" if last < first else "stayed, from"


def _last(count: int) -> str:
    return f"mean of the last {min(5, count)} steps" if count > 1 else "one step"
