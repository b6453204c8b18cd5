"""A rollout and its weights -> the rows a worker takes."""

from thundersync.core.objective import Weights
from thundersync.core.types import FinalContent, Rollout
from thundersync.learn.messages import ReferencePiece, Row


def piece_rows(rollout: Rollout | FinalContent, weights: Weights, advantage: float) -> list[Row]:
    """One row per token sequence; `advantage` is 1 where a scalar at close will stand for it."""
    return [
        Row(
            token_ids=sequence.token_ids,
            sampled=sequence.sampled,
            logprobs=sequence.logprobs,
            policy=weights.policy * advantage,
            kl=weights.kl,
            entropy=weights.entropy,
            teacher=weights.teacher,
        )
        for sequence in rollout.sequences
    ]


def reference_piece(rollout: Rollout, weights: Weights, advantage: float) -> ReferencePiece:
    """The same for the one-piece reference: the advantage is final."""
    return ReferencePiece(rollout_id=rollout.rollout_id, rows=piece_rows(rollout, weights, advantage))
