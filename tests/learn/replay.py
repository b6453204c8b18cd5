"""Recorded steps replayed through the real stream, ledger and worker, in this process; and the one-piece reference."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from msgspec import Struct
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from thundersync.core.advantage import AdvantageRule, advantages
from thundersync.core.ledger import Ledger
from thundersync.core.objective import LossAggregation, Objective, SeparableObjective
from thundersync.core.ready_queue import PartRoom
from thundersync.core.turn_ledger import TurnLedger
from thundersync.core.types import (
    Failed,
    FinalContent,
    Outcome,
    Rollout,
    SampledTurn,
    Scored,
    StreamMode,
    TokenSequence,
    Turn,
)
from thundersync.learn import messages as m
from thundersync.learn.blocks import use_block_attention
from thundersync.learn.flat import FlatParameters
from thundersync.learn.frozen import FrozenModels
from thundersync.learn.settings import OptimSettings
from thundersync.learn.step_gradient import StepGradient
from thundersync.learn.stream import GradientStream
from thundersync.learn.turn_stream import Scorer, TurnStream
from thundersync.learn.worker import Worker
from thundersync.step import shared_prefix

R = TypeVar("R", bound=m.Reply)
OBJECTIVE = Objective()
RULE = AdvantageRule()
TIS = m.Terms(mismatch="tis", mismatch_high=2.0)


class RecordedStep(Struct, frozen=True, kw_only=True):
    """A step's rollouts, in membership order."""

    prompts: dict[str, list[int]]
    rollouts: list[Rollout]


