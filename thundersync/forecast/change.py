"""A step as it would be under other circumstances: more engines, faster tools, more spread, fewer turns.

Each change states what it assumes and gives another trace; what that is worth is for `simulate` to say.
"""

from collections.abc import Sequence

from msgspec import structs

from thundersync.forecast.trace import RolloutTrace, StepTrace, TurnTrace, with_releases


def generated_by(trace: StepTrace, devices: int) -> StepTrace:
    """The step with another number of devices that generate.

    Of the seconds spent generating the share `engine_load` is divided among the devices; the rest is the time that one
    sequence takes by itself, and seconds in tools and checkers are no matter of devices at all. Generating is spread
    evenly over a rollout's life, so its turns move with it.
    """
    return faster(trace, generating=1.0 - trace.engine_load * (1.0 - trace.engines / devices), engines=devices)


def faster(
    trace: StepTrace,
    *,
    generating: float = 1.0,
    tools: float = 1.0,
    learning: float = 1.0,
    after: float = 1.0,
    engines: int | None = None,
) -> StepTrace:
    """Each kind of seconds times a factor: generating, tools and checkers, passes, and commit and publish."""
    shares = {
        rollout.rollout_id: min(1.0, rollout.generate_s / rollout.release_s) if rollout.release_s else 0.0
        for rollout in trace.rollouts
    }
    moved = with_releases(
        trace,
        lambda rollout, at_s: (
            at_s * (shares[rollout.rollout_id] * generating + (1.0 - shares[rollout.rollout_id]) * tools)
        ),
    )
    rollouts = [
        structs.replace(
            rollout,
            cost_s=rollout.cost_s * learning,
            generate_s=rollout.generate_s * generating,
            turns=[structs.replace(turn, cost_s=turn.cost_s * learning) for turn in rollout.turns],
        )
        for rollout in moved.rollouts
    ]
    last = max(trace.rollouts, key=lambda rollout: rollout.release_s)
    share = shares[last.rollout_id]
    return structs.replace(
        moved,
        rollouts=rollouts,
        pass_s=trace.pass_s * learning,
        close_s=trace.close_s * learning,
        commit_s=trace.commit_s * after,
        publish_s=trace.publish_s * after,
        generated_s=trace.generated_s * (share * generating + (1.0 - share) * tools),
        engines=trace.engines if engines is None else engines,
    )


def spread_by(trace: StepTrace, factor: float) -> StepTrace:
    """The same last release, and all others `factor` times as far before it, but not before the step opened.

    Keeping the last one keeps what a lazy step takes, so the difference is what dispersion alone is worth to streaming.
    """
    last_s = max(trace.released_s, max((t.release_s for r in trace.rollouts for t in r.turns), default=0.0))
    return with_releases(trace, lambda _, at_s: max(0.0, last_s - factor * (last_s - at_s)))


def fewer_turns(trace: StepTrace, factor: float) -> StepTrace:
    """Each rollout with that share of its turns: its time and its tokens shrink alike. Rewards stay as they were, which
    nobody promises."""
    shorter = faster(trace, generating=factor, tools=factor)
    rollouts = [
        structs.replace(
            rollout,
            cost_s=rollout.cost_s * factor,
            tokens=max(1, round(rollout.tokens * factor)),
            turns=[structs.replace(turn, cost_s=turn.cost_s * factor) for turn in rollout.turns],
        )
        for rollout in shorter.rollouts
    ]
    return structs.replace(shorter, rollouts=rollouts)


def even_costs(traces: Sequence[StepTrace]) -> list[StepTrace]:
    """Every token costs the same: what all worked pieces cost per token, on average over the steps.

    A forecast from these knows a step's lengths and releases, and nothing of its own passes.
    """
    rollouts = [rollout for trace in traces for rollout in trace.rollouts]
    pieces: list[RolloutTrace | TurnTrace] = [turn for rollout in rollouts for turn in rollout.turns]
    pieces += [rollout for rollout in rollouts if not rollout.turns]
    tokens = sum(piece.tokens for piece in pieces)
    token_s = sum(piece.cost_s for piece in pieces) / tokens if tokens else 0.0
    return [
        structs.replace(
            trace,
            rollouts=[
                structs.replace(
                    rollout,
                    cost_s=token_s * rollout.tokens,
                    turns=[structs.replace(turn, cost_s=token_s * turn.tokens) for turn in rollout.turns],
                )
                for rollout in trace.rollouts
            ],
        )
        for trace in traces
    ]
