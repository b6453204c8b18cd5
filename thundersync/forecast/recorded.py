"""A run's events -> the trace of each of its steps: releases as they were, costs from the passes that were run.

Reads the feed's vocabulary (`monitor.events`), which is plain structs; it opens no file and knows no clock.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise

from msgspec import Struct, structs

import thundersync.monitor.events as e
from thundersync.forecast.costs import PassCost, fit
from thundersync.forecast.engine_load import engine_load
from thundersync.forecast.trace import RolloutTrace, StepTrace, TurnTrace

SHARED_FORWARD = 1.0 / 3.0
"""Of a pass over a token: the part that the first pass of a group does for its prompt; the rest is swept at close."""


class RunTraces(Struct, frozen=True, kw_only=True):
    """What a run recorded."""

    started: e.RunStarted | None
    steps: list[StepTrace]
    """Those that can be simulated, in order."""
    left_out: list[str]
    """Steps that cannot, each with the reason."""
    cost: PassCost | None
    """Of its passes, by the tokens that they compute; None: there was no pass."""
    handover_s: float
    """Median over passes, from the coordinator's order to its answer, beyond the worker's busy time."""


class _Seen:
    """What the events said of one open step."""

    def __init__(self, opened: e.StepOpened) -> None:
        self.opened = opened
        self.groups = set(opened.group_ids)
        self.started: dict[str, float] = {}
        self.contents: dict[str, float] = {}
        self.scored: dict[str, e.RolloutScored] = {}
        self.failed: dict[str, float] = {}
        self.turns: dict[str, list[e.TurnGenerated]] = defaultdict(list)
        self.scores: dict[tuple[str, int], float] = {}
        self.generated_s = 0.0
        self.passes: list[tuple[e.PassStarted, e.PassDone]] = []
        self.begun: dict[int, e.PassStarted] = {}
        self.audited = False

    def add(self, event: e.AnyEvent) -> None:
        match event:
            case e.RolloutStarted() if event.group_id in self.groups:
                self.started.setdefault(event.rollout_id, event.at_s)
                self.turns[event.rollout_id] = []  # of the attempt that counts, which is the last one
            case e.ScoringStarted() if event.rollout_id in self.started:
                self.contents[event.rollout_id] = event.at_s
            case e.RolloutScored() if event.group_id in self.groups:
                self.scored[event.rollout_id] = event
            case e.RolloutFailed() if event.group_id in self.groups and not event.will_retry:
                self.failed[event.rollout_id] = event.at_s
            case e.TurnGenerated() if event.rollout_id in self.started:
                self.turns[event.rollout_id].append(event)
                self.generated_s = max(self.generated_s, event.at_s)
            case e.TurnScored() if event.rollout_id in self.started:
                self.scores[event.rollout_id, event.turn] = event.at_s
            case e.PassStarted():
                self.begun[event.pass_id] = event
            case e.PassDone() if event.pass_id in self.begun:
                self.passes.append((self.begun.pop(event.pass_id), event))
            case e.Audited():
                self.audited = True

    def prompt(self, rollout_id: str) -> int:
        turns = self.turns.get(rollout_id)
        return turns[0].prompt_tokens if turns else 0

    def own(self, rollout_id: str) -> int:
        """Tokens of the rollout beyond its prompt, when its turns are one sequence."""
        turns = self.turns.get(rollout_id)
        return max(1, turns[-1].prompt_tokens + turns[-1].sampled_tokens - self.prompt(rollout_id)) if turns else 1


def read_traces(events: Iterable[e.AnyEvent], rules: StepTrace) -> RunTraces:
    """Every committed step. `rules`: a trace whose limits, objective and devices hold for the run's steps; devices that
    the run itself told come before it."""
    started: e.RunStarted | None = None
    open_step: _Seen | None = None
    ended: list[tuple[_Seen, e.StepCommitted]] = []
    for event in events:
        match event:
            case e.RunStarted():
                started, open_step = event, None
            case e.StepOpened():
                open_step = _Seen(event)
            case e.StepCommitted() if open_step is not None:
                ended.append((open_step, event))
                open_step = None
            case _ if open_step is not None:
                open_step.add(event)
    if started is not None and started.trainer_workers:
        rules = structs.replace(rules, engines=started.engine_devices, workers=started.trainer_workers)
    generated = [turn for seen, _ in ended for turns in seen.turns.values() for turn in turns]
    load = engine_load([(turn.at_s - turn.generate_s, turn.at_s, turn.sampled_tokens) for turn in generated])
    rules = structs.replace(rules, engine_load=load)
    distils = rules.objective.distils
    passes = [
        (computed, done.busy_s) for seen, _ in ended for computed, done in _computed(seen, distils=distils) if computed
    ]
    least_s = min((done.busy_s for seen, _ in ended for _, done in seen.passes), default=0.0)
    cost = fit(passes, least_s=least_s) if passes else None
    waits = [max(0.0, done.at_s - begun.at_s - done.busy_s) for seen, _ in ended for begun, done in seen.passes]
    handover_s = statistics.median(waits) if waits else 0.0
    steps, left_out = [], []
    for seen, committed in ended:
        if reason := _unusable(seen, committed, cost, mode=started.mode if started is not None else ""):
            left_out.append(f"step {committed.step}: {reason}")
        else:
            assert cost is not None
            steps.append(_trace(seen, committed, rules, cost, handover_s))
    return RunTraces(started=started, steps=steps, left_out=left_out, cost=cost, handover_s=handover_s)


def _unusable(seen: _Seen, committed: e.StepCommitted, cost: PassCost | None, *, mode: str) -> str:
    """Why the step cannot be simulated as one of a run of this mode, or nothing."""
    if seen.opened.mode not in ("", mode) and mode:
        return f"it ran as {seen.opened.mode}"
    size = len(seen.groups) * seen.opened.group_size
    known = len(seen.scored.keys() | seen.failed.keys())
    if known != size:
        return f"{known} of its {size} rollouts are in the events"
    if seen.audited:
        return "its audit took part of its time"
    if not committed.metrics.get("step_s"):
        return "it does not say what it took"
    return "" if cost is not None else "the run has no pass to tell costs from"


def _computed(seen: _Seen, *, distils: bool) -> list[tuple[float, e.PassDone]]:
    """The tokens that each pass had to compute: its pieces' own, and the forward of its group's prompt if it was the
    group's first in that worker. A sweep has none of its own."""
    met: set[tuple[int, str]] = set()
    found: list[tuple[float, e.PassDone]] = []
    for begun, done in seen.passes:
        if distils:
            found.append((float(begun.tokens), done))
            continue
        own = [seen.own(rollout_id) for rollout_id in begun.rollout_ids]
        tokens = float(sum(own))
        first = begun.rollout_ids[0]
        place = (begun.worker, _group_of(first))
        if place not in met:
            met.add(place)
            tokens += SHARED_FORWARD * seen.prompt(first)
        found.append((tokens, done))
    return found


