"""Runs a task's checker after the agent has ended, and reads its verdict.

Place in the flow: after a rollout's last turn, before its reward is known. Knows nothing of tokens, groups or
training. Follows the Harbor convention: the tests appear in /tests only now, the checker's exit code is ignored, and
the reward is what it left in /logs/verifier; of Terminal-Bench 1, what its tests printed. Repairs are judged in a fresh
sandbox (`score.repairs`). A reward that is missing or unreadable, or the zero of a checker that could not get its own
tools, is an error, never a zero.
"""

import asyncio
import contextlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from sandboxes.base import Command, Result, Runtime, Sandbox
from sandboxes.errors import FileMissing, FileRefused, SandboxError
from sandboxes.shield import finish
from thundersync.core.types import Checker, RolloutId, Task
from thundersync.errors import ThundersyncError
from thundersync.score.disk import is_full
from thundersync.score.missing_tools import missing_tool, told_of_full_disk
from thundersync.score.repairs import (
    CLOSE_LIMIT_S,
    GIT_TIMEOUT_S,
    JudgeBroken,
    RepairJudge,
    prepare_repair,
    take_change,
)
from thundersync.score.single_tests import counts_as_passed, parse_ctrf, shaped_rewards
from thundersync.score.test_logs import Status, merged, summary_lines
from thundersync.tasks.repair import load_repair

REWARD_JSON = "/logs/verifier/reward.json"
REWARD_TEXT = "/logs/verifier/reward.txt"
CTRF = "/logs/verifier/ctrf.json"

_REWARD_LIMIT_BYTES = 1 << 16
_CTRF_LIMIT_BYTES = 1 << 23
_OUTPUT_LIMIT_BYTES = 1 << 22
_WORDS_LIMIT_BYTES = 1 << 20
"""Of one file of a checker, read for the names of tools."""
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

_RESULTS = re.compile(r"SWEBench results starts here\s*(.*?)\s*SWEBench results ends here", re.DOTALL)
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
    change: str = ""
    """Of a repair: the change that was judged, as a patch; bytes that are not UTF-8 are replaced."""


