"""How a session ends: its agent is done, judges itself, tells of a failure, or meets a limit; each of them once.

Place in the flow: between what a session's agent posts and the rollout that waits for it. Knows nothing of HTTP,
tokens or checkers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

from thundersync.core.types import Outcome, Scored
from thundersync.rollout.attempt import Broken
from thundersync.rollout.sampler import LimitReached
from thundersync.serve.errors import Refused, SessionOver


class Ending:
    """Open until `over` is done. Everything that an agent may post raises Refused where it cannot be."""

    def __init__(self, session_id: str, *, client_judges: bool) -> None:
        loop = asyncio.get_running_loop()
        self._session_id = session_id
        self._client_judges = client_judges
        self.over: asyncio.Future[Outcome | None] = loop.create_future()
        """How it ended: an outcome, None where it is to be judged, or an exception."""
        self.verdict: asyncio.Future[Scored] = loop.create_future()
        """The reward that the agent posted, where it judges itself: at the end, or soon after."""
        self.limit: LimitReached | None = None
        """The limit that the last reply was refused for."""

    def refuse_over(self) -> None:
        if self.over.done():
            raise SessionOver(f"session {self._session_id} is over")

    def reward(self, reward: float, rewards: Mapping[str, float]) -> None:
        """The agent's own verdict; it ends a session that is still open."""
        if not self._client_judges:
            raise Refused('this session is judged by its task\'s checker (serve.judge = "checker")', status=403)
        if not all(math.isfinite(value) for value in (reward, *rewards.values())):
            raise Refused(f"reward = {reward} is not a finite number", param="reward")
        if self.verdict.done() or (self.over.done() and not self._awaits_verdict):
            raise SessionOver(f"session {self._session_id} is over")
        stop = self.limit.stop if self.limit is not None else "submitted"
        scored = Scored(reward=reward, rewards={"reward": reward, **rewards}, stop=stop)
        self.verdict.set_result(scored)
        if not self.over.done():
            self.over.set_result(scored)

    def end(self) -> None:
        """The agent is done, every token final; its verdict, where it judges itself, may follow."""
        self.refuse_over()
        if self.limit is not None:
            self.over.set_exception(self.limit)
        else:
            self.over.set_result(None)

    def fail(self, detail: str) -> None:
        """The agent, or its world, failed: the rollout does not count and may be tried again."""
        self.refuse_over()
        self.over.set_exception(Broken("function", detail))

    def break_by(self, error: Exception) -> None:
        """What was asked for broke the rollout."""
        if not self.over.done():
            self.over.set_exception(error)

    def close(self) -> None:
        """Whoever waited for the end has gone: a limit on time, or the run's own end."""
        if not self.over.done():
            self.over.cancel()
        elif not self.over.cancelled():
            self.over.exception()  # seen, also where nobody waits any more

    @property
    def _awaits_verdict(self) -> bool:
        """It ended without a failure, and its agent has not said yet what it was worth."""
        if self.over.cancelled():
            return True  # by the clock
        error = self.over.exception()
        return self.over.result() is None if error is None else isinstance(error, LimitReached)
