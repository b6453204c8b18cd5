"""An engine under test next to an independent reference: the same weights in plain transformers, in this process."""

import copy
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from thundersync.config import EngineConfig
from thundersync.generate import make_generator
from thundersync.generate.arena import create_arena
from thundersync.generate.base import Generation, Generator, Sampling, TokenScores, WeightArena

MAX_MODEL_LEN = 512
MAX_TOPK = 64  # more than vLLM's own limit
# float32 engines against a float64 forward; stale weights are off by 0.1 and more.
TOLERANCE = 2e-4


def new_generator(
    backend: Any, model_path: Path, log_path: Path, *, kv_cache_gib: float = 1 / 16, max_topk: int = MAX_TOPK
) -> Generator:
    return make_generator(
        model_path,
        config=EngineConfig(backend=backend, kv_cache_gib=kv_cache_gib, max_num_seqs=16),
        max_model_len=MAX_MODEL_LEN,
        dtype="float32",
        log_path=log_path,
        max_topk=max_topk,
    )


class Rig:
    """A started generator, and the weights it should have."""

    def __init__(self, generator: Generator, model_path: Path, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.generator = generator
        self.folder = folder
        self.reference = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(model_path)
        self._numbers = itertools.count()

    async def generate(self, prompt_ids: Sequence[int], **sampling: Any) -> Generation:
        return await self.generator.generate(
            prompt_ids, Sampling(**sampling), request_id=f"request-{next(self._numbers)}"
        )

    async def score(self, token_ids: Sequence[int], start: int, topk: int = 0) -> TokenScores:
        return await self.generator.score(token_ids, start=start, topk=topk, request_id=f"score-{next(self._numbers)}")

    def change_weights(self, seed: int) -> None:
        """Move every weight of the reference by about a tenth of its size."""
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.reference.parameters():
                noise = torch.randn(parameter.shape, generator=random)
                parameter.add_(0.1 * noise * parameter.std(unbiased=False))

    def write_arena(self, **renamed: str) -> WeightArena:
        """The reference's weights in a fresh arena, names with dots as double underscores replaced by `renamed`."""
        path = self.folder / f"{next(self._numbers)}.arena"
        names = {old.replace("__", "."): new for old, new in renamed.items()}
        tensors = [(names.get(name, name), tensor) for name, tensor in self.reference.named_parameters()]
        return create_arena(path, [(name, tensor) for name, tensor in tensors if name], "float32")

    async def publish(self) -> float:
        """Publish the reference's weights as the next version."""
        return await self.generator.publish(self.write_arena(), version=self.generator.policy_version + 1)

    @torch.no_grad()
    def logprobs(self, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """The reference's log-probabilities of `token_ids` after `prompt_ids`, one forward over all of them."""
        table = torch.log_softmax(self._logits([*prompt_ids, *token_ids], len(prompt_ids)) / temperature, dim=-1)
        return table[torch.arange(len(token_ids)), torch.tensor(token_ids)].tolist()

    @torch.no_grad()
    def table(self, token_ids: Sequence[int], start: int) -> torch.Tensor:
        """The reference's log-probabilities [N, V] of every token at the places of `token_ids[start:]`."""
        return torch.log_softmax(self._logits(token_ids, start), dim=-1)

    @torch.no_grad()
    def best_tokens(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[int]:
        """The reference's most probable token at every place of a reply."""
        return self._logits([*prompt_ids, *token_ids], len(prompt_ids)).argmax(dim=-1).tolist()

    def _logits(self, token_ids: Sequence[int], start: int) -> torch.Tensor:
        """[N, V] before the places of `token_ids[start:]`, in float64: a float32 reference errs more than an engine."""
        exact = copy.deepcopy(self.reference).double()
        return exact(torch.tensor([[*token_ids]])).logits[0, start - 1 : -1]

    def worst_error(self, prompt_ids: Sequence[int], reply: Generation, temperature: float = 1.0) -> float:
        """The largest difference between the engine's logprobs and the reference's."""
        expected = self.logprobs(prompt_ids, reply.token_ids, temperature)
        assert len(reply.logprobs) == len(reply.token_ids)
        return max(abs(a - b) for a, b in zip(reply.logprobs, expected, strict=True))


def worst(left: Sequence[float], right: Sequence[float]) -> float:
    """The largest difference of two lists of equal length."""
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


def prompt(seed: int, length: int) -> list[int]:
    """Random ids without special tokens."""
    return torch.randint(3, 384, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
