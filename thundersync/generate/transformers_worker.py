"""The process of the transformers engine: loads the model, batches requests, takes weights.

Usage: python -m thundersync.generate.transformers_worker SETTINGS-AS-JSON, frames on stdin and stdout. It ends when
its stdin closes, which the kernel does for a coordinator that dies. Knows nothing of why anyone asks.
"""

import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch

from thundersync.generate.arena import arena_faults, open_arena, tensor_checksum
from thundersync.generate.batching import Batcher, Live, LiveSequence, StopText
from thundersync.generate.child import pin
from thundersync.generate.kept_prefixes import CacheMemory
from thundersync.generate.manifest import Manifest, read_manifest
from thundersync.generate.packed_attention import NAME, PackedAttention
from thundersync.generate.transformers_messages import (
    Abort,
    Answer,
    Ask,
    FromWorker,
    Publish,
    Published,
    Ready,
    Score,
    Scores,
    ToWorker,
    WorkerSettings,
    frame,
    read_frame,
)

SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}


class TransformersWorker:
    """One model and its requests; `run` returns when the coordinator hangs up."""

    def __init__(self, settings: WorkerSettings, requests: BinaryIO, answers: BinaryIO) -> None:
        self._settings = settings
        self._requests = requests
        self._answers = answers
        self._inbox: queue.SimpleQueue[ToWorker] = queue.SimpleQueue()
        self._version = 0

    def run(self) -> None:
        threading.Thread(target=self._read, name="requests", daemon=True).start()
        manifest = read_manifest(Path(self._settings.model_path))
        attention = PackedAttention()
        model = _load(self._settings, manifest, attention)
        memory = _memory(self._settings, model)
        batcher = _batcher(self._settings, model, attention, memory, manifest)
        fitting = memory.capacity_tokens * 4 // self._settings.max_model_len
        self._send(
            Ready(
                max_concurrency=max(1, min(self._settings.max_num_seqs, fitting)),
                vocabulary=model.get_output_embeddings().out_features,
            )
        )
        while True:
            for message in self._arrived(wait=not batcher.busy):
                match message:
                    case Ask() | Score():
                        batcher.add(message)
                    case Abort(number=number):
                        batcher.abort(number)
                    case Publish(arena=arena, version=version):
                        faults = manifest.faults(arena, dtype=self._settings.dtype) or _take(model, arena)
                        batcher.forget_prefixes()
                        self._version = version
                        self._send(Published(version=version, faults=faults))
            if batcher.busy:
                for sequence in batcher.step():
                    self._send(self._answer(sequence))

    def _arrived(self, *, wait: bool) -> list[ToWorker]:
        messages = [self._inbox.get()] if wait else []
        while not self._inbox.empty():
            messages.append(self._inbox.get())
        return messages

    def _answer(self, sequence: Live) -> Answer | Scores:
        if isinstance(sequence, LiveSequence):
            return Answer(
                number=sequence.number,
                token_ids=sequence.sampled_ids,
                logprobs=sequence.logprobs,
                finish_reason=sequence.finish_reason or "abort",
                policy_version=self._version,
                cached_tokens=sequence.cached_tokens,
            )
        return Scores(
            number=sequence.number,
            logprobs=sequence.logprobs,
            top_ids=sequence.top_ids,
            top_logprobs=sequence.top_logprobs,
            policy_version=self._version,
            cached_tokens=sequence.cached_tokens,
        )

    def _read(self) -> None:
        decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToWorker)
        while (body := read_frame(self._requests)) is not None:
            self._inbox.put(decoder.decode(body))
        # The coordinator has closed us or is gone; either way nobody waits for what is being computed.
        os._exit(0)

    def _send(self, message: FromWorker) -> None:
        self._answers.write(frame(message))
        self._answers.flush()


def _load(settings: WorkerSettings, manifest: Manifest, attention: PackedAttention) -> Any:
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.utils import logging

    odd = set(manifest.layer_types) - SUPPORTED_LAYERS
    if odd:
        # Such layers carry state from token to token and would mix the sequences of a packed row.
        raise ValueError(f"the transformers engine cannot batch layers of kind {sorted(odd)}; use vLLM")
    logging.disable_progress_bar()
    AttentionInterface.register(NAME, attention)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(
        settings.model_path, dtype=getattr(torch, settings.dtype), attn_implementation=NAME
    )
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        raise ValueError("the transformers engine has no attention with soft caps; use vLLM")
    return model.to(device).eval().requires_grad_(False)


def _memory(settings: WorkerSettings, model: Any) -> CacheMemory:
    config = model.config.get_text_config()
    device = next(model.parameters()).device
    budget = settings.kv_cache_bytes
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        budget = int(free * settings.gpu_memory_share)
    return CacheMemory(
        layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        dtype=getattr(torch, settings.dtype),
        device=device,
        budget_bytes=budget,
    )


def _batcher(
    settings: WorkerSettings, model: Any, attention: PackedAttention, memory: CacheMemory, manifest: Manifest
) -> Batcher:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings.model_path)
    ends = {*manifest.end_ids, tokenizer.eos_token_id} - {None}
    return Batcher(
        model,
        attention,
        memory,
        max_num_seqs=settings.max_num_seqs,
        end_ids=frozenset(ends),
        make_stop=lambda stops: StopText(tokenizer.backend_tokenizer, stops),
        random=torch.Generator(device=next(model.parameters()).device).manual_seed(settings.seed),
    )


def _take(model: Any, arena: Any) -> list[str]:
    """Copy the arena into the model's parameters, in place; sentences about what did not arrive."""
    views = open_arena(arena)
    if faults := arena_faults(arena, views):
        return faults
    # A tied head is the embedding itself here, one parameter under two names.
    parameters = dict(model.named_parameters())
    if unknown := [name for name in views if name not in parameters]:
        return [f"{name} is not a parameter of the loaded model" for name in unknown]
    with torch.no_grad():
        for name, view in views.items():
            parameters[name].copy_(view)
    return [
        f"{spec.name} is stale" for spec in arena.tensors if tensor_checksum(parameters[spec.name]) != spec.checksum
    ]


def main() -> None:
    settings = msgspec.json.decode(sys.argv[1], type=WorkerSettings)
    # The pipe keeps a descriptor of its own; whatever prints lands in the log.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    pin(settings.cpus)
    torch.set_num_threads(settings.threads)
    TransformersWorker(settings, sys.stdin.buffer, answers).run()


if __name__ == "__main__":
    main()
