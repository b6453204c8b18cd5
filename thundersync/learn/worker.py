"""A trainer worker: its own process, one policy replica, requests in, replies out, strictly in order.

Holds the step's sum, the parts of open groups and the optimizer. Decides nothing: what to work, and with which
weight, is the coordinator's business. Ends by itself when its parent is gone.
"""

from __future__ import annotations

import argparse
import resource
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq

from thundersync.generate.arena import create_arena, fill_arena
from thundersync.generate.base import WeightArena
from thundersync.generate.child import end_with_parent, pin
from thundersync.learn import messages as m
from thundersync.learn.checkpoint import load_optimizer, save_checkpoint
from thundersync.learn.flat import FlatParameters
from thundersync.learn.optimizer import Optimizer
from thundersync.learn.policy import load_policy
from thundersync.learn.step_gradient import StepGradient


class Worker:
    """Answers one request at a time."""

    def __init__(self) -> None:
        self._policy: Any = None
        self._gradient: StepGradient
        self._optimizer: Optimizer
        self._flat: FlatParameters
        self._arena: WeightArena

    def answer(self, request: m.AnyRequest) -> m.AnyReply:
        match request:
            case m.Setup():
                return self._setup(request)
            case m.OpenStep(prefix=prefix):
                return _timed(lambda: self._gradient.open(prefix))
            case m.RunPass():
                return self._gradient.run(request)
            case m.CloseGroup(group_id=group_id, join=join):
                return _timed(lambda: self._gradient.close_group(group_id, join))
            case m.Discard():
                return _timed(self._gradient.discard)
            case m.Commit(scale=scale):
                return self._commit(scale)
            case m.Score(token_ids=token_ids):
                return m.Scores(logprobs=self._gradient.score(token_ids))
            case m.Save(path=path):
                return self._save(Path(path))
            case m.Stop():
                return m.Done()

    def _setup(self, request: m.Setup) -> m.Ready:
        if request.cpus:
            pin(request.cpus)
        torch.set_num_threads(max(1, len(request.cpus)))
        source = request.checkpoint or request.model_path
        self._policy, shares_prompts = load_policy(
            source,
            dtype=request.dtype,
            device=request.device,
            max_model_len=request.max_model_len,
        )
        self._flat = FlatParameters(self._policy)
        self._gradient = StepGradient(
            self._policy,
            self._flat,
            temperature=request.temperature,
            importance_cap=request.importance_cap,
            shares_prompts=shares_prompts,
        )
        self._optimizer = Optimizer(self._flat, request)
        if request.checkpoint:
            load_optimizer(Path(request.checkpoint), self._optimizer)
        self._arena = create_arena(request.arena_path, self._policy.named_parameters(), dtype=request.dtype)
        return m.Ready(
            parameters=self._flat.size,
            shares_prompts=shares_prompts,
            arena=self._arena,
            device=request.device,
        )

    def _save(self, path: Path) -> m.Done | m.NotSaved:
        try:
            return _timed(lambda: save_checkpoint(path, self._policy, self._optimizer))
        except Exception as error:  # a full disk comes as many kinds of error, and none has touched the policy
            return m.NotSaved(error=f"{type(error).__name__}: {error}")

    def _commit(self, scale: float) -> m.Committed:
        began = time.monotonic()
        gradient = self._gradient.finish(scale)
        norm, finite, lr = self._optimizer.step(gradient)
        self._gradient.discard()
        if finite:
            self._arena = fill_arena(self._arena, self._policy.named_parameters())
        return m.Committed(
            finite=finite,
            grad_norm=norm,
            lr=lr,
            busy_s=time.monotonic() - began,
            memory_peak_gib=_peak_gib(),
            arena=self._arena,
        )


def serve(endpoint: str, parent: int, folder: Path) -> None:
    """Connect and answer until told to stop. When the parent is gone, end at once and remove `folder`."""
    end_with_parent(parent, remove=folder)
    decoder, encoder = msgspec.msgpack.Decoder(m.AnyRequest), msgspec.msgpack.Encoder()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 2000
    socket.connect(endpoint)
    worker = Worker()
    try:
        socket.send(b"hello")
        while True:
            number, payload = socket.recv_multipart()
            request = decoder.decode(payload)
            try:
                reply = worker.answer(request)
            except BaseException as error:
                traceback.print_exc()
                broken = m.Broken(error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
                socket.send_multipart((number, encoder.encode(broken)))
                raise
            socket.send_multipart((number, encoder.encode(reply)))
            if isinstance(request, m.Stop):
                return
    finally:
        socket.close()
        zmq.Context.instance().term()


def _timed(work: Callable[[], object]) -> m.Done:
    began = time.monotonic()
    work()
    return m.Done(busy_s=time.monotonic() - began)


def _peak_gib() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    serve(arguments.endpoint, arguments.parent, arguments.folder)
