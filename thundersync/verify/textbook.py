"""Rollouts or scored turns -> the pieces of the one-piece reference, every coefficient final, as the papers write it.

Takes from the streamed path what was sampled and what it is worth, and nothing of how it was worked: advantages come
from whole groups, denominators from plain sums. Knows no worker.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from thundersync.core.objective import SeparableObjective, Tally, Weights
from thundersync.core.types import GroupId, Rollout, RolloutId
from thundersync.learn.messages import ReferencePiece, Row
from thundersync.learn.rows import reference_piece
from thundersync.learn.turn_stream import ScoredTurn, turn_row


class Textbook(Struct, frozen=True, kw_only=True):
    """A step as one loss: minus the sum over terms of scale x sum over tokens of weight x value."""

    pieces: list[ReferencePiece]
    """Those with a weight that is not zero."""
    scales: list[float]


def of_rollouts(
    rollouts: Sequence[Rollout],
    rewards: Mapping[RolloutId, float],
    objective: SeparableObjective,
    *,
    min_group_size: int,
    skip_flat: bool,
) -> Textbook:
    """`rollouts` in membership order; those without an entry in `rewards` have failed and do not vote."""
    groups: dict[GroupId, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.rollout_id in rewards:
            groups[rollout.group_id].append(rollout)
    counted = [members for members in groups.values() if len(members) >= min_group_size]
    voters = [rollout for members in counted for rollout in members]
    advantages: dict[RolloutId, float] = {}
    for cohort in [voters] if objective.cohort == "step" else counted:
        own = objective.advantages([rewards[rollout.rollout_id] for rollout in cohort])
        advantages |= dict(zip((rollout.rollout_id for rollout in cohort), own, strict=True))
    pieces = []
    for members in counted:
        flat = skip_flat and not objective.signal([rewards[rollout.rollout_id] for rollout in members])
        for rollout in members:
            weights = objective.weights(rollout.sampled_tokens)
            if flat:
                weights = Weights(policy=weights.policy)
            pieces.append(reference_piece(rollout, weights, advantages[rollout.rollout_id]))
    tally = Tally(
        tokens=sum(rollout.sampled_tokens for rollout in voters),
        rollouts=len(voters),
        rewards=[rewards[rollout.rollout_id] for rollout in voters],
    )
    return _textbook(pieces, objective, tally)


def of_turns(turns: Iterable[ScoredTurn], objective: SeparableObjective) -> Textbook:
    """Every turn that was scored counts, whatever became of its attempt; so does every attempt that has one."""
    lines: dict[tuple[RolloutId, int, int], list[ScoredTurn]] = defaultdict(list)
    for turn in turns:
        lines[turn.sampled.rollout_id, turn.sampled.attempt, turn.sampled.sequence].append(turn)
    pieces = [
        ReferencePiece(rollout_id=key[0], rows=[turn_row(sorted(line, key=_turn), objective)])
        for key, line in lines.items()
    ]
    tokens = sum(turn.sampled.end - turn.sampled.start for line in lines.values() for turn in line)
    attempts = {(rollout_id, attempt) for rollout_id, attempt, _ in lines}
    return _textbook(pieces, objective, Tally(tokens=tokens, rollouts=len(attempts), rewards=[]))


def _textbook(pieces: Sequence[ReferencePiece], objective: SeparableObjective, tally: Tally) -> Textbook:
    return Textbook(pieces=[piece for piece in pieces if any(map(_weighs, piece.rows))], scales=objective.scales(tally))


def _weighs(row: Row) -> bool:
    return any((row.policy, row.kl, row.entropy, row.teacher))


def _turn(turn: ScoredTurn) -> int:
    return turn.sampled.turn
