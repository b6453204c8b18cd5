"""One attempt at a task while it runs, and the ways out of it: what everything that carries out rollouts shares.

Place in the flow: made by whoever runs a rollout, filled by `sampler`, read when the rollout is put together. Knows
nothing of how turns are made.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from thundersync.core.types import Failed, FailureKind, GroupId, RolloutId, SampledTurn, Task, Turn
from thundersync.generate.base import Generator
from thundersync.monitor.events import AnyEvent
from thundersync.rollout.dialogue import Dialogue

Emit = Callable[[AnyEvent], None]
Clock = Callable[[], float]
OnTurn = Callable[[SampledTurn], None]
"""Told of every turn the moment it was sampled, before its command runs."""
T = TypeVar("T")


class Broken(Exception):
    """Carries a failed outcome out of a rollout, up to where the rollout is put together."""

    def __init__(self, reason: FailureKind, detail: str) -> None:
        super().__init__(detail)
        self.failed = Failed(reason=reason, detail=detail)


class Attempt:
    """One attempt at a task while it runs; whatever ends it, this is what it leaves."""

    def __init__(
        self,
        task: Task,
        *,
        rollout_id: RolloutId,
        group_id: GroupId,
        generator: Generator,
        policy_version: int,
        number: int,
    ) -> None:
        self.task = task
        self.rollout_id = rollout_id
        self.group_id = group_id
        self.generator = generator
        self.policy_version = policy_version
        self.number = number
        self.dialogue: Dialogue | None = None
        self.turns: list[Turn] = []
        self.opening: list[int] = []
        """The first prompt that was sampled from; later ones may begin with it."""
        self.score_s = 0.0


async def in_time(answer: Awaitable[T], limit_s: float, what: str) -> T:
    """What a sandbox answers, or Broken once it has not answered for `limit_s`."""
    try:
        async with asyncio.timeout(limit_s):
            return await answer
    except TimeoutError as error:
        raise Broken("sandbox", f"the sandbox did not {what} within {limit_s:g} s") from error
