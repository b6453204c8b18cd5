"""A distillation step by every schedule equals its definition, whatever order the teacher's scores land in."""

import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.learn import replay as rp
from tests.tiny import tiny_model
from thundersync.core.objective import Objective
from thundersync.core.types import Rollout, SampledTurn, Scored, TokenSequence, Turn
from thundersync.generate.base import TokenScores
from thundersync.learn import messages as m
from thundersync.learn.worker import Worker

TOLERANCE = 5e-6
OPD = Objective(rule=None, distils=True)
Turns = list[tuple[SampledTurn, Rollout | None]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), std=0.1)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("teacher"), std=0.1, seed=5)


def record(seed: int, *, groups: int = 2, size: int = 3) -> tuple[dict[str, list[int]], Turns]:
    """Conversations of 1 to 4 turns: sampled spans with tool results between them, some begun anew (a fork)."""
    draw = random.Random(seed)
    tokens = lambda n: [draw.randrange(3, 300) for _ in range(n)]  # noqa: E731
    prefix = tokens(18)
    prompts = {f"g{g}": prefix + tokens(draw.randint(1, 8)) for g in range(groups)}
    lines: list[Turns] = []
    for group, prompt in prompts.items():
        for index in range(size):
            line: Turns = []
            ids, sequence, name = list(prompt), 0, f"{group}-{index}"
            count = draw.randint(1, 4)
            for turn in range(count):
                if turn and draw.random() < 0.2:  # a rewritten history that still begins with the prompt, or not
                    ids, sequence = (prompt if draw.random() < 0.5 else tokens(5)) + tokens(4), sequence + 1
                start = len(ids)
                ids = ids + tokens(draw.randint(1, 9))
                logprobs = [-5.6 + draw.gauss(0, 0.3) for _ in range(len(ids) - start)]
                sampled = SampledTurn(
                    rollout_id=name,
                    group_id=group,
                    task_id=group,
                    attempt=1,
                    turn=turn,
                    sequence=sequence,
                    token_ids=ids,
                    start=start,
                    end=len(ids),
                    logprobs=logprobs,
                    prompt_tokens=len(prompt),
                    policy_version=0,
                )
                line.append((sampled, _rollout(name, group) if turn == count - 1 else None))
                ids = ids + tokens(draw.randint(1, 5))
            lines.append(line)
    turns: Turns = []
    while lines:  # interleaved as rollouts that run side by side
        line = draw.choice(lines)
        turns.append(line.pop(0))
        lines = [each for each in lines if each]
    return prompts, turns


def _rollout(name: str, group: str) -> Rollout:
    sequence = TokenSequence(token_ids=[1, 2], sampled=[False, True], logprobs=[0.0, -1.0], prompt_tokens=1)
    return Rollout(
        rollout_id=name,
        group_id=group,
        task_id=group,
        policy_version=0,
        messages=[],
        sequences=[sequence],
        turns=[Turn(index=0, sequence=0, start=1, end=2, finish_reason="stop", policy_version=0)],
        outcome=Scored(reward=0.0, stop="submitted"),
        started_s=0.0,
    )


def definition(model: Path, teacher: Path, turns: Turns, *, kind: str, topk: int, mix: float) -> Tensor:
    """Loss = sum over sampled tokens of (divergence at its prefix, or -(log p_T - log pi) log pi) / tokens; [P]."""
    policy = AutoModelForCausalLM.from_pretrained(model).eval()
    frozen = AutoModelForCausalLM.from_pretrained(teacher).eval()
    tokens = sum(turn.end - turn.start for turn, _ in turns)
    loss = torch.zeros(())
    for turn, _ in turns:
        ids = torch.tensor([turn.token_ids])
        at = slice(turn.start - 1, turn.end - 1)
        own = policy(ids).logits[0, at].log_softmax(-1)
        with torch.no_grad():
            other = frozen(ids).logits[0, at].log_softmax(-1)
        chosen = ids[0, turn.start : turn.end, None]
        if not kind:
            p, q = own.gather(-1, chosen), other.gather(-1, chosen)
            loss = loss - ((q - p).detach() * p).sum() / tokens
            continue
        if topk > 0:
            best = other.topk(topk, -1).indices
            own, other = _coarse(own, best), _coarse(other, best)
        p, q = own.exp(), other.exp()
        mixture = mix * q + (1 - mix) * p
        divergence = {
            "reverse": (p * (own - other)).sum(-1),
            "forward": (q * (other - own)).sum(-1),
            "mixed": mix * (q * (other - mixture.log())).sum(-1) + (1 - mix) * (p * (own - mixture.log())).sum(-1),
        }[kind]
        loss = loss + divergence.sum() / tokens
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(policy.parameters()))])


