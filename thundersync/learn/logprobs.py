"""Hidden states -> log-probabilities of given tokens, as the model's own head would give them, in float32."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

CHUNK_TOKENS = 512
"""Rows of logits held at once; beyond it they are made again in the backward instead of kept."""


def token_logprobs(model: PreTrainedModel, hidden: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """Logprobs [N] of `labels` [N] at final hidden states [N, H]; logits are divided by `temperature` first.

    The sampler divides by the same temperature, so trainer and engine speak of one distribution.
    """
    if hidden.shape[0] <= CHUNK_TOKENS:
        return _logprobs(model, hidden, labels, temperature)
    chunks = [
        checkpoint(_logprobs, model, h, y, temperature, use_reentrant=False)
        if torch.is_grad_enabled()
        else _logprobs(model, h, y, temperature)
        for h, y in zip(torch.split(hidden, CHUNK_TOKENS), torch.split(labels, CHUNK_TOKENS), strict=True)
    ]
    return torch.cat(chunks)


def _logprobs(model: PreTrainedModel, hidden: Tensor, labels: Tensor, temperature: float) -> Tensor:
    if hidden.shape[0] == 0:
        return hidden.new_zeros(0, dtype=torch.float32)
    logits = model.get_output_embeddings()(hidden).float()
    config = model.config.get_text_config()
    # The few families whose head is more than a matrix: Granite divides, Cohere multiplies, Gemma caps.
    if scaling := getattr(config, "logits_scaling", None):
        logits = logits / scaling
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    if temperature != 1.0:
        logits = logits / temperature
    logprobs: Tensor = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    return logprobs
