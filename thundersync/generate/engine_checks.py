"""What both engines refuse, in the same words: publishes that cannot be taken, requests and answers that cannot stand.

Knows sentences and plain values; nothing of either engine.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from thundersync.errors import EngineFailed, PublishFailed
from thundersync.generate.base import TokenScores

FAULTS_TOLD = 5


def refuse_requests_in_flight(running: int) -> None:
    """A publish needs a quiet engine. Raises: PublishFailed."""
    if running:
        raise PublishFailed(f"{running} requests are in flight; a publish needs none")


def refuse_faults(faults: Sequence[str], *, engine: str, version: int, log_path: Path) -> None:
    """Everything that kept `engine` from becoming `version`, in one error. Raises: PublishFailed if there is any."""
    if faults:
        raise PublishFailed(
            f"{engine} did not become policy version {version}: {'; '.join(faults[:FAULTS_TOLD])}"
            + (f" and {len(faults) - FAULTS_TOLD} more" if len(faults) > FAULTS_TOLD else ""),
            remedy=f"Nothing is sampled until a publish succeeds; details in {log_path}.",
        )


def refuse_torn_weights(whole: bool, *, engine: str) -> None:
    """After a failed publish nothing is sampled or scored. Raises: EngineFailed."""
    if not whole:
        raise EngineFailed(
            f"{engine}'s weights are not whole since a publish failed", remedy="Publish a complete set of weights."
        )


def refuse_unfinite(logprobs: Sequence[float], *, engine: str, request_id: str) -> None:
    """Raises: EngineFailed when a token was sampled with a logprob that is not finite."""
    if not all(map(math.isfinite, logprobs)):
        raise EngineFailed(
            f"{engine} sampled with a logprob that is not finite in request {request_id}",
            remedy="The weights have most likely diverged; lower optim.lr and resume from a checkpoint.",
        )


def refuse_impossible_score(
    token_ids: Sequence[int], *, start: int, topk: int, max_model_len: int, max_topk: int, request_id: str
) -> None:
    """Raises: EngineFailed for a score that no engine could give."""
    if not 1 <= start < len(token_ids):
        raise EngineFailed(
            f"request {request_id} asks for scores from token {start} of {len(token_ids)}",
            remedy="The first token has nothing before it, so scores begin at token 1 and end before the last.",
        )
    if len(token_ids) > max_model_len:
        raise EngineFailed(
            f"request {request_id} has {len(token_ids)} tokens to score, the engine's context holds {max_model_len}",
            remedy="Raise the scoring engine's max_model_len, or shorten the prompt.",
        )
    if not 0 <= topk <= max_topk:
        raise EngineFailed(
            f"request {request_id} asks for the {topk} most probable tokens, the engine gives at most {max_topk}",
            remedy="Make the engine with a larger max_topk.",
        )


def checked_scores(scores: TokenScores, *, count: int, topk: int, engine: str, request_id: str) -> TokenScores:
    """`scores` as they are. Raises: EngineFailed when they are not `count` finite logprobs with `topk` alternatives."""
    if fault := scores.fault(count=count, topk=topk):
        raise EngineFailed(f"{engine} scored request {request_id} wrongly: {fault}")
    return scores
