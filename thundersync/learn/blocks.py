"""The block tree: exact gradients of token runs that share a prefix, over an unmodified Hugging Face decoder.

A block is a batch of token runs with labels on the predicting positions (position i predicts label i, which may be
the first token of a child block). Its ancestors are its prefix; their keys and values reach it through *proxies*
(detached leaves), so K/V is the only thing that crosses a cut. A child's backward leaves adjoints on its ancestors'
proxies; an ancestor's own backward takes them in: children before parents, each block once. A group's prompt is the
root: run once, differentiated once, whatever the number of rollouts.

Knows nothing of rewards, groups or optimizers. Refuses (Unsplittable) what a cut would make silently wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from thundersync.errors import ThundersyncError
from thundersync.learn.attention import Rows, attend
from thundersync.learn.head import Head

ATTENTION = "thundersync_blocks"
NO_LABEL = -1


class Unsplittable(ThundersyncError):
    """The model's attention sees more than keys and values across a cut; its sequences must run whole."""


KeyValues = dict[int, tuple[Tensor, Tensor]]
"""Layer -> (keys, values), each [B, kv_heads, T, head_size]."""


def use_block_attention(model: PreTrainedModel) -> None:
    """Let `model` attend through blocks: registered in the model library's own attention registry."""
    AttentionInterface.register(ATTENTION, _attend)
    model.config._attn_implementation = ATTENTION


class Block:
    """A batch of token runs after a common prefix.

    `tokens` and `labels` are [B, T]; NO_LABEL marks positions that predict nothing. Rows are right-padded: causal
    attention keeps padding out of every real position, and padding has no labels. A parent has B rows or one row,
    which all rows of the child then share.

    With `lengths`, rows lie end to end instead, in one row [1, sum of lengths] without padding: everything but
    attention takes them as they lie. Such a block has no children.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokens: Tensor,
        labels: Tensor,
        parent: Block | None = None,
        *,
        lengths: Sequence[int] = (),
    ) -> None:
        self._model = model
        self.tokens, self.labels = tokens, labels
        self.lengths = list(lengths)
        self.rows = Rows(lengths, tokens.device) if lengths else None
        self.ancestors: list[Block] = [] if parent is None else [*parent.ancestors, parent]
        self.start = sum(ancestor.tokens.shape[1] for ancestor in self.ancestors)
        self.fresh: KeyValues = {}
        self.proxies: KeyValues = {}
        self.recording = False

    def forward(self, head: Head | None = None) -> list[Tensor]:
        """What `head` makes of the labelled positions, values [N] each in row-major order, with a graph if gradients
        are on; nothing without a head."""
        lengths = self.lengths or [self.tokens.shape[1]]
        device = self.tokens.device
        positions = torch.cat([torch.arange(self.start, self.start + n, device=device) for n in lengths])[None]
        self.fresh = {}
        self.recording = True
        # A model that cannot be cut keeps its own attention, and its blocks have no ancestors and no children.
        cut = self._model.config._attn_implementation == ATTENTION
        context = {"block": self} if cut else {}
        hidden = self._model.model(
            input_ids=self.tokens, position_ids=positions, use_cache=False, **context
        ).last_hidden_state
        self.recording = False  # what activation checkpointing runs again in the backward is not new
        if cut and len(self.fresh) != self._model.config.get_text_config().num_hidden_layers:
            raise Unsplittable("not every layer of the model is an attention layer that a block can read")
        if head is None:
            return []
        at = self.labels != NO_LABEL
        return head(hidden[at], self.labels[at])

    @torch.no_grad()
    def open(self) -> None:
        """Run once without a graph and publish keys and values for children."""
        self.forward()
        self.publish()
        self.fresh = {}

    def publish(self, *, connected: bool = False) -> None:
        """Let children attend to this forward's keys and values: through float32 leaves, or `connected` to this
        forward's graph, so that a child's backward goes on into it."""
        through = _wide if connected else _leaf
        self.proxies = {layer: (through(k), through(v)) for layer, (k, v) in self.fresh.items()}

    def backward(
        self,
        values: Sequence[Tensor],
        weights: Sequence[Tensor | None],
        adjoint: Sequence[Tensor] = (),
        *,
        keep_graph: bool = False,
    ) -> None:
        """One reverse pass: d/d(parameters and ancestors) of sum(weights x values) + <adjoint, own K/V>.

        `values` as this forward gave them and `weights` [N] on each (None: no weight); `adjoint` as `take_adjoint`
        gave it, or empty for a leaf. `keep_graph` leaves the forward for another backward.
        """
        pairs = [(value, weight.to(value)) for value, weight in zip(values, weights, strict=True) if weight is not None]
        own = self._own_keys_and_values() if adjoint else []
        pairs += [(output, cotangent.to(output)) for output, cotangent in zip(own, adjoint, strict=True)]
        if not keep_graph:
            self.fresh = {}
        if pairs := [(output, cotangent) for output, cotangent in pairs if output.numel()]:
            outputs, cotangents = zip(*pairs, strict=True)
            torch.autograd.backward(outputs, cotangents, retain_graph=keep_graph)

    def pull(self, adjoint: Sequence[Tensor]) -> None:
        """Run again, and take what children owe the keys and values into the parameters and the ancestors."""
        self.forward()
        self.backward([], [], adjoint)

    def leaves(self) -> list[Tensor]:
        """The published keys and values, in K, V order per layer."""
        return [proxy for pair in self.proxies.values() for proxy in pair]

    def take_adjoint(self) -> list[Tensor]:
        """What children's backwards left on the proxies since the last call (float32), in K, V order per layer."""
        adjoint = []
        for leaf in self.leaves():
            adjoint.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
            leaf.grad = None
        return adjoint

    def _own_keys_and_values(self) -> list[Tensor]:
        return [tensor for layer in self.proxies for tensor in self.fresh[layer]]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    block: Block | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function: query [B, heads, T, d]; key, value [B, kv_heads, T, d] -> [B, T, heads, d]."""
    if block is None:
        raise Unsplittable("the model was called outside a block")
    if attention_mask is not None:
        raise Unsplittable("the model hands in a mask of its own, which a cut would ignore")
    window = options.get("sliding_window")
    if options.get("softcap") or options.get("s_aux") is not None or dropout:
        raise Unsplittable("attention with soft caps, sinks or dropout cannot be cut into blocks")
    if window and window < block.start + max(block.lengths or [block.tokens.shape[1]]):
        raise Unsplittable(f"a sliding window of {window} tokens is shorter than the sequence")
    layer: int = module.layer_idx  # type: ignore[assignment]
    if block.recording:
        block.fresh[layer] = (key, value)
    past = [a.proxies[layer] for a in block.ancestors]
    if block.rows is not None:
        query, key, value = (block.rows.apart(tensor) for tensor in (query, key, value))
    out = attend(past, query, key, value, scaling).transpose(1, 2)
    return (out if block.rows is None else block.rows.end_to_end(out)), None


def _leaf(tensor: Tensor) -> Tensor:
    return _wide(tensor.detach()).requires_grad_()


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
