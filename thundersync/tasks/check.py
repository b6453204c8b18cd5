"""`tasks check`: what a task is worth before anything is trained on it.

Per task: is it complete, does its world build, is an attempt that does nothing worth zero, and its reference solution
everything. Sits beside the run, over the same loaders, sandboxes and checkers as a run has. Published sets hold two to
seven tasks in a hundred that fail this. Refuses to know formats.
"""

import asyncio
import errno
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from sandboxes.base import Result, Runtime, Sandbox
from sandboxes.errors import (
    BuildFailed,
    CloseFailed,
    DaemonGone,
    DiskFull,
    ImageMissing,
    SandboxError,
    SandboxGone,
)
from sandboxes.shield import finish
from thundersync.core.types import Task
from thundersync.errors import ThundersyncError
from thundersync.score.missing_tools import missing_tool, wants_network
from thundersync.score.repairs import JudgeBroken, RepairJudge, spec_of
from thundersync.score.reward import CheckFailed, RewardChecker, Verdict
from thundersync.score.solution import run_solution, solution_limit_s
from thundersync.score.stages import in_stages
from thundersync.tasks.baked import baked
from thundersync.tasks.found import Found, escaped
from thundersync.tasks.kept import KeptFiles
from thundersync.tasks.standin import base_images

CLOSE_LIMIT_S = 60.0
FULL = 1.0 - 1e-9
_NO_BASE = ("pull access denied for ", "manifest for ", "failed to resolve reference ", 'Get "https://', "Get https://")
"""A daemon's words for a base image that it could not get."""

State = Literal[
    "ok", "needs_root", "needs_network", "refused", "no_solution", "build_failed", "unsolved", "empty_scores", "broken"
]
GOOD: tuple[State, ...] = ("ok", "needs_root")
BAD: tuple[State, ...] = ("build_failed", "unsolved", "empty_scores", "broken")
"""States that are the task's fault; the others say what it asks for and this check could not give."""

MEANINGS: dict[State, str] = {
    "ok": "complete; its solution scores full, doing nothing scores zero",
    "needs_root": "the same, but its solution works as root only, and agents are ordinary users",
    "needs_network": "something of it comes from the internet, which was not to be had",
    "refused": "incomplete, or it asks for what cannot be run",
    "no_solution": "doing nothing scores zero; there is no reference solution to try",
    "build_failed": "its image does not build",
    "unsolved": "its reference solution does not score full",
    "empty_scores": "doing nothing scores",
    "broken": "its checker gives no reward",
}


class TaskReport(Struct, frozen=True, kw_only=True):
    """What was found about one task; a line of the report."""

    key: str
    format: str
    state: State
    reason: str = ""
    empty: float | None = None
    """The reward of an attempt that does nothing."""
    solved: float | None = None
    """The reward of the reference solution."""
    fetches: list[str] = []
    """Hosts and package managers that its Dockerfile and scripts name, by reading them."""
    stand_in: str = ""
    """The image that took the place of the task's base images."""
    baked: bool = False
    """Found with --bake-tools: what its checker installs with uv was put into its image, where it can be."""
    runtime: str = ""
    seconds: float = 0.0


class _Ended(Exception):
    """A task's check is over: `state` and `reason`."""

    def __init__(self, state: State, reason: str) -> None:
        super().__init__(reason)
        self.state: State = state
        self.reason = reason