def _trace(seen: _Seen, committed: e.StepCommitted, rules: StepTrace, cost: PassCost, handover_s: float) -> StepTrace:
    metrics = committed.metrics
    began_s = committed.at_s - metrics["step_s"]
    workers = max([rules.workers, *(begun.worker + 1 for begun, _ in seen.passes)])
    between_s, publish_s = metrics.get("between_s", 0.0), metrics.get("publish_s", 0.0)
    worked = _worked(seen, cost)
    share = _generating_share(seen)
    rollouts = [
        _rollout(seen, f"{group_id}-{index:02d}", group_id, began_s, worked, cost, share)
        for group_id in seen.opened.group_ids
        for index in range(seen.opened.group_size)
    ]
    passes_s = sum(done.busy_s for _, done in seen.passes)
    all_s = (metrics.get("trainer_busy", 0.0) * metrics["step_s"] - metrics.get("commit_s", 0.0)) * workers
    closings = len({(begun.worker, _group_of(r)) for begun, _ in seen.passes for r in begun.rollout_ids})
    return structs.replace(
        rules,
        rollouts=rollouts,
        step=committed.step,
        workers=workers,
        commit_s=max(0.0, between_s - publish_s),
        publish_s=publish_s,
        generated_s=max(0.0, seen.generated_s - began_s),
        pass_s=cost.fixed_s + handover_s,
        close_s=max(0.0, all_s - passes_s) / closings if closings else 0.0,
        sweep_share=_sweep_share(seen, rules.sweep_share),
        measured_s=metrics["step_s"],
    )


