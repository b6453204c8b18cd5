"""Who says what a rollout was worth: the task's own checker, or a reward function of the program that embeds us.

Place in the flow: after a rollout's last turn, before its reward is known. A judge that cannot judge raises
CheckFailed, which never becomes a zero. Knows nothing of groups or training.
"""

import asyncio
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias

from sandboxes.base import Sandbox
from sandboxes.errors import SandboxError
from thundersync.core.types import Task, UnscoredRollout
from thundersync.errors import ConfigError
from thundersync.score.reward import CheckFailed, RewardChecker, Verdict

RewardFunction: TypeAlias = Callable[[Task, UnscoredRollout, Sandbox], Awaitable[float]]
"""`async def reward(task, rollout, sandbox) -> float`. The sandbox is the one the agent worked in; it starts when it is
first used."""


class Judge(Protocol):
    """Judges any number of rollouts at once."""

    async def judge(self, sandbox: Sandbox, task: Task, rollout: UnscoredRollout) -> Verdict:
        """Raises: CheckFailed, SandboxError."""


class CheckerJudge:
    """The task's own checker, which looks at nothing but the sandbox."""

    def __init__(self, checker: RewardChecker) -> None:
        self._checker = checker

    async def judge(self, sandbox: Sandbox, task: Task, rollout: UnscoredRollout) -> Verdict:
        return await self._checker.score(sandbox, task, rollout_id=rollout.rollout_id)


class FunctionJudge:
    """A reward function in the place of all checkers.

    Its limit is the task's own `checker.timeout_s`. Whatever it raises, its deadline included, and whatever it gives
    that is no finite number is a failure to judge.
    """

    def __init__(self, function: RewardFunction) -> None:
        self._function = function

    async def judge(self, sandbox: Sandbox, task: Task, rollout: UnscoredRollout) -> Verdict:
        limit_s = task.checker.timeout_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                given = await self._function(task, rollout, sandbox)
        except (SandboxError, CheckFailed):
            raise
        except Exception as error:  # a function of somebody else's may raise anything
            if isinstance(error, TimeoutError) and limit.expired():
                raise CheckFailed("checker", f"the reward function ran past {limit_s:g} s on {task.task_id}") from error
            raise CheckFailed("checker", f"the reward function raised on {task.task_id}: {described(error)}") from error
        try:
            reward = float(given)
        except (TypeError, ValueError) as error:
            raise CheckFailed("no_reward", f"the reward function gave {given!r} for {task.task_id}") from error
        if not math.isfinite(reward):
            raise CheckFailed("no_reward", f"the reward function gave {reward} for {task.task_id}")
        return Verdict(reward=reward, rewards={"reward": reward})


def refuse_plain(function: Callable[..., Any], what: str) -> None:
    """A function that is no coroutine function is told before anything starts. Raises: ConfigError."""
    call = getattr(function, "__call__", None)  # noqa: B004 - an object whose call is a coroutine function is one too
    if not (inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)):
        name = getattr(function, "__qualname__", repr(function))
        raise ConfigError(
            f"the {what} {name} is not a coroutine function",
            remedy="Write `async def`; what blocks or computes belongs into asyncio.to_thread.",
        )


def described(error: Exception) -> str:
    """An error of somebody else's code in one line, with where it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
