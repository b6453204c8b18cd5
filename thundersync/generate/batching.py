"""Continuous batching for the transformers engine: which tokens the next forward pass takes, and what it yields.

Every pass takes one token of each sequence that is sampling and chunks of prompts up to a limit, so a long prompt
never stops the others. Knows sequences and logits; nothing of pipes, weights or policy versions.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thundersync.core.types import FinishReason
from thundersync.generate.kept_prefixes import CacheMemory, common_prefix
from thundersync.generate.packed_attention import PackedAttention, Segment, SequenceCache
from thundersync.generate.transformers_messages import Ask

# Tokens of one forward pass: more would delay the sampling sequences without using the cores better.
PASS_TOKENS = 512
# A prompt waits for a live one that is still computing at least this many more tokens of the same prefix.
WAIT_TOKENS = 32


class StopText:
    """Looks for stop strings in a reply as its tokens come, special tokens left out."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._stream = DecodeStream(skip_special_tokens=True)
        self._text = ""

    def found_after(self, token_id: int) -> bool:
        """Whether `token_id` completes a stop string."""
        if not self._stops:
            return False
        new = self._stream.step(self._tokenizer, token_id) or ""
        self._text = self._text[-self._longest :] + new
        return any(stop in self._text for stop in self._stops)


class LiveSequence:
    """One request being worked: its prompt, what it has sampled, its cache."""

    def __init__(self, ask: Ask, cache: SequenceCache, stop: StopText) -> None:
        self.ask = ask
        self.cache = cache
        self.stop = stop
        self.cached_tokens = len(cache.token_ids)
        self.sampled_ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: FinishReason | None = None

    def due(self, limit: int) -> list[int]:
        """The next tokens to feed, at most `limit`: a chunk of the prompt, or the token sampled last."""
        done = len(self.cache.token_ids)
        if done < len(self.ask.prompt_ids):
            return self.ask.prompt_ids[done : done + limit]
        return self.sampled_ids[-1:]

    def samples_after(self, count: int) -> bool:
        """Whether feeding `count` more tokens completes the prompt, so that a token can be sampled."""
        return len(self.cache.token_ids) + count >= len(self.ask.prompt_ids)

    def take(self, token_id: int, logprob: float, end_ids: frozenset[int]) -> None:
        self.sampled_ids.append(token_id)
        self.logprobs.append(logprob)
        if token_id in end_ids or self.stop.found_after(token_id):
            self.finish_reason = "stop"
        elif len(self.sampled_ids) >= self.ask.max_tokens:
            self.finish_reason = "length"


class Batcher:
    """All requests of one engine, from arrival to their last token."""

    def __init__(
        self,
        model: Any,
        attention: PackedAttention,
        memory: CacheMemory,
        *,
        max_num_seqs: int,
        end_ids: frozenset[int],
        make_stop: Callable[[Sequence[str]], StopText],
        random: torch.Generator,
    ) -> None:
        self._model = model
        self._attention = attention
        self._memory = memory
        self._max_num_seqs = max_num_seqs
        self._end_ids = end_ids
        self._make_stop = make_stop
        self._random = random
        self._waiting: deque[Ask] = deque()
        self._live: list[LiveSequence] = []

    @property
    def busy(self) -> bool:
        return bool(self._live or self._waiting)

    def add(self, ask: Ask) -> None:
        self._waiting.append(ask)

    def abort(self, number: int) -> None:
        self._waiting = deque(ask for ask in self._waiting if ask.number != number)
        for sequence in [sequence for sequence in self._live if sequence.ask.number == number]:
            self._end(sequence)

    def forget_prefixes(self) -> None:
        self._memory.forget()

    @torch.inference_mode()
    def step(self) -> list[LiveSequence]:
        """One forward pass; the sequences it finished."""
        self._admit()
        segments, sampling = self._plan()
        device = segments[0].cache.kv.device
        token_ids = torch.tensor([[token for s in segments for token in s.token_ids]], device=device)
        positions = torch.tensor([[p for s in segments for p in range(s.done, s.done + s.count)]], device=device)
        last = torch.tensor([segments[i].start + segments[i].count - 1 for i, _ in sampling], device=device)
        self._attention.segments = segments
        logits = self._model(input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=last).logits[
            0
        ]
        for segment in segments:
            segment.cache.token_ids.extend(segment.token_ids)
        if sampling:
            temperatures = [sequence.ask.temperature for _, sequence in sampling]
            tokens, logprobs = sample(logits, temperatures, self._random)
            for (_, sequence), token, logprob in zip(sampling, tokens, logprobs, strict=True):
                sequence.take(token, logprob, self._end_ids)
        finished = [sequence for _, sequence in sampling if sequence.finish_reason is not None]
        for sequence in finished:
            self._end(sequence)
        return finished

    def _admit(self) -> None:
        while self._waiting and len(self._live) < self._max_num_seqs:
            ask = self._waiting[0]
            if self._sharer_still_computing(ask):
                return
            cache = self._memory.open(ask.prompt_ids, len(ask.prompt_ids) + ask.max_tokens)
            if cache is None:
                return
            self._waiting.popleft()
            self._live.append(LiveSequence(ask, cache, self._make_stop(ask.stop)))

    def _sharer_still_computing(self, ask: Ask) -> bool:
        """Whether a live prompt is on its way to a prefix this one could copy: the rollouts of a group start as one."""
        return any(
            common_prefix(live.ask.prompt_ids, ask.prompt_ids) - len(live.cache.token_ids) >= WAIT_TOKENS
            for live in self._live
        )

    def _plan(self) -> tuple[list[Segment], list[tuple[int, LiveSequence]]]:
        """Segments of the next pass, and (segment index, sequence) where it yields a token to sample."""
        segments: list[Segment] = []
        sampling: list[tuple[int, LiveSequence]] = []
        start = 0
        # Sequences that sample go first: one token each, always; prompts share what is left.
        for sequence in sorted(self._live, key=lambda live: not live.sampled_ids):
            limit = PASS_TOKENS - start
            if limit <= 0 and not sequence.sampled_ids:
                continue
            token_ids = sequence.due(limit)
            if sequence.samples_after(len(token_ids)):
                sampling.append((len(segments), sequence))
            segments.append(Segment(sequence.cache, token_ids, start))
            start += len(token_ids)
        return segments, sampling

    def _end(self, sequence: LiveSequence) -> None:
        self._live.remove(sequence)
        self._memory.close(sequence.cache)


def sample(
    logits: torch.Tensor, temperatures: Sequence[float], random: torch.Generator
) -> tuple[list[int], list[float]]:
    """One token per row of `logits` [S, V], and its log-probability after temperature, computed in float32.

    Temperature 0 is greedy, with log-probabilities at temperature 1.
    """
    scale = torch.tensor([t if t > 0 else 1.0 for t in temperatures], device=logits.device)[:, None]
    logprobs = torch.log_softmax(logits.float() / scale, dim=-1)
    tokens = torch.multinomial(logprobs.exp(), 1, generator=random)[:, 0]
    greedy = torch.tensor([t <= 0 for t in temperatures], device=logits.device)
    tokens = torch.where(greedy, logprobs.argmax(dim=-1), tokens)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    return tokens.tolist(), chosen.tolist()
