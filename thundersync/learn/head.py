"""Hidden states -> what a token's terms need: logprob of its label, entropy, divergence from a teacher. In float32.

Logits of all positions are never held together: beyond a chunk they are made again in the backward instead of kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 512
"""Rows of logits held at once."""

Divergence = Callable[..., Tensor]
"""(student logprobs [n, V], *targets [n, ...]) -> [n]."""


class Head:
    """A model's own output head over given positions: `head(hidden [N, H], labels [N])` gives the list of values [N].

    Values: logprobs of the labels; then, if `entropy`, the entropies (nats); then, with `divergence`, its values.
    Logits are divided by `temperature`, as the sampler does: trainer and engine speak of one distribution.
    `targets` are tensors [N, ...] that `divergence` gets beside the student's logprobs.
    """

    def __init__(
        self,
        model: Any,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        divergence: Divergence | None = None,
        targets: tuple[Tensor, ...] = (),
    ) -> None:
        self._model, self._temperature = model, temperature
        self._entropy, self._divergence, self._targets = entropy, divergence, targets

    def __call__(self, hidden: Tensor, labels: Tensor) -> list[Tensor]:
        if hidden.shape[0] <= CHUNK_TOKENS:
            return list(self._values(hidden, labels, *self._targets))
        chunks = [torch.split(each, CHUNK_TOKENS) for each in (hidden, labels, *self._targets)]
        parts = [
            checkpoint(self._values, *chunk, use_reentrant=False) if torch.is_grad_enabled() else self._values(*chunk)
            for chunk in zip(*chunks, strict=True)
        ]
        return [torch.cat(values) for values in zip(*parts, strict=True)]

    def _values(self, hidden: Tensor, labels: Tensor, *targets: Tensor) -> tuple[Tensor, ...]:
        logprobs = all_logprobs(self._model, hidden, self._temperature)
        values = [logprobs.gather(-1, labels[:, None])[:, 0]]
        if self._entropy:
            values.append(-(logprobs.exp() * logprobs).sum(-1))
        if self._divergence is not None:
            values.append(self._divergence(logprobs, *targets))
        return tuple(values)


def all_logprobs(model: Any, hidden: Tensor, temperature: float) -> Tensor:
    """Logprobs [n, V] at final hidden states [n, H], as the model's own code would give them."""
    logits = model.get_output_embeddings()(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    config = model.config.get_text_config()
    # The few families whose head is more than a matrix: Granite divides, Cohere multiplies, Gemma caps.
    if scaling := getattr(config, "logits_scaling", None):
        logits = logits / scaling
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    logprobs: Tensor = (logits / temperature if temperature != 1.0 else logits).log_softmax(-1)
    return logprobs
