"""Rollouts carried out by outside programs: each is a session that stays open until its program is done.

Place in the flow: as `rollout.agent.ShellAgent`, for the runner. Limits, sandboxes, judging and the rollout itself are
`rollout.functions`'; here it is decided who acts. Knows nothing of HTTP or tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from msgspec import Struct

from sandboxes.base import Sandbox
from thundersync.core.types import GroupId, Outcome, Rollout, RolloutId, Task, UnscoredRollout
from thundersync.generate.base import Generator
from thundersync.rollout.attempt import Broken
from thundersync.rollout.dialogue import Renderer
from thundersync.rollout.functions import AgentFunction
from thundersync.rollout.policy import Policy
from thundersync.rollout.runner import Agent
from thundersync.score.judge import Judge
from thundersync.score.reward import CheckFailed, Verdict
from thundersync.serve.desk import Desk, new_key
from thundersync.serve.session import Rules, Session, ToolParser

Inner = Callable[[AgentFunction, Judge | None], Agent]
"""Makes what carries out rollouts of a function, judged by the run's judge or by the one given."""


class Who(Protocol):
    """Acts in a session until it is over, and gives how it ended, as an agent function does."""

    async def act(self, session: Session) -> Outcome | None: ...

    offers: bool
    """Its rollouts wait for a program to take them."""


class Visitors:
    """Programs that come by themselves, take a rollout, and say when they are done."""

    offers = True

    def __init__(self, *, idle_timeout_s: float) -> None:
        """`idle_timeout_s`: without a request for this long, a program counts as dead."""
        self._idle_timeout_s = idle_timeout_s

    async def act(self, session: Session) -> Outcome | None:
        while True:
            left_s = self._idle_timeout_s - session.idle_s
            done, _ = await asyncio.wait({session.ending.over}, timeout=max(left_s, 0.01))
            if done:
                return session.ending.over.result()
            if session.idle_s >= self._idle_timeout_s:
                raise Broken("function", f"its agent asked for nothing for {self._idle_timeout_s:g} s")


class _Live(Struct, frozen=True, kw_only=True):
    """A rollout that runs."""

    group_id: GroupId
    attempt: int


class SessionAgent:
    """Runs rollouts as sessions at the desk, any number at once; implements `Agent`."""

    def __init__(
        self,
        desk: Desk,
        who: Who,
        *,
        inner: Inner,
        renderer: Renderer,
        parser: ToolParser | None,
        rules: Rules,
        verdict_s: float,
        on_opening: Callable[[GroupId, Sequence[int]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`verdict_s`: how long after its end a session's agent may take to post its reward, where it judges itself.
        `on_opening` is told what a rollout shows the model first, token by token."""
        self._desk = desk
        self._who = who
        self._renderer = renderer
        self._parser = parser
        self._rules = rules
        self._verdict_s = verdict_s
        self._clock = clock
        self._on_opening = on_opening
        self._live: dict[RolloutId, _Live] = {}
        self._inner = inner(self._act, self if rules.client_judges else None)

    async def run(
        self,
        task: Task,
        *,
        rollout_id: RolloutId,
        group_id: GroupId,
        generator: Generator,
        policy_version: int,
        attempt: int = 1,
    ) -> Rollout:
        """One attempt at `task`, once there is a program to make it. Raises as `FunctionAgent.run` does."""
        self._live[rollout_id] = _Live(group_id=group_id, attempt=attempt)
        try:
            if self._who.offers:
                await self._desk.offer(rollout_id)
            return await self._inner.run(
                task,
                rollout_id=rollout_id,
                group_id=group_id,
                generator=generator,
                policy_version=policy_version,
                attempt=attempt,
            )
        finally:
            del self._live[rollout_id]
            await self._desk.drop(f"{rollout_id}.{attempt}", rollout_id)

    async def judge(self, sandbox: Sandbox, task: Task, rollout: UnscoredRollout) -> Verdict:
        """The reward that the agent posts. Raises: CheckFailed if none comes."""
        session = self._desk.find(f"{rollout.rollout_id}.{rollout.attempt}")
        done, _ = (
            await asyncio.wait({session.ending.verdict}, timeout=self._verdict_s) if session is not None else ((), ())
        )
        if session is None or not done:
            detail = f"the agent of {rollout.rollout_id} posted no reward within {self._verdict_s:g} s after its end"
            raise CheckFailed("no_reward", detail)
        scored = session.ending.verdict.result()
        return Verdict(reward=scored.reward, rewards=scored.rewards)

    async def _act(self, task: Task, policy: Policy, sandbox: Sandbox) -> Outcome | None:
        rollout_id = policy.rollout_id
        live = self._live[rollout_id]
        session = Session(
            f"{rollout_id}.{live.attempt}",
            key=new_key(),
            task=task,
            policy=policy,
            sandbox=sandbox,
            renderer=self._renderer,
            parser=self._parser,
            rules=self._rules,
            on_opening=partial(self._on_opening, live.group_id) if self._on_opening is not None else None,
            clock=self._clock,
        )
        self._desk.opened(session, rollout_id)
        try:
            return await self._who.act(session)
        finally:
            # It stays at the desk until its rollout has ended: the verdict may still come.
            await session.close()
