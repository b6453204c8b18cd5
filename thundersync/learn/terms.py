"""A pass's rows and what its forward gave -> the weights its backward takes, per destination.

The policy term waits for an advantage (or has it already); KL, entropy and teacher terms do not. Everything here is
ascent: what the step wants more of has a positive weight. Knows nothing of blocks, parts or processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from msgspec import structs
from torch import Tensor

from thundersync.learn.blocks import NO_LABEL
from thundersync.learn.messages import Row, Terms

Weighted = list[Tensor | None]
"""One weight tensor [N] per value of the forward, or None."""


@dataclass(frozen=True)
class Batch:
    """Rows of a pass as tensors [B, T], right-padded, after `skip` tokens that their shared blocks cover; or end to end
    [1, N], where `lengths` says where each ends."""

    tokens: Tensor
    labels: Tensor
    lengths: list[int]
    row: Tensor
    """[N]: which row each labelled position belongs to."""
    engine: Tensor
    """[N]: the engine's logprobs of the labels."""
    policy: Tensor
    kl: Tensor
    entropy: Tensor
    teacher: Tensor
    """[N] each: the rows' weights, at every labelled position."""
    teacher_logprobs: Tensor | None
    best: tuple[Tensor, Tensor] | None
    """The teacher's best tokens [N, k] and their logprobs."""
    real_tokens: int
    """Without padding."""


@dataclass(frozen=True)
class Piece:
    """Rows whose tokens from `start` on make one block; of what they sampled, only that block's labels are marked."""

    rows: list[Row]
    start: int


@dataclass
class Weighed:
    """What a forward's values weigh, and what was measured on the way."""

    policy: Weighted = field(default_factory=list)
    """Of the term that waits for an advantage."""
    known: dict[int, Weighted] = field(default_factory=dict)
    """Of the others, by step sum."""
    ratio_log: Tensor = field(default_factory=lambda: torch.zeros(0))
    """[N]: trainer minus engine logprob."""
    corrected: int = 0
    kl: float = 0.0
    entropy: float = 0.0
    divergence: float = 0.0


def batch(rows: Sequence[Row], skip: int, device: torch.device, *, packed: bool = False) -> Batch:
    """Lay `rows` out; their first `skip` tokens lie in blocks before them. A row's last token predicts nothing, so it
    is left out (and begins the next block, where one follows). `packed`: end to end, without padding."""
    lengths = [len(row.token_ids) - skip - 1 for row in rows]
    longest = max(lengths)
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full((len(rows), longest), NO_LABEL)
    engine, teacher_logprobs = torch.zeros(len(rows), longest), torch.zeros(len(rows), longest)
    for i, row in enumerate(rows):
        end = len(row.token_ids) - skip - 1
        own = torch.tensor(row.token_ids[skip:])
        sampled = torch.tensor(row.sampled[skip + 1 :], dtype=torch.bool)
        tokens[i, :end] = own[:-1]
        labels[i, :end] = torch.where(sampled, own[1:], NO_LABEL)
        engine[i, :end] = torch.tensor(row.logprobs[skip + 1 :])
        if row.teacher_logprobs:
            teacher_logprobs[i, :end] = torch.tensor(row.teacher_logprobs[skip + 1 :])
    at = labels != NO_LABEL
    of = at.nonzero()[:, 0]
    weights = [[row.policy, row.kl, row.entropy, row.teacher] for row in rows]
    per_row = torch.tensor(weights, dtype=torch.float64)[of]
    told = [(ids, logprobs) for row in rows for ids, logprobs in zip(row.top_ids, row.top_logprobs, strict=True)]
    best = None
    if told:
        best = (
            torch.tensor([ids for ids, _ in told], device=device),
            torch.tensor([logprobs for _, logprobs in told], device=device),
        )
    policy, kl, entropy, teacher = per_row.to(device).unbind(-1)
    if packed and len(rows) > 1:
        real = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
        tokens, labels = tokens[real][None], labels[real][None]
    else:
        lengths = []
    return Batch(
        tokens=tokens.to(device),
        labels=labels.to(device),
        lengths=lengths,
        row=of.to(device),
        engine=engine[at].to(device),
        policy=policy,
        kl=kl,
        entropy=entropy,
        teacher=teacher,
        teacher_logprobs=teacher_logprobs[at].to(device) if any(row.teacher_logprobs for row in rows) else None,
        best=best,
        real_tokens=sum(len(row.token_ids) - skip - 1 for row in rows),
    )


