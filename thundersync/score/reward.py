"""Runs a task's checker in the sandbox where the agent has worked, and reads the reward that it wrote.

Place in the flow: after a rollout's last turn, before its reward is known. Knows nothing of tokens, groups or
training. Follows the Harbor convention: the tests appear in /tests only now, the checker's exit code is ignored, and
the reward is what it left in /logs/verifier. A reward that is missing or unreadable is an error, never a zero.
"""

import asyncio
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from sandboxes.base import Command, Result, Sandbox
from sandboxes.errors import FileMissing, FileRefused
from thundersync.core.types import Task
from thundersync.errors import ThundersyncError

REWARD_JSON = "/logs/verifier/reward.json"
REWARD_TEXT = "/logs/verifier/reward.txt"

_REWARD_LIMIT_BYTES = 1 << 16
_CLEAN_TIMEOUT_S = 60.0
_DETAIL_CHARS = 400

# Contents first: a folder that is a mount point cannot be removed itself. A link planted by the agent is replaced.
# The last loop trusts no command of the sandbox: it looks again with the shell's own means.
_CLEAN = """
shopt -s dotglob nullglob
for d in /logs/verifier /tests; do
  if [ -L "$d" ] || [ ! -d "$d" ]; then rm -rf -- "$d" && mkdir -p -- "$d"; fi
  rm -rf -- "$d"/*
  left=("$d"/*)
  if [ -L "$d" ] || [ ! -d "$d" ] || [ ! -w "$d" ] || [ ${#left[@]} -ne 0 ]; then echo "cannot clear $d"; exit 1; fi
done
"""

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)


class CheckFailed(ThundersyncError):
    """The checker gave no usable reward: `reason` says whether it broke, or ended without one."""

    def __init__(self, reason: Literal["checker", "no_reward"], detail: str) -> None:
        super().__init__(
            detail,
            remedy="Run the task's reference solution through its checker; a checker writes one number to "
            "/logs/verifier/reward.txt, or a flat object of numbers to reward.json, whatever happens.",
        )
        self.reason: Literal["checker", "no_reward"] = reason


class Verdict(Struct, frozen=True, kw_only=True):
    """What the checker said: `rewards` by name, and the one number that trains."""

    reward: float
    rewards: dict[str, float]


class RewardChecker:
    """Judges one sandbox at a time, any number at once."""

    def __init__(self, *, grace_s: float = 120.0) -> None:
        """`grace_s`: how long beyond the checker's own limit clearing, copying and reading may take in all."""
        self._grace_s = grace_s

    async def score(self, sandbox: Sandbox, task: Task) -> Verdict:
        """Judge what the agent left behind.

        Raises: CheckFailed, and the sandbox's own SandboxError.
        """
        checker = task.checker
        limit_s = checker.timeout_s + self._grace_s
        try:
            async with asyncio.timeout(limit_s):
                await sandbox.kill_all()
                await self._clear(sandbox)
                await sandbox.put_tree(Path(checker.tests), "/tests")
                result = await sandbox.run(
                    Command(script=checker.command, timeout_s=checker.timeout_s, env=checker.env, user="root")
                )
                if result.timed_out:
                    raise CheckFailed("checker", f"the checker of {task.task_id} ran past {checker.timeout_s:g} s")
                rewards = await self._read(sandbox, task, result)
        except TimeoutError as error:
            raise CheckFailed("checker", f"checking {task.task_id} did not end within {limit_s:g} s") from error
        return Verdict(reward=training_reward(rewards), rewards=rewards)

    async def _clear(self, sandbox: Sandbox) -> None:
        cleared = await sandbox.run(Command(script=_CLEAN, timeout_s=_CLEAN_TIMEOUT_S, cwd="/", user="root"))
        if cleared.exit_code != 0 or cleared.timed_out:
            raise CheckFailed("checker", f"could not clear the checker's folders: {_tail(cleared)}")

    async def _read(self, sandbox: Sandbox, task: Task, result: Result) -> dict[str, float]:
        for path, parse in ((REWARD_JSON, parse_reward_json), (REWARD_TEXT, parse_reward_text)):
            try:
                content = await sandbox.read(path, limit_bytes=_REWARD_LIMIT_BYTES)
            except FileMissing:
                continue
            except FileRefused as error:  # larger than any reward, or no regular file
                raise CheckFailed("no_reward", f"{path} of {task.task_id}: {error.message}") from error
            try:
                return parse(content)
            except ValueError as error:
                raise CheckFailed("no_reward", f"{path} of {task.task_id}: {error}; {_tail(result)}") from error
        killed = ", out of memory" if result.oom_killed else ""
        raise CheckFailed(
            "no_reward",
            f"the checker of {task.task_id} wrote no reward (exit code {result.exit_code}{killed}); {_tail(result)}",
        )


def parse_reward_json(content: bytes) -> dict[str, float]:
    """A flat object of finite numbers. Raises ValueError for anything else."""
    if not content.strip():
        raise ValueError("is empty")
    try:
        found = msgspec.json.decode(content)
    except msgspec.DecodeError as error:
        raise ValueError(f"is not JSON ({error})") from error
    if not isinstance(found, dict) or not found:
        raise ValueError("is not an object with at least one number")
    rewards = {}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"holds {name!r}, which is not a number")
        rewards[str(name)] = _finite(value)
    return rewards


def parse_reward_text(content: bytes) -> dict[str, float]:
    """One finite number. Raises ValueError for anything else, `True` and `nan` included."""
    text = content.decode(errors="replace").strip()
    if not text:
        raise ValueError("is empty")
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"holds {text[:40]!r}, which is not one number")
    return {"reward": _finite(float(text))}


def training_reward(rewards: Mapping[str, float]) -> float:
    """The number that trains: the one named `reward`, else the mean of all."""
    if "reward" in rewards:
        return rewards["reward"]
    return math.fsum(rewards.values()) / len(rewards)


def _finite(value: float) -> float:
    try:
        number = float(value)
    except OverflowError as error:  # an integer of hundreds of digits
        raise ValueError("holds a number that is not finite") from error
    if not math.isfinite(number):
        raise ValueError("holds a number that is not finite")
    return number


def _tail(result: Result) -> str:
    said = (result.stdout + result.stderr).decode(errors="replace").strip()
    return f"its last words: {said[-_DETAIL_CHARS:]!r}" if said else "it said nothing"
