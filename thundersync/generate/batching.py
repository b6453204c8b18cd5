"""Continuous batching for the transformers engine: which tokens the next forward pass takes, and what it yields.

Every pass takes one token of each sequence that is sampling, and chunks of prompts and of sequences to score up to a
limit, so a long one never stops the others. Knows sequences and logits; nothing of pipes, weights or policy versions.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from thundersync.core.types import FinishReason
from thundersync.generate.kept_prefixes import CacheMemory, common_prefix
from thundersync.generate.packed_attention import PackedAttention, Segment, SequenceCache
from thundersync.generate.transformers_messages import Ask, Score
from thundersync.generate.transformers_scoring import ScoredSequence

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

    @property
    def number(self) -> int:
        return self.ask.number

    @property
    def prompt_ids(self) -> list[int]:
        return self.ask.prompt_ids

    @property
    def must_advance(self) -> bool:
        """Whether every pass takes its next token: it is sampling."""
        return bool(self.sampled_ids)

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None

    def due(self, limit: int) -> list[int]:
        """The next tokens to feed, at most `limit`: a chunk of the prompt, or the token sampled last."""
        done = len(self.cache.token_ids)
        if done < len(self.ask.prompt_ids):
            return self.ask.prompt_ids[done : done + limit]
        return self.sampled_ids[-1:]

    def rows(self, count: int) -> range:
        """Which of the next `count` tokens' logits are needed: the last one's, once it completes the prompt."""
        samples = len(self.cache.token_ids) + count >= len(self.ask.prompt_ids)
        return range(count - 1 if samples else count, count)

    def take(self, token_id: int, logprob: float, end_ids: frozenset[int]) -> None:
        self.sampled_ids.append(token_id)
        self.logprobs.append(logprob)
        ends = token_id in end_ids and not self.ask.to_limit
        if ends or self.stop.found_after(token_id):
            self.finish_reason = "stop"
        elif len(self.sampled_ids) >= self.ask.max_tokens:
            self.finish_reason = "length"


Live: TypeAlias = LiveSequence | ScoredSequence


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
        self._waiting: deque[Ask | Score] = deque()
        self._live: list[Live] = []

    @property
    def busy(self) -> bool:
        return bool(self._live or self._waiting)

    def add(self, ask: Ask | Score) -> None:
        self._waiting.append(ask)

    def abort(self, number: int) -> None:
        self._waiting = deque(ask for ask in self._waiting if ask.number != number)
        for sequence in [sequence for sequence in self._live if sequence.number == number]:
            self._end(sequence)

    def forget_prefixes(self) -> None:
        self._memory.forget()

    @torch.inference_mode()
    def step(self) -> list[Live]:
        """One forward pass; the sequences it finished."""
        self._admit()
        segments, owners = self._plan()
        device = segments[0].cache.kv.device
        token_ids = torch.tensor([[token for s in segments for token in s.token_ids]], device=device)
        positions = torch.tensor([[p for s in segments for p in range(s.done, s.done + s.count)]], device=device)
        rows = [sequence.rows(segment.count) for segment, sequence in zip(segments, owners, strict=True)]
        kept = [segment.start + row for segment, wanted in zip(segments, rows, strict=True) for row in wanted]
        self._attention.segments = segments
        output = self._model(
            input_ids=token_ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=torch.tensor(kept, dtype=torch.long, device=device),
        )
        for segment in segments:
            segment.cache.token_ids.extend(segment.token_ids)
        self._deal(output.logits[0], [(owner, len(wanted)) for owner, wanted in zip(owners, rows, strict=True)])
        finished = [sequence for sequence in owners if sequence.ended]
        for sequence in finished:
            self._end(sequence)
        return finished

    def _deal(self, logits: torch.Tensor, shares: Sequence[tuple[Live, int]]) -> None:
        """Give each sequence its rows of `logits` [S, V]; those that sample do so together."""
        sampling: list[LiveSequence] = []
        places: list[int] = []
        begin = 0
        for sequence, count in shares:
            if isinstance(sequence, ScoredSequence):
                sequence.take(logits[begin : begin + count])
            elif count:
                sampling.append(sequence)
                places.append(begin)
            begin += count
        if sampling:
            temperatures = [sequence.ask.temperature for sequence in sampling]
            tokens, logprobs = sample(logits[places], temperatures, self._random)
            for sequence, token, logprob in zip(sampling, tokens, logprobs, strict=True):
                sequence.take(token, logprob, self._end_ids)

    def _admit(self) -> None:
        while self._waiting and len(self._live) < self._max_num_seqs:
            ask = self._waiting[0]
            if self._sharer_still_computing(ask.reusable_ids):
                return
            cache = self._memory.open(ask.reusable_ids, ask.cache_tokens)
            if cache is None:
                return
            self._waiting.popleft()
            match ask:
                case Ask(stop=stop):
                    self._live.append(LiveSequence(ask, cache, self._make_stop(stop)))
                case Score():
                    self._live.append(ScoredSequence(ask, cache))

    def _sharer_still_computing(self, token_ids: Sequence[int]) -> bool:
        """Whether a live prompt is on its way to a prefix this one could copy: the rollouts of a group start as one."""
        return any(
            common_prefix(live.prompt_ids, token_ids) - len(live.cache.token_ids) >= WAIT_TOKENS for live in self._live
        )

    def _plan(self) -> tuple[list[Segment], list[Live]]:
        """Segments of the next pass, and whose each is."""
        segments: list[Segment] = []
        owners: list[Live] = []
        start = 0
        # Sequences that sample go first: one token each, always; the others share what is left.
        for sequence in sorted(self._live, key=lambda live: not live.must_advance):
            limit = PASS_TOKENS - start
            if limit <= 0 and not sequence.must_advance:
                continue
            token_ids = sequence.due(limit)
            segments.append(Segment(sequence.cache, token_ids, start))
            owners.append(sequence)
            start += len(token_ids)
        return segments, owners

    def _end(self, sequence: Live) -> None:
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
