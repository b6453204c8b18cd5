"""What the trainer workers are asked for a comparison: the one-piece gradient, and how far the streamed one is from it.

All workers answer together; nothing they are asked here changes weights or the step's gradient.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from thundersync.learn import messages as m
from thundersync.learn.link import WorkerLink
from thundersync.verify.textbook import Textbook

R = TypeVar("R", bound=m.Reply)


async def keep_reference(workers: Sequence[WorkerLink], textbook: Textbook, *, limit_s: float) -> None:
    """Let each worker compute its share of the pieces, and keep the gradient of all of them."""
    shares = _shares(textbook, len(workers))
    requests = [m.Reference(pieces=share, scales=textbook.scales) for share in shares]
    await ask_each(workers, requests, m.Done, limit_s=limit_s)


async def rounding_floor(workers: Sequence[WorkerLink], textbook: Textbook, *, limit_s: float) -> m.Comparison:
    """The reference once more with every layer off by one unit in the last place, against the one that is kept."""
    requests = [m.Floor(pieces=share, scales=textbook.scales) for share in _shares(textbook, len(workers))]
    return (await ask_each(workers, requests, m.Comparison, limit_s=limit_s))[0]


async def compare(workers: Sequence[WorkerLink], scales: list[float], *, limit_s: float) -> m.Comparison:
    """The step's streamed gradient under `scales`, summed over workers, against the reference that is kept."""
    request = m.Compare(scales=scales)
    return (await ask_each(workers, [request] * len(workers), m.Comparison, limit_s=limit_s))[0]


async def ask_each(
    workers: Sequence[WorkerLink], requests: Sequence[m.AnyRequest], expected: type[R], *, limit_s: float
) -> list[R]:
    """Every worker its request, at once: they may have to meet for the answer."""
    async with asyncio.TaskGroup() as asking:
        calls = [
            asking.create_task(worker.call(request, expected, limit_s=limit_s))
            for worker, request in zip(workers, requests, strict=True)
        ]
    return [call.result() for call in calls]


def _shares(textbook: Textbook, count: int) -> list[list[m.ReferencePiece]]:
    """Of about as many tokens each."""
    shares: list[list[m.ReferencePiece]] = [[] for _ in range(count)]
    for piece in sorted(textbook.pieces, key=_tokens, reverse=True):
        min(shares, key=lambda share: sum(map(_tokens, share))).append(piece)
    return shares


def _tokens(piece: m.ReferencePiece) -> int:
    return sum(len(row.token_ids) for row in piece.rows)
