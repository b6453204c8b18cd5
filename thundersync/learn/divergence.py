"""How far the policy's distribution is from a teacher's at each visited prefix: reverse, forward or mixed KL.

Over the whole vocabulary (a teacher held in this process), or over the teacher's k best tokens and one bucket for all
the others (a teacher that only tells those): a coarser view of the same two distributions, so its KL is a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from thundersync.learn.head import all_logprobs

Kind = Literal["reverse", "forward", "mixed"]
SMALLEST_REST = 1e-8
"""Probability of all of the teacher's other tokens is at least this: below, float32 logprobs cannot tell."""


def between(policy: Tensor, teacher: Tensor, *, kind: Kind, mix: float) -> Tensor:
    """The divergence [n] of logprobs [n, V].

    reverse: KL(policy || teacher); forward: KL(teacher || policy); mixed: the generalised Jensen-Shannon divergence
    mix KL(teacher || M) + (1 - mix) KL(policy || M) with M = mix teacher + (1 - mix) policy.
    Source: GKD (arXiv:2306.13649), section 3.
    """
    if kind == "reverse":
        return _kl(policy, teacher)
    if kind == "forward":
        return _kl(teacher, policy)
    mixture = torch.logaddexp(policy + math.log1p(-mix), teacher + math.log(mix))
    return mix * _kl(teacher, mixture) + (1 - mix) * _kl(policy, mixture)


def held_teacher(teacher: Any, *, temperature: float, kind: Kind, mix: float) -> Callable[[Tensor, Tensor], Tensor]:
    """A `Divergence` whose target is the teacher's own final hidden states [n, H]: its head runs chunk by chunk."""

    def divergence(policy: Tensor, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            logprobs = all_logprobs(teacher, hidden, temperature)
        return between(policy, logprobs, kind=kind, mix=mix)

    return divergence


def told_teacher(*, kind: Kind, mix: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A `Divergence` whose targets are the teacher's best tokens [n, k] and their logprobs [n, k]."""
    return partial(_over_the_best, kind=kind, mix=mix)


def _over_the_best(policy: Tensor, ids: Tensor, best: Tensor, *, kind: Kind, mix: float) -> Tensor:
    own_rest = policy.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
    rest = (1 - best.double().exp().sum(-1, keepdim=True)).clamp(min=SMALLEST_REST).log().to(best)
    return between(torch.cat([policy.gather(-1, ids), own_rest], -1), torch.cat([best, rest], -1), kind=kind, mix=mix)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) [n] of logprobs."""
    return (p.exp() * (p - q)).sum(-1)
