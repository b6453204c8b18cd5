"""One attempt at a task while it runs, and the ways out of it: what everything that carries out rollouts shares.

Place in the flow: made by whoever runs a rollout, filled by `sampler`, and asked for the rollout at the end. Knows
nothing of how turns are made.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sandboxes.base import Origin
from sandboxes.errors import SandboxError
from thundersync.core.types import (
    Failed,
    FailureKind,
    FinalContent,
    GroupId,
    Outcome,
    Rollout,
    RolloutId,
    SampledTurn,
    Scored,
    StopReason,
    Task,
    TokenSequence,
    Turn,
    UnscoredRollout,
)
from thundersync.errors import EngineFailed
from thundersync.generate.base import Generator
from thundersync.monitor.events import AnyEvent, RolloutScored, RolloutStarted
from thundersync.rollout.said import Said, Speaker
from thundersync.score.reward import CheckFailed

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
        self.started_s = time.time()
        self.speaker: Speaker | None = None
        """Keeps what is said, from before the first turn on."""
        self.turns: list[Turn] = []
        self.opening: list[int] = []
        """The first prompt that was sampled from; later ones may begin with it."""
        self.score_s = 0.0
        self.origin = Origin()
        """Of its sandbox, once there is one."""

    def started(self) -> RolloutStarted:
        return RolloutStarted(
            at_s=self.started_s,
            rollout_id=self.rollout_id,
            group_id=self.group_id,
            task_id=self.task.task_id,
            attempt=self.number,
        )

    def content(self, sequences: list[TokenSequence]) -> FinalContent:
        """Its tokens are final."""
        return FinalContent(
            rollout_id=self.rollout_id,
            group_id=self.group_id,
            attempt=self.number,
            sequences=sequences,
            policy_version=self.policy_version,
        )

    def said(self) -> Said:
        """All of it so far; call it in a thread."""
        return self.speaker.said() if self.speaker is not None else Said()

    def unscored(self, stop: StopReason, said: Said) -> UnscoredRollout:
        """What a judge is shown."""
        return UnscoredRollout(
            rollout_id=self.rollout_id,
            group_id=self.group_id,
            task_id=self.task.task_id,
            attempt=self.number,
            policy_version=self.policy_version,
            messages=said.messages,
            sequences=said.sequences,
            turns=said.placed(self.turns),
            stop=stop,
        )

    def scored(self, outcome: Scored) -> RolloutScored:
        return RolloutScored(
            at_s=time.time(),
            rollout_id=self.rollout_id,
            group_id=self.group_id,
            reward=outcome.reward,
            stop=outcome.stop,
            turns=len(self.turns),
            sampled_tokens=sum(turn.end - turn.start for turn in self.turns),
            score_s=self.score_s,
        )

    def rollout(self, outcome: Outcome, said: Said) -> Rollout:
        turns = said.placed(self.turns)
        return Rollout(
            rollout_id=self.rollout_id,
            group_id=self.group_id,
            task_id=self.task.task_id,
            policy_version=self.policy_version,
            messages=said.messages,
            sequences=said.sequences,
            turns=turns,
            outcome=outcome,
            started_s=self.started_s,
            generate_s=sum(turn.generate_s for turn in turns),
            tool_s=sum(turn.tool_s for turn in turns),
            score_s=self.score_s,
            attempt=self.number,
            image=self.origin.image,
            image_digest=self.origin.digest,
        )


async def outcome_of(work: Awaitable[Outcome]) -> Outcome:
    """What an attempt came to: a world that fails is an outcome, not an error."""
    try:
        return await work
    except SandboxError as error:
        return Failed(reason="sandbox", detail=str(error))
    except CheckFailed as error:
        return Failed(reason=error.reason, detail=error.message)
    except EngineFailed as error:
        return Failed(reason="engine", detail=error.message)
    except Broken as error:
        return error.failed


async def in_time(answer: Awaitable[T], limit_s: float, what: str) -> T:
    """What a sandbox answers, or Broken once it has not answered for `limit_s`."""
    try:
        async with asyncio.timeout(limit_s):
            return await answer
    except TimeoutError as error:
        raise Broken("sandbox", f"the sandbox did not {what} within {limit_s:g} s") from error
