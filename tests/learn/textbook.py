"""Each objective as its paper writes it: one loss over the whole step, the model's own forward, one backward.

Written from the definitions, not from the package: advantages by numpy, terms by autograd through whole sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.learn.replay import RecordedStep
from thundersync.core.types import Rollout, Scored


def voters(step: RecordedStep) -> dict[str, list[Rollout]]:
    found = {g: [r for r in step.rollouts if r.group_id == g and isinstance(r.outcome, Scored)] for g in step.prompts}
    return {g: members for g, members in found.items() if len(members) >= 2}


def reward(rollout: Rollout) -> float:
    assert isinstance(rollout.outcome, Scored)
    return rollout.outcome.reward


def advantages(kind: str, groups: list[list[float]], eps: float = 1e-6) -> list[list[float]]:
    everything = np.concatenate([np.array(g, dtype=np.float64) for g in groups])
    result = []
    for group in groups:
        r = np.array(group, dtype=np.float64)
        if kind in ("grpo", "dapo"):
            a = (r - r.mean()) / (r.std(ddof=1) + eps)
        elif kind == "dr_grpo":
            a = r - r.mean()
        elif kind == "batch":
            a = (r - r.mean()) / (everything.std(ddof=1) + eps)
        elif kind == "rloo":
            a = np.array([x - np.delete(r, i).mean() for i, x in enumerate(r)])
        elif kind == "reinforce_pp":
            a = (r - everything.mean()) / (everything.std(ddof=1) + eps)
        result.append([0.0 if math.isclose(x, 0, abs_tol=1e-13) else x for x in a])
    return result


def gradient(
    model: Path,
    step: RecordedStep,
    *,
    kind: str,
    agg: str,
    constant: float = 1.0,
    kl: str = "",
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    mismatch: str = "none",
    low: float = 0.5,
    high: float = 2.0,
    reference: Any = None,
) -> Tensor:
    """[P] float32: d/d(parameters) of the minimised loss."""
    policy = AutoModelForCausalLM.from_pretrained(model).eval()
    groups = voters(step)
    rewards = [[reward(r) for r in members] for members in groups.values()]
    if kl == "k1":
        for members, own in zip(groups.values(), rewards, strict=True):
            for i, rollout in enumerate(members):
                own[i] -= kl_coef * sum(
                    float((_logprobs(policy, s)[0] - _logprobs(reference, s)[0]).detach().sum())
                    for s in rollout.sequences
                )
    known = advantages(kind, rewards)
    everyone = [r for members in groups.values() for r in members]
    tokens, count = sum(r.sampled_tokens for r in everyone), len(everyone)
    share: Callable[[Rollout], float] = {
        "token_mean": lambda r: 1 / tokens,
        "seq_mean_token_mean": lambda r: 1 / r.sampled_tokens / count,
        "seq_mean_token_sum": lambda r: 1 / count,
        "constant": lambda r: 1 / constant / count,
    }[agg]
    loss = torch.zeros(())
    for members, group in zip(groups.values(), known, strict=True):
        for rollout, advantage in zip(members, group, strict=True):
            for sequence in rollout.sequences:
                own, entropy, engine = _logprobs(policy, sequence)
                ratio = (own.detach() - engine).exp()
                if mismatch == "none":
                    weight = torch.ones_like(ratio)
                elif mismatch == "tis":
                    weight = ratio.clamp(max=high)
                elif mismatch == "icepop":
                    weight = ratio * ((ratio >= low) & (ratio <= high))
                else:
                    whole = (own.detach() - engine).sum().exp()
                    weight = torch.ones_like(ratio) * (whole if low <= whole <= high else 0.0)
                loss = loss - advantage * share(rollout) * (weight * own).sum()
                if kl in ("k2", "k3"):
                    with torch.no_grad():
                        ref = _logprobs(reference, sequence)[0]
                    k = (own - ref) ** 2 / 2 if kl == "k2" else (ref - own).exp() - (ref - own) - 1
                    loss = loss + kl_coef * share(rollout) * k.sum()
                loss = loss - entropy_coef * share(rollout) * entropy.sum()
    grads = torch.autograd.grad(loss, list(policy.parameters()))
    return torch.cat([grad.flatten() for grad in grads])


def _logprobs(model: Any, sequence: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Of the sampled tokens: logprobs, entropies, and the engine's logprobs."""
    ids, mask = torch.tensor([sequence.token_ids]), torch.tensor(sequence.sampled[1:])
    everything = model(ids).logits[0, :-1].float().log_softmax(-1)
    own = everything.gather(-1, ids[0, 1:, None])[:, 0]
    entropy = -(everything.exp() * everything).sum(-1)
    return own[mask], entropy[mask], torch.tensor(sequence.logprobs[1:])[mask]