def _worked(seen: _Seen, cost: PassCost) -> dict[str, float]:
    """Seconds that each rollout's passes took beyond their fixed cost; those that share a pass share by tokens."""
    found: dict[str, float] = defaultdict(float)
    for begun, done in seen.passes:
        own = [seen.own(rollout_id) for rollout_id in begun.rollout_ids]
        beyond_s = done.busy_s - cost.fixed_s
        for rollout_id, tokens in zip(begun.rollout_ids, own, strict=True):
            found[rollout_id] += beyond_s * tokens / sum(own)
    return dict(found)


def _rollout(
    seen: _Seen,
    rollout_id: str,
    group_id: str,
    began_s: float,
    worked: dict[str, float],
    cost: PassCost,
    share: float,
) -> RolloutTrace:
    scored = seen.scored.get(rollout_id)
    release_s = max(0.0, (scored.at_s if scored is not None else seen.failed[rollout_id]) - began_s)
    waited_s = max(0.0, seen.started.get(rollout_id, began_s) - began_s)
    own = seen.own(rollout_id)
    cost_s = worked.get(rollout_id, cost.token_s * own)
    turns = seen.turns.get(rollout_id, [])
    return RolloutTrace(
        rollout_id=rollout_id,
        group_id=group_id,
        release_s=release_s,
        reward=scored.reward if scored is not None else None,
        cost_s=cost_s,
        tokens=own,
        generate_s=min(release_s, sum(turn.generate_s for turn in turns) + share * waited_s),
        content_s=max(0.0, seen.contents[rollout_id] - began_s) if rollout_id in seen.contents else None,
        turns=_turns(seen, rollout_id, began_s, cost_s),
    )


def _turns(seen: _Seen, rollout_id: str, began_s: float, cost_s: float) -> list[TurnTrace]:
    """Of a distilled rollout; what it cost is shared out by the tokens that each turn added."""
    found = [turn for turn in seen.turns.get(rollout_id, []) if (rollout_id, turn.turn) in seen.scores]
    ends = [seen.prompt(rollout_id), *(turn.prompt_tokens + turn.sampled_tokens for turn in found)]
    added = [max(1, end - before) for before, end in pairwise(ends)]
    return [
        TurnTrace(
            release_s=max(0.0, seen.scores[rollout_id, turn.turn] - began_s),
            cost_s=cost_s * tokens / sum(added),
            tokens=tokens,
        )
        for turn, tokens in zip(found, added, strict=True)
    ]


def _generating_share(seen: _Seen) -> float:
    """Of the lives of all rollouts: what they spent generating, and so what those spent that had to wait for them."""
    ends = {r: scored.at_s for r, scored in seen.scored.items()} | seen.failed
    lives_s = sum(max(0.0, ends[r] - began_s) for r, began_s in seen.started.items() if r in ends)
    generated_s = sum(turn.generate_s for turns in seen.turns.values() for turn in turns)
    return min(1.0, generated_s / lives_s) if lives_s else 0.0


def _sweep_share(seen: _Seen, assumed: float) -> float:
    """Of the time of rollouts whose turns were worked alone: that of their sweeps, which carry no turn."""
    swept = {begun.rollout_ids[0] for begun, _ in seen.passes if not begun.tokens and begun.rollout_ids}
    sweeps_s = sum(done.busy_s for begun, done in seen.passes if not begun.tokens)
    turns_s = sum(d.busy_s for b, d in seen.passes if b.tokens and b.rollout_ids[:1] and b.rollout_ids[0] in swept)
    return sweeps_s / (sweeps_s + turns_s) if sweeps_s + turns_s else assumed


def _group_of(rollout_id: str) -> str:
    return rollout_id.rpartition("-")[0]
