"""A trainer worker: its own process, one policy replica, requests in, replies out, strictly in order.

Holds the step's sum, the parts of open groups and the optimizer. Decides nothing: what to work, and with which
weight, is the coordinator's business. Ends by itself when its parent is gone.
"""

from __future__ import annotations

import argparse
import resource
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq
from torch import Tensor

from thundersync.generate.arena import create_arena, fill_arena, tensor_checksum
from thundersync.generate.base import WeightArena
from thundersync.generate.child import end_with_parent, pin
from thundersync.learn import messages as m
from thundersync.learn.checkpoint import load_optimizer, save_checkpoint
from thundersync.learn.collective import Ranks, RanksLost
from thundersync.learn.flat import FlatParameters
from thundersync.learn.frozen import FrozenModels
from thundersync.learn.lora import has_adapter, published_parameters, without_adapter
from thundersync.learn.one_piece import one_piece_gradient, relative_l2, worst_tensor
from thundersync.learn.optimizer import Optimizer
from thundersync.learn.policy import load_frozen, load_policy, load_reference
from thundersync.learn.rounding import last_place_noise
from thundersync.learn.step_gradient import StepGradient


class Worker:
    """Answers one request at a time."""

    def __init__(self) -> None:
        self._policy: Any = None
        self._ranks = Ranks.alone()
        self._terms: m.Terms
        self._frozen: FrozenModels
        self._gradient: StepGradient
        self._optimizer: Optimizer
        self._flat: FlatParameters
        self._arena: WeightArena | None = None
        self._reference: Tensor | None = None

    def answer(self, request: m.AnyRequest) -> m.AnyReply:
        if isinstance(request, m.StepWork) and self._gradient.spoilt:
            # Nothing of a step that can only be discarded is worked any further.
            return m.PassReport(busy_s=0.0) if isinstance(request, m.Passes) else m.Done()
        match request:
            case m.Setup():
                return self._setup(request)
            case m.OpenStep(prefix=prefix):
                return _timed(lambda: self._gradient.open(prefix))
            case m.RunPass():
                return self._gradient.run(request)
            case m.RunHeld():
                return self._gradient.run_held(request)
            case m.SettleHeld():
                return _timed(lambda: self._gradient.settle_held(request))
            case m.RunTurns():
                return self._gradient.run_turns(request)
            case m.CloseBranch(branch_id=branch_id, group_id=group_id):
                return _timed(lambda: self._gradient.close_branch(branch_id, group_id))
            case m.CloseCohort(cohort_id=cohort_id, groups=groups, join=join):
                return _timed(lambda: self._gradient.close_cohort(cohort_id, groups, join))
            case m.Discard():
                return _timed(self._gradient.discard)
            case m.Commit(scales=scales):
                return self._commit(scales)
            case m.Reference(pieces=pieces, scales=scales):
                return _timed(lambda: self._keep_reference(pieces, scales))
            case m.Floor(pieces=pieces, scales=scales):
                with last_place_noise(self._policy):
                    return self._against_reference(self._one_piece(pieces, scales))
            case m.Compare(scales=scales):
                return self._against_reference(self._gradient.finish(scales))
            case m.Limits(resident_parts=resident_parts, block_tokens=block_tokens):
                if torch.cuda.is_available():
                    torch.cuda.reset_peak_memory_stats()  # what comes now is measured by itself
                return _timed(lambda: self._gradient.limit(resident_parts, block_tokens))
            case m.Pin(cpus=cpus):
                return _timed(lambda: _pin(cpus))
            case m.MeasureKl(rows=rows):
                return m.Scores(logprobs=self._gradient.forward.measure_kl(rows))
            case m.Score(token_ids=token_ids):
                return m.Scores(logprobs=self._gradient.forward.score(token_ids))
            case m.Save(path=path):
                return self._save(Path(path))
            case m.Stop():
                self._ranks.close()
                return m.Done()

    def _setup(self, request: m.Setup) -> m.Ready:
        _pin(request.cpus)
        self._policy, shares_prompts = load_policy(
            request.checkpoint or request.model_path,
            dtype=request.dtype,
            device=request.device,
            max_model_len=request.max_model_len,
            lora=request.lora,
            activation_checkpointing=request.activation_checkpointing,
            seed=request.seed,
        )
        self._terms = request.terms
        self._frozen = self._frozen_models(request)
        self._flat = FlatParameters(self._policy)
        self._gradient = StepGradient(
            self._policy,
            self._flat,
            request.terms,
            shares_prompts=shares_prompts,
            frozen=self._frozen,
            resident_parts=request.resident_parts,
            block_tokens=request.block_tokens,
        )
        self._ranks = Ranks.join(
            request.rank, request.world, request.rendezvous, request.device, timeout_s=request.timeout_s
        )
        self._optimizer = Optimizer(self._flat, request.optim, self._ranks)
        if request.checkpoint:
            load_optimizer(Path(request.checkpoint), self._optimizer)
        if request.rank == 0:
            self._arena = create_arena(request.arena_path, published_parameters(self._policy), dtype=request.dtype)
        return m.Ready(
            parameters=self._flat.size,
            shares_prompts=shares_prompts,
            arena=self._arena,
            device=request.device,
        )

    def _frozen_models(self, request: m.Setup) -> FrozenModels:
        where: dict[str, Any] = {"dtype": request.dtype, "device": request.device}
        teacher = load_frozen(request.teacher_path, **where) if request.teacher_path else None
        if not request.terms.kl:
            return FrozenModels(teacher=teacher)
        if has_adapter(self._policy):
            policy = self._policy
            return FrozenModels(teacher=teacher, reference=policy, as_reference=lambda: without_adapter(policy))
        reference, _ = load_reference(request.reference_path, max_model_len=request.max_model_len, **where)
        return FrozenModels(teacher=teacher, reference=reference)

    def _save(self, path: Path) -> m.Done | m.NotSaved:
        try:
            return _timed(lambda: save_checkpoint(path, self._policy, self._optimizer))
        except Exception as error:  # a full disk comes as many kinds of error, and none has touched the policy
            return m.NotSaved(error=f"{type(error).__name__}: {error}")

    def _commit(self, scales: list[float]) -> m.Committed:
        began = time.monotonic()
        self._reference = None  # an audited step's: not kept beyond it
        norm, finite = self._optimizer.reduce(self._gradient.finish(scales))
        lr = 0.0
        if finite:
            lr = self._optimizer.step()
            if self._arena is not None:
                self._arena = fill_arena(self._arena, published_parameters(self._policy))
        else:
            self._optimizer.drop()
        self._gradient.discard()
        return m.Committed(
            finite=finite,
            grad_norm=norm,
            lr=lr,
            busy_s=time.monotonic() - began,
            memory_peak_gib=_peak_gib(),
            arena=self._arena,
        )

    def _keep_reference(self, pieces: list[m.ReferencePiece], scales: list[float]) -> None:
        self._reference = self._ranks.total(self._one_piece(pieces, scales))

    def _one_piece(self, pieces: list[m.ReferencePiece], scales: list[float]) -> Tensor:
        return one_piece_gradient(self._policy, self._flat, self._terms, self._frozen, pieces, scales)

    def _against_reference(self, own: Tensor) -> m.Comparison:
        """`own` [P] is this worker's share of a gradient."""
        assert self._reference is not None
        whole = self._ranks.total(own)
        worst, name = worst_tensor(self._flat, whole, self._reference)
        return m.Comparison(
            relative_l2=relative_l2(whole, self._reference),
            worst=worst,
            worst_name=name,
            norm=float(torch.linalg.vector_norm(self._reference)),
            digest=tensor_checksum(whole),
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
                broken = m.Broken(
                    error=f"{type(error).__name__}: {error}",
                    traceback=traceback.format_exc(),
                    by_another=isinstance(error, RanksLost),
                )
                socket.send_multipart((number, encoder.encode(broken)))
                raise
            socket.send_multipart((number, encoder.encode(reply)))
            if isinstance(request, m.Stop):
                return
    finally:
        socket.close()
        zmq.Context.instance().term()


def _pin(cpus: Sequence[int]) -> None:
    pin(cpus)
    torch.set_num_threads(max(1, len(cpus)))


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