def _coarse(logprobs: Tensor, best: Tensor) -> Tensor:
    kept = logprobs.gather(-1, best)
    return torch.cat([kept, (1 - kept.exp().sum(-1, keepdim=True)).log()], -1)


def scorer(teacher: Path, topk: int) -> Callable[[SampledTurn], Awaitable[TokenScores | None]]:
    frozen: Any = AutoModelForCausalLM.from_pretrained(teacher).eval()

    async def score(turn: SampledTurn) -> TokenScores | None:
        if topk == -1:
            return None
        with torch.no_grad():
            logprobs = frozen(torch.tensor([turn.token_ids])).logits[0, turn.start - 1 : turn.end - 1].log_softmax(-1)
        best = logprobs.topk(topk, -1)
        return TokenScores(
            logprobs=logprobs.gather(-1, torch.tensor(turn.token_ids[turn.start :])[:, None])[:, 0].tolist(),
            top_ids=best.indices.tolist() if topk else [],
            top_logprobs=best.values.tolist() if topk else [],
            policy_version=0,
        )

    return score


@pytest.mark.parametrize(
    ("kind", "topk"),
    [("", 0), ("reverse", -1), ("forward", -1), ("mixed", -1), ("reverse", 8), ("forward", 8), ("mixed", 8)],
)
async def test_every_schedule_equals_the_definition(
    model: Path, teacher: Path, tmp_path: Path, kind: str, topk: int
) -> None:
    worker = Worker()
    terms = m.Terms(divergence=kind, mix=0.3)  # type: ignore[arg-type]
    held = str(teacher) if topk == -1 else ""
    worker.answer(rp.setup(model, tmp_path / "weights", terms=terms, teacher_path=held))
    for seed in (42, 43):
        prompts, turns = record(seed)
        expected = definition(model, teacher, turns, kind=kind, topk=topk, mix=0.3)
        ways: list[dict[str, Any]] = [
            {"schedule": "deferred"},
            {"schedule": "forward"},
            {"schedule": "immediate"},
            {"schedule": "forward", "eager": False},
            {"schedule": "immediate", "max_tokens": 60, "longest": 25},
            {"schedule": "forward", "mode": "lazy"},
            {"schedule": "deferred", "mode": "group"},
        ]
        for way in ways:
            got = await rp.replay_turns(worker, prompts, turns, objective=OPD, score=scorer(teacher, topk), **way)
            assert rp.relative_l2(got, expected) < TOLERANCE, way


async def test_turns_are_worked_before_their_rollout_has_ended(model: Path, teacher: Path, tmp_path: Path) -> None:
    worker = Worker()
    worker.answer(rp.setup(model, tmp_path / "weights", terms=m.Terms()))
    prompts, turns = record(42)
    for schedule in ("forward", "immediate"):
        _, requests = await rp.replay_turns_told(
            worker, prompts, turns, objective=OPD, score=scorer(teacher, 0), schedule=schedule
        )
        streamed = [request for request in requests if isinstance(request, m.RunTurns)]
        assert streamed
        assert {request.schedule for request in streamed} == {schedule}


async def test_only_sampled_tokens_are_learned(model: Path, teacher: Path, tmp_path: Path) -> None:
    """Tool results between turns are context: the teacher's opinion of them has no weight."""
    worker = Worker()
    worker.answer(rp.setup(model, tmp_path / "weights", terms=m.Terms()))
    prompts, turns = record(43)
    _, requests = await rp.replay_turns_told(worker, prompts, turns, objective=OPD, score=scorer(teacher, 0))
    rows = [r.row for r in requests if isinstance(r, m.RunTurns)]
    rows += [row for r in requests if isinstance(r, m.RunPass) for row in r.rows]
    assert sum(sum(row.sampled) for row in rows) == sum(turn.end - turn.start for turn, _ in turns)
    for row in rows:
        assert all(not logprob for logprob, own in zip(row.teacher_logprobs, row.sampled, strict=True) if not own)