class TaskCheck:
    """Checks any number of tasks, `jobs` at a time."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        jobs: int,
        network: Literal["task", "off"] = "task",
        stand_in: str = "",
        place: Callable[[Task], Task] | None = None,
        bake: bool = False,
        keep: KeptFiles | None = None,
    ) -> None:
        """`network`: `off` gives none to any sandbox. `place` puts the image `stand_in` into a task, where wanted.
        `bake` puts the checker's tools into it, by way of a folder in `keep`."""
        self._runtime = runtime
        self._jobs = jobs
        # A process sandbox has none: what a task really needs shows when it is missing.
        self._network = "off" if runtime.name == "process" else network
        self._stand_in = stand_in
        self._place = place
        self._bake = bake
        self._keep = keep or KeptFiles()
        self._checker = RewardChecker(runtime=runtime)
        self._judge = RepairJudge(runtime)

    async def run(self, found: Sequence[Found], *, done: Callable[[TaskReport], None]) -> None:
        """Check all of `found`; `done` hears of each as it ends.

        Raises: an ExceptionGroup of RuntimeUnavailable (DaemonGone), DiskFull or OSError, where what is left cannot be
        checked either.
        """
        waiting = iter(found)

        async def work() -> None:
            for each in waiting:
                done(await self.check(each))

        async with asyncio.TaskGroup() as workers:
            for _ in range(min(self._jobs, len(found))):
                workers.create_task(work())

    async def check(self, found: Found) -> TaskReport:
        """One task. Every failure is an answer, but this machine's own, which `run` names too: those are raised."""
        started_s = time.monotonic()
        report = TaskReport(
            key=found.key, format=found.format, state="ok", baked=self._bake, runtime=self._runtime.name
        )
        seen: dict[str, float] = {}
        state: State = "ok"
        reason = ""
        try:
            if found.task is None:
                raise _Ended("refused", "; ".join(found.faults))
            fetches = await asyncio.to_thread(_fetches, found.task)
            task = await self._placed(found.task)
            stand_in = self._stand_in if task.image != found.task.image else ""
            report = msgspec.structs.replace(report, fetches=fetches, stand_in=stand_in)
            state, reason = await self._states(task, seen)
        except _Ended as ended:
            state, reason = ended.state, ended.reason
        except (SandboxError, ThundersyncError, OSError) as error:
            if self._ends_all(error, found.task):
                raise
            if isinstance(error, SandboxGone | CloseFailed):
                await self._runtime.check()  # with its daemon gone it would be no fault of the task's
            state, reason = "broken", str(error)
        return msgspec.structs.replace(
            report,
            state=state,
            reason=escaped(reason),
            empty=seen.get("empty"),
            solved=seen.get("solved"),
            seconds=round(time.monotonic() - started_s, 2),
        )

    def _ends_all(self, error: Exception, task: Task | None) -> bool:
        """Whether no other task could be checked now: not where a sandbox has a disk of its own, as all boxes of the
        process runtime have, and those of tasks that bound it."""
        if isinstance(error, DiskFull):
            return self._runtime.name != "process" and not (task is not None and task.disk_mib)
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        return full or isinstance(error, DaemonGone)

    async def _placed(self, task: Task) -> Task:
        if self._place is not None:
            task = await asyncio.to_thread(self._place, task)
        if self._bake:
            task = await asyncio.to_thread(baked, task, self._keep)
        if self._network == "off":
            task = msgspec.structs.replace(task, network=False)
        return task

    async def _states(self, task: Task, seen: dict[str, float]) -> tuple[State, str]:
        await self._build(task)
        seen["empty"] = (await self._empty(task)).reward
        if seen["empty"] > 0:
            raise _Ended("empty_scores", f"an attempt that does nothing scores {seen['empty']:g}")
        if not task.solution:
            return "no_solution", "there is no reference solution"
        as_agent = await self._solved(task, "agent")
        seen["solved"] = as_agent.reward
        if as_agent.reward >= FULL:
            return "ok", ""
        as_root = await self._solved(task, "root")
        seen["solved"] = max(as_agent.reward, as_root.reward)
        if as_root.reward >= FULL:
            return "needs_root", "its reference solution works as root only"
        if fault := as_root.said:
            return "needs_network", f"its reference solution could not get what it needs: {fault}"
        # Where installing does nothing, its failure says nothing.
        if self._stand_in and (wanted := wants_network(await asyncio.to_thread(_read, task.solution))):
            return "needs_network", f"its reference solution installs or fetches: {', '.join(wanted)}"
        return "unsolved", f"its reference solution scores {as_root.reward:g} ({as_root.why})"

    async def _build(self, task: Task) -> None:
        try:
            async with asyncio.timeout(task.build_timeout_s + CLOSE_LIMIT_S):
                await self._runtime.prepare(spec_of(task))
        except ImageMissing as error:
            raise _Ended("needs_network", f"its image is not here: {task.image.name or error.message}") from error
        except BuildFailed as error:
            if any(mark in error.message for mark in _NO_BASE):
                bases = await asyncio.to_thread(base_images, Path(task.image.context) / "Dockerfile")
                raise _Ended("needs_network", f"its base image is not here: {', '.join(bases)}") from error
            if fault := missing_tool(error.message):
                raise _Ended("needs_network", f"its image could not be built: {fault}") from error
            raise _Ended("build_failed", error.message) from error
        except TimeoutError as error:
            raise _Ended("build_failed", f"it was not built within {task.build_timeout_s:g} s") from error

    async def _empty(self, task: Task) -> Verdict:
        if task.checker.verdict == "repair":
            try:
                judged = await self._judge.judge(task, "", even_empty=True)
            except JudgeBroken as error:
                raise _broken(CheckFailed("checker", error.message)) from error
            return Verdict(reward=float(judged.resolved), rewards=judged.rewards)
        async with self._sandbox(task) as sandbox:
            return await self._in_stages(sandbox, task, lambda stage: asyncio.sleep(0))

    async def _solved(self, task: Task, user: Literal["agent", "root"]) -> "_Attempt":
        results: list[Result] = []

        async def solve(stage: Task) -> None:
            results.append(await run_solution(sandbox, stage, user))

        async with self._sandbox(task) as sandbox:
            verdict = await self._in_stages(sandbox, task, solve)
        result = results[-1]
        output = b"".join(each.stdout + each.stderr for each in results).decode("utf-8", "replace")
        late = f"the script ran past {solution_limit_s(task):g} s"
        why = late if result.timed_out else f"the script ended with {result.exit_code}"
        why += f", its last words: {output.strip()[-300:]!r}" if output.strip() else ""
        return _Attempt(reward=verdict.reward, said=missing_tool(output), why=why)

    async def _in_stages(self, sandbox: Sandbox, task: Task, act: Callable[[Task], Awaitable[None]]) -> Verdict:
        try:
            return await in_stages(
                sandbox,
                task,
                act=lambda stage, last: act(stage),
                judge=lambda stage: self._checker.score(sandbox, stage),
                checker=self._checker,
            )
        except CheckFailed as error:
            raise _broken(error) from error

    @asynccontextmanager
    async def _sandbox(self, task: Task) -> AsyncIterator[Sandbox]:
        sandbox = await self._runtime.start(spec_of(task))
        try:
            try:
                await self._checker.prepare(sandbox, task)
            except CheckFailed as error:
                raise _broken(error) from error
            yield sandbox
        finally:
            await finish(sandbox.close(), limit_s=CLOSE_LIMIT_S)


class _Attempt(Struct, frozen=True):
    reward: float
    said: str
    """What the solution could not get, by its own words."""
    why: str


def _broken(error: CheckFailed) -> _Ended:
    """A checker without a verdict: for want of the internet, or broken."""
    fault = missing_tool(error.message)
    return _Ended("needs_network" if fault else "broken", error.message)


def _fetches(task: Task) -> list[str]:
    paths = [Path(task.solution), Path(task.checker.script), Path(task.checker.tests) / "test.sh"]
    for stage in task.stages[1:]:
        paths += [Path(stage.solution), Path(stage.checker.tests) / "test.sh"]
    if task.image.context:
        paths.append(Path(task.image.context) / "Dockerfile")
    return list(dict.fromkeys(each for path in paths if path.is_file() for each in wants_network(_read(path))))


def _read(path: Path | str) -> str:
    return Path(path).read_text(encoding="utf-8", errors="replace")
