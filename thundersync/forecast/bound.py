"""What no schedule can beat, given when each piece is released: the yardstick of every arm."""

import math
from itertools import accumulate

from msgspec import Struct

from thundersync.forecast.books import wanted
from thundersync.forecast.trace import RolloutTrace, StepTrace, check_trace


class _Piece(Struct, frozen=True):
    start_s: float
    """Its work may begin."""
    cost_s: float
    tokens: int
    """That count against `max_tokens`: of a turn none, since its rollout's turns always fit in one pass together."""
    group_id: str


def bound(trace: StepTrace, *, workers: int | None = None) -> float:
    """A lower bound on the step's seconds under any order, with `workers` trainer devices (the trace's own by default).

    The step cannot end before its last release. What is released at or after any moment t has to be worked after t, by
    all workers together: its pieces' costs, at least so many passes as `max_tokens` and the rule of one group a pass
    allow, and one closing of each of its groups. No single piece is split. Only pieces whose gradient is not zero
    count, as if it were known from the start which these are. On one worker without fixed costs this is exactly

        max over t of: t + (work released at or after t)

    which any order attains that never idles while a piece waits. Source: the single-machine release-date problem
    (1 | r_j | C_max). Raises: UnusableTrace.
    """
    check_trace(trace)
    count = trace.workers if workers is None else workers
    pieces = sorted(_pieces(trace), key=lambda piece: -piece.start_s)
    least = [trace.released_s]
    alone_s = trace.pass_s + trace.close_s
    least += [piece.start_s + alone_s + piece.cost_s for piece in pieces]
    tokens: dict[str, int] = {}
    passes: dict[str, int] = {}
    for piece, cost_s in zip(pieces, accumulate(piece.cost_s for piece in pieces), strict=True):
        group_id = piece.group_id
        tokens[group_id] = tokens.get(group_id, 0) + min(piece.tokens, trace.max_tokens)
        passes[group_id] = max(1, math.ceil(tokens[group_id] / trace.max_tokens))
        fixed_s = sum(passes.values()) * trace.pass_s + len(passes) * trace.close_s
        least.append(piece.start_s + (cost_s + fixed_s) / count)
    return max(least) + trace.after_s


def _pieces(trace: StepTrace) -> list[_Piece]:
    if trace.distils:
        return [
            _Piece(turn.release_s, turn.cost_s, 0, rollout.group_id)
            for rollout in trace.rollouts
            for turn in rollout.turns
        ]
    worth = wanted(trace)
    return [_Piece(_start(trace, r), r.cost_s, r.tokens, r.group_id) for r in trace.rollouts if r.rollout_id in worth]


def _start(trace: StepTrace, rollout: RolloutTrace) -> float:
    if trace.holds and rollout.content_s is not None:
        return min(rollout.release_s, rollout.content_s)
    return rollout.release_s