class RewardChecker:
    """Judges one sandbox at a time, any number at once."""

    def __init__(
        self,
        *,
        grace_s: float = 120.0,
        runtime: Runtime | None = None,
        pids: int = 256,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """`grace_s`: how long beyond the checker's own limit clearing, copying and reading may take in all.
        `runtime` starts the fresh sandboxes, of `pids` processes and with `labels`, that repairs are judged in;
        without one they are refused."""
        self._grace_s = grace_s
        self._judge = RepairJudge(runtime, pids=pids, labels=labels) if runtime is not None else None

    def prepares(self, task: Task) -> bool:
        """Whether `prepare` has anything to do for this task."""
        return task.checker.verdict == "repair"

    async def prepare(self, sandbox: Sandbox, task: Task) -> None:
        """Make a fresh sandbox what the task says the agent starts from, before its first turn.

        Raises: CheckFailed, and the sandbox's own SandboxError.
        """
        if task.checker.verdict == "repair":
            try:
                repair = await asyncio.to_thread(load_repair, task.checker.tests)
                await prepare_repair(sandbox, repair)
            except (JudgeBroken, OSError, msgspec.DecodeError) as error:
                raise CheckFailed("checker", str(error)) from error

    async def score(self, sandbox: Sandbox, task: Task, *, rollout_id: RolloutId = "") -> Verdict:
        """Judge what the agent left behind. A repair's sandbox is closed once its change was taken.

        Raises: CheckFailed, and the sandbox's own SandboxError.
        """
        if task.stages:
            raise CheckFailed("checker", f"{task.task_id} has stages, and each has a checker of its own")
        if task.checker.verdict == "repair":
            return await self._repair(sandbox, task, rollout_id)
        checker = task.checker
        limit_s = checker.timeout_s + self._grace_s
        try:
            async with asyncio.timeout(limit_s):
                await sandbox.kill_all()
                await self._clear(sandbox)
                if checker.shared:
                    await sandbox.put_tree(Path(checker.shared), "/tests")
                if checker.tests:
                    await sandbox.put_tree(Path(checker.tests), "/tests")
                if checker.script:
                    script = Path(checker.script)
                    await sandbox.write(f"/tests/{script.name}", await asyncio.to_thread(script.read_bytes), mode=0o755)
                result = await sandbox.run(
                    Command(
                        script=checker.command,
                        timeout_s=checker.timeout_s,
                        env=checker.env,
                        user="root",
                        output_limit_bytes=_OUTPUT_LIMIT_BYTES,
                    )
                )
                if result.timed_out:
                    raise CheckFailed("checker", f"the checker of {task.task_id} ran past {checker.timeout_s:g} s")
                rewards = await self._rewards(sandbox, task, result)
        except TimeoutError as error:
            raise CheckFailed("checker", f"checking {task.task_id} did not end within {limit_s:g} s") from error
        return Verdict(reward=training_reward(rewards), rewards=rewards)

    async def clear(self, sandbox: Sandbox) -> None:
        """Take tests and verdict away again, where the agent is to go on. Raises: CheckFailed, SandboxError."""
        await sandbox.kill_all()
        await self._clear(sandbox)

    async def _repair(self, sandbox: Sandbox, task: Task, rollout_id: RolloutId) -> Verdict:
        if self._judge is None:
            raise CheckFailed("checker", f"{task.task_id} is a repair, and there is no runtime to judge it in")
        # A fresh sandbox, the bug, the tests, and what each may take.
        limit_s = task.build_timeout_s + task.checker.timeout_s + self._grace_s + 2 * GIT_TIMEOUT_S
        try:
            async with asyncio.timeout(limit_s):
                await sandbox.kill_all()
                repair = await asyncio.to_thread(load_repair, task.checker.tests)
                change = await take_change(sandbox, repair)
                # So that a rollout never has two. One that will not go is told of by whoever opened it.
                with contextlib.suppress(SandboxError, TimeoutError):
                    await finish(sandbox.close(), limit_s=CLOSE_LIMIT_S)
                verdict = await self._judge.judge(task, change, rollout_id=rollout_id)
        except TimeoutError as error:
            raise CheckFailed("checker", f"judging {task.task_id} did not end within {limit_s:g} s") from error
        except (JudgeBroken, OSError, msgspec.DecodeError) as error:
            raise CheckFailed("checker", str(error)) from error
        text = (change or "").encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return Verdict(reward=float(verdict.resolved), rewards=verdict.rewards, change=text)

    async def _clear(self, sandbox: Sandbox) -> None:
        cleared = await sandbox.run(Command(script=_CLEAN, timeout_s=_CLEAN_TIMEOUT_S, cwd="/", user="root"))
        if cleared.exit_code != 0 or cleared.timed_out:
            raise CheckFailed("checker", f"could not clear the checker's folders: {_tail(cleared)}")

    async def _rewards(self, sandbox: Sandbox, task: Task, result: Result) -> dict[str, float]:
        """What the checker said, unless it could not work: its zero would be ours, not the agent's."""
        checker = task.checker
        output = b"\n".join([result.stdout, result.stderr]).decode(errors="replace")
        results = await self._single_tests(sandbox, output, whole_log=checker.verdict == "test_summary")
        fault = "" if results else await asyncio.to_thread(_lacked, checker, output)
        if not results and not fault and (told := told_of_full_disk(output)) and await is_full(sandbox):
            fault = told
        if fault:
            try:
                rewards = await self._verdict(sandbox, task, result, output, results)
            except CheckFailed:
                rewards = {}
            if not any(rewards.values()):
                raise CheckFailed("checker", f"the checker of {task.task_id} could not get what it needs: {fault}")
        else:
            rewards = await self._verdict(sandbox, task, result, output, results)
        if checker.shaping == "task":
            return rewards
        if not results:
            raise CheckFailed(
                "no_reward", f"{task.task_id} is to be rewarded by its single tests, and its checker names none"
            )
        return {**rewards, **shaped_rewards(results, weights=checker.weights, shaping=checker.shaping)}

    async def _verdict(
        self, sandbox: Sandbox, task: Task, result: Result, output: str, results: Mapping[str, Status]
    ) -> dict[str, float]:
        match task.checker.verdict:
            case "test_summary":
                if not results:
                    raise CheckFailed("no_reward", f"the tests of {task.task_id} print no summary; {_tail(result)}")
                passed = sum(counts_as_passed(status) for status in results.values())
                return {"reward": float(passed == len(results)), "pass_ratio": passed / len(results)}
            case "swebench_results":
                found = _RESULTS.findall(output)
                if not found:
                    raise CheckFailed("no_reward", f"the tests of {task.task_id} print no results; {_tail(result)}")
                return {"reward": float("PASSED" in found[-1])}
        return await self._read(sandbox, task, result)

    async def _single_tests(self, sandbox: Sandbox, output: str, *, whole_log: bool) -> dict[str, Status]:
        """How single tests ended: by the ctrf report, else by what was printed; empty if neither says."""
        try:
            found = parse_ctrf(await sandbox.read(CTRF, limit_bytes=_CTRF_LIMIT_BYTES))
        except FileRefused:
            found = {}
        return found or merged(summary_lines(output.replace("\r\n", "\n"), first=whole_log))

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


def _lacked(checker: Checker, output: str) -> str:
    """What the checker could not get that it wanted itself; what the agent's work wanted is no excuse for it."""
    if not missing_tool(output):
        return ""
    words = [checker.command]
    paths = [Path(checker.script)] if checker.script else []
    for folder in filter(None, (checker.tests, checker.shared)):
        paths += [path for path in Path(folder).rglob("*") if path.is_file()]
    for path in paths:
        with path.open("rb") as file:
            words.append(file.read(_WORDS_LIMIT_BYTES).decode(errors="replace"))
    return missing_tool(output, wanted_by="\n".join(words))


def parse_reward_json(content: bytes) -> dict[str, float]:
    """A flat object of finite numbers. Raises ValueError for anything else."""
    if not content.strip():
        raise ValueError("is empty")
    try:
        found = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError) as error:
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