def cut_row(row: Row, start: int, size: int) -> list[Piece]:
    """`row` from `start` on in pieces of `size` tokens, each of which predicts the first token of the next."""
    pieces = []
    end = len(row.token_ids)
    for begin in range(start, end - 1, size):
        stop = min(begin + size, end - 1)
        before, own = sum(row.sampled[: begin + 1]), sum(row.sampled[begin + 1 : stop + 1])
        mark = [begin < i <= stop and sampled for i, sampled in enumerate(row.sampled[: stop + 1])]
        part = structs.replace(
            row,
            token_ids=row.token_ids[: stop + 1],
            sampled=mark,
            logprobs=row.logprobs[: stop + 1],
            teacher_logprobs=row.teacher_logprobs[: stop + 1],
            top_ids=row.top_ids[before : before + own],
            top_logprobs=row.top_logprobs[before : before + own],
        )
        pieces.append(Piece(rows=[part], start=begin))
    return pieces


@torch.no_grad()
def weigh(terms: Terms, rows: Batch, values: Sequence[Tensor], reference: Tensor | None) -> Weighed:
    """Weights for the `values` [N] of a head (logprobs, then entropy and divergence where wanted).

    `reference` [N]: the reference's logprobs of the labels, where a KL term is wanted.
    """
    names = ["logprob", *(["entropy"] if terms.entropy else []), *(["divergence"] if terms.divergence else [])]
    value = dict(zip(names, values, strict=True))
    logprobs = value["logprob"]
    result = Weighed(ratio_log=logprobs - rows.engine)
    ratio, corrected = importance(terms, result.ratio_log, rows.row)
    result.corrected = int(corrected.sum())

    def add(sum_index: int, name: str, weight: Tensor) -> None:
        weights = result.known.setdefault(sum_index, [None] * len(names))
        held = weights[names.index(name)]
        weights[names.index(name)] = weight if held is None else held + weight

    result.policy = [rows.policy * ratio] + [None] * (len(names) - 1)
    if reference is not None:
        distance = logprobs - reference
        if terms.kl == "k2":
            add(terms.sums.kl, "logprob", -rows.kl * distance)
            result.kl = float((distance.square() / 2).sum())
        elif terms.kl == "k3":
            add(terms.sums.kl, "logprob", -rows.kl * -torch.expm1(-distance))
            result.kl = float((torch.expm1(-distance) + distance).sum())
    if terms.entropy:
        add(terms.sums.entropy, "entropy", rows.entropy)
        result.entropy = float(value["entropy"].sum())
    if terms.divergence:
        add(terms.sums.teacher, "divergence", -rows.teacher)
        result.divergence = float(value["divergence"].sum())
    elif rows.teacher_logprobs is not None:
        # Reverse KL of the sampled token: its score-function gradient, with the reward log teacher - log policy.
        distance = rows.teacher_logprobs - logprobs
        add(terms.sums.teacher, "logprob", rows.teacher * distance * ratio)
        result.divergence = float(-distance.sum())
    return result


def importance(terms: Terms, ratio_log: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [N] that correct for the engine's rounding, and which of them were cut; `ratio_log` is trainer minus
    engine logprob.

    tis: min(ratio, high). icepop: the ratio within [low, high], else zero. seq_mask: the whole sequence's ratio within
    [low, high], else zero. None depends on an advantage's sign, so each is known before the reward is.
    Source of the token band: IcePop (arXiv:2510.18855).
    """
    if terms.mismatch == "none":
        return torch.ones_like(ratio_log), torch.zeros_like(ratio_log, dtype=torch.bool)
    if terms.mismatch == "seq_mask":
        rows = int(row.max()) + 1 if row.numel() else 0
        ratio_log = torch.zeros(rows, dtype=ratio_log.dtype, device=row.device).index_add_(0, row, ratio_log)[row]
    ratio = ratio_log.exp()
    if terms.mismatch == "tis":
        return ratio.clamp(max=terms.mismatch_high), ratio > terms.mismatch_high
    outside = (ratio < terms.mismatch_low) | (ratio > terms.mismatch_high)
    return ratio.masked_fill(outside, 0.0), outside