def record(
    seed: int,
    *,
    groups: int = 3,
    size: int = 4,
    rewards: Sequence[float] = (0.0, 1.0),
    failed: float = 0.0,
    forked: float = 0.0,
    vocabulary: int = 300,
    common: int = 20,
    length: tuple[int, int] = (5, 30),
) -> RecordedStep:
    """Random tokens: prompts that share `common` tokens, rollouts of several sampled spans, some failed or forked."""
    draw = random.Random(seed)
    tokens = lambda n: [draw.randrange(3, vocabulary) for _ in range(n)]  # noqa: E731
    prefix = tokens(common)
    prompts = {f"g{g}": prefix + tokens(draw.randint(1, 9)) for g in range(groups)}
    rollouts = []
    for group, prompt in prompts.items():
        for index in range(size):
            sequences = [_sequence(draw, prompt, draw.randint(*length), vocabulary)]
            if draw.random() < forked:  # a rewritten history: the second sequence shares only part of the prompt
                sequences.append(_sequence(draw, prompt[: len(prompt) // 2] + tokens(4), 9, vocabulary))
            outcome: Outcome = Scored(reward=draw.choice(rewards), stop="submitted")
            if draw.random() < failed:
                outcome = Failed(reason="sandbox", detail="test")
            rollouts.append(
                Rollout(
                    rollout_id=f"{group}-{index}",
                    group_id=group,
                    task_id=group,
                    policy_version=0,
                    messages=[],
                    sequences=sequences,
                    turns=[Turn(index=0, sequence=0, start=0, end=1, finish_reason="stop", policy_version=0)],
                    outcome=outcome,
                    started_s=0.0,
                )
            )
    return RecordedStep(prompts=prompts, rollouts=rollouts)


def _sequence(draw: random.Random, prompt: list[int], length: int, vocabulary: int) -> TokenSequence:
    own = [draw.randrange(3, vocabulary) for _ in range(length)]
    # Tool results stand between sampled spans; the last token is always sampled.
    sampled = [True] * length
    for i in range(length // 3, length // 2):
        sampled[i] = False
    return TokenSequence(
        token_ids=prompt + own,
        sampled=[False] * len(prompt) + sampled,
        logprobs=[0.0] * len(prompt) + [-5.5 + draw.gauss(0, 0.5) if s else 0.0 for s in sampled],
        prompt_tokens=len(prompt),
    )


OPTIM = OptimSettings(
    lr=1e-3,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0.01,
    max_grad_norm=1.0,
    scheduler="constant",
    warmup_steps=0,
    max_steps=10,
)


def setup(model: Path, arena: Path, **changes: Any) -> m.Setup:
    values: dict[str, Any] = {
        "model_path": str(model),
        "dtype": "float32",
        "max_model_len": 1024,
        "arena_path": str(arena),
        "cpus": [],
        "device": "cpu",
        "terms": TIS,
        "optim": OPTIM,
    }
    return m.Setup(**(values | changes))


def float64_worker(model: Path) -> Worker:
    """A worker without optimizer and arena, over a float64 policy."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    for module in policy.modules():
        if isinstance(module, LlamaRMSNorm):  # the library's own computes in float32 whatever the model's dtype
            module.forward = functools.partial(_norm, module)  # type: ignore[method-assign]
    use_block_attention(policy)
    worker = Worker()
    flat = FlatParameters(policy)
    worker._gradient = StepGradient(policy, flat, m.Terms(), shares_prompts=True, frozen=FrozenModels())
    return worker


def _norm(module: LlamaRMSNorm, hidden: Tensor) -> Tensor:
    return module.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)


class InProcessLink:
    """A worker without its process: the same requests, answered at once."""

    waiting = 0

    def __init__(self, worker: Worker, index: int = 0) -> None:
        self.worker = worker
        self.index = index
        self.requests: list[m.AnyRequest] = []

    async def call(self, request: m.AnyRequest, expected: type[R], *, limit_s: float) -> R:
        self.requests.append(request)
        await asyncio.sleep(0)
        reply = self.worker.answer(request)
        assert isinstance(reply, expected)
        return reply


async def replay(
    worker: Worker | Sequence[Worker],
    step: RecordedStep,
    *,
    order: Sequence[int] | None = None,
    mode: StreamMode = "stream",
    objective: SeparableObjective = OBJECTIVE,
    skip_flat: bool = False,
    kl_in_reward: float = 0.0,
    max_tokens: int = 10_000,
    max_parts: int = 100,
    eager: bool = True,
    content: bool = False,
) -> tuple[Ledger, InProcessLink]:
    """Land the rollouts in `order`; `eager` lets the workers take what they can between two arrivals. With `content`
    the tokens come two arrivals before the reward, and some checkers fail once."""
    workers = [worker] if isinstance(worker, Worker) else list(worker)
    links = [InProcessLink(each, index) for index, each in enumerate(workers)]
    ledger = Ledger(
        {g: [r.rollout_id for r in step.rollouts if r.group_id == g] for g in step.prompts},
        objective=objective,
        min_group_size=2,
        skip_flat=skip_flat,
    )
    stream = GradientStream(
        ledger,
        links,  # type: ignore[arg-type]
        policy_version=0,
        prompts=step.prompts,
        prefix=shared_prefix(list(step.prompts.values())),
        shares_prompts=workers[0]._gradient._prompts.shares,
        mode=mode,
        max_tokens=max_tokens,
        room=PartRoom(most=max_parts),
        stall_timeout_s=30,
        emit=lambda event: None,
        kl_in_reward=kl_in_reward,
    )

    async def arrive() -> None:
        coming = [step.rollouts[index] for index in (order if order is not None else range(len(step.rollouts)))]
        for index in range(len(coming) + 2):
            if content and index < len(coming):
                stream.content(_final(coming[index], attempt=1))
                if index % 3 == 0:
                    await _pause(eager)
                    stream.attempt_ended(coming[index])
                    stream.content(_final(coming[index], attempt=2))
                await _pause(eager)
            late = index - 2 if content else index
            if 0 <= late < len(coming):
                await stream.land(coming[late])
                await _pause(eager)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stream.run())
        tasks.create_task(arrive())
    assert ledger.settled
    assert not stream.bad
    return ledger, links[0]


async def _pause(eager: bool) -> None:
    for _ in range(20 if eager else 0):
        await asyncio.sleep(0)


def _final(rollout: Rollout, *, attempt: int) -> FinalContent:
    return FinalContent(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        attempt=attempt,
        sequences=rollout.sequences,
        policy_version=0,
    )


async def replay_turns(worker: Worker, prompts: dict[str, list[int]], turns: Sequence[Any], **options: Any) -> Tensor:
    """The gradient alone of `replay_turns_told`."""
    return (await replay_turns_told(worker, prompts, turns, **options))[0]


async def replay_turns_told(
    worker: Worker,
    prompts: dict[str, list[int]],
    turns: Sequence[tuple[SampledTurn, Rollout | None]],
    *,
    objective: SeparableObjective,
    score: Scorer,
    schedule: Literal["deferred", "forward", "immediate"] = "forward",
    order: Sequence[int] | None = None,
    mode: StreamMode = "stream",
    max_tokens: int = 10_000,
    longest: int = 100,
    eager: bool = True,
) -> tuple[Tensor, list[m.AnyRequest]]:
    """Distil recorded turns in `order`; a turn's rollout, where given, ends with it. Gives the step's gradient [P], and
    what the worker was asked."""
    link = InProcessLink(worker)
    ids: dict[str, list[str]] = {group_id: [] for group_id in prompts}
    for turn, _ in turns:
        if turn.rollout_id not in ids[turn.group_id]:
            ids[turn.group_id].append(turn.rollout_id)
    stream = TurnStream(
        TurnLedger(ids),
        [link],  # type: ignore[list-item]
        objective=objective,
        score=score,
        policy_version=0,
        prompts=prompts,
        prefix=shared_prefix(list(prompts.values())),
        schedule=schedule,
        mode=mode,
        max_tokens=max_tokens,
        longest=longest,
        stall_timeout_s=30,
        emit=lambda event: None,
    )

    async def arrive() -> None:
        for index in order if order is not None else range(len(turns)):
            turn, rollout = turns[index]
            stream.sampled(turn)
            if rollout is not None:
                await stream.land(rollout)
            for _ in range(20 if eager else 0):
                await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stream.run())
        tasks.create_task(arrive())
    assert stream.ledger.settled
    gradient = worker._gradient.finish(stream.scales()).clone()
    worker._gradient.discard()
    return gradient, link.requests


def gradient_of(worker: Worker | Sequence[Worker], ledger: Ledger) -> Tensor:
    """The step's gradient of the minimised loss over all workers, before clipping; the step is then forgotten."""
    workers = [worker] if isinstance(worker, Worker) else list(worker)
    scales = ledger.objective.scales(ledger.tally())
    gradient = sum((each._gradient.finish(scales).clone() for each in workers), torch.zeros(()))
    for each in workers:
        assert each._gradient._pool.lent == 0
        each._gradient.discard()
    return gradient


def one_piece_gradient(
    model: Path,
    step: RecordedStep,
    *,
    loss_agg: LossAggregation = "token_mean",
    importance_cap: float | None = 2.0,
    temperature: float = 1.0,
    rule: AdvantageRule = RULE,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The textbook loss of the whole step in one piece: stock attention, no sharing, one backward; [P] float32."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    losses, tokens, voters = [], 0, 0
    for group in step.prompts:
        members = [r for r in step.rollouts if r.group_id == group and isinstance(r.outcome, Scored)]
        rewards = [r.outcome.reward for r in members if isinstance(r.outcome, Scored)]
        if len(members) < 2:
            continue
        for rollout, advantage in zip(members, advantages(rewards, rule), strict=True):
            tokens += rollout.sampled_tokens
            voters += 1
            length = rollout.sampled_tokens if loss_agg == "seq_mean_token_mean" else 1
            for sequence in rollout.sequences:
                ids = torch.tensor([sequence.token_ids])
                logits = policy(ids).logits[0, :-1].float() / temperature
                logprobs = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
                mask = torch.tensor(sequence.sampled[1:], dtype=torch.float32)
                weight = mask
                if importance_cap is not None:
                    ratio = (logprobs.detach() - torch.tensor(sequence.logprobs[1:])).exp()
                    weight = mask * ratio.clamp(max=importance_cap)
                losses.append(-advantage / length * (weight * logprobs).sum())
    total = torch.stack(losses).sum() / (tokens if loss_agg == "token_mean" else voters)
    total.backward()
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in policy.parameters()]
    return torch.cat([grad.flatten().float() for grad in grads])


def relative_l2(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())
