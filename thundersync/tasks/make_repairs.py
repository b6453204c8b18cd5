"""`tasks make-repairs`: bugs that tests notice, found by running them, as SWE-smith rows.

Over a world (`package`) and its candidate bugs (`mutations`): each is put into a fresh sandbox and the tests run. A bug
is kept if it lets some tests fail that pass without it, and leaves others passing; tests that do not end alike twice
are left out. Which bugs are kept depends on the seed alone, never on which sandbox was first. Refuses to know how a
world was made and how a repair is judged, but for the log's form, which is the judge's own.
"""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from sandboxes.base import Command, Runtime, SandboxSpec
from sandboxes.shield import finish
from thundersync.score.test_logs import END, START, Status, TestLog, read_log
from thundersync.tasks.mutations import Mutation
from thundersync.tasks.package import GIT_DATE, Package, PackageFailed
from thundersync.tasks.repair import files_of_tests

CLOSE_LIMIT_S = 60.0
LOG_LIMIT_BYTES = 1 << 25
CLEAN_RUNS = 2
_PATCH = "/tmp/bug.patch"
_PASSES: tuple[Status, ...] = ("PASSED", "XFAIL")

State = Literal["valid", "survived", "broken", "timeout", "flaky", "unfit"]
MEANINGS: dict[State, str] = {
    "valid": "some tests fail with it, others still pass",
    "survived": "no test notices it",
    "broken": "tests cannot be collected, or none passes",
    "timeout": "the tests run past their limit",
    "flaky": "the tests that notice it do so only at times",
    "unfit": "the run's log contradicts itself, or the patch does not apply",
}


class Attempt(Struct, frozen=True, kw_only=True):
    """What came of one bug; a line of the journal."""

    world: str
    instance_id: str
    kind: str
    state: State
    why: str = ""
    """Of one that is not valid, where there is more to say than its state."""
    fail_to_pass: list[str] = []
    pass_to_pass: list[str] = []
    seconds: float = 0.0


class Clean(Struct, frozen=True, kw_only=True):
    """How the tests end without a bug: those that pass every time, in their order, and how long a run takes."""

    passing: list[str]
    left_out: int
    """Tests that failed, were skipped, or did not end alike."""
    seconds: float


class Made(Struct, frozen=True, kw_only=True):
    """The rows of one world, and how they were found."""

    world: Package
    clean: Clean
    candidates: int
    rows: list[dict[str, Any]]
    states: dict[State, int]


class Journal:
    """One attempt a line, written as it ends, so that a killed search goes on where it was."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.known: dict[tuple[str, str], Attempt] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            for line in path.read_bytes().splitlines():
                try:
                    each = msgspec.json.decode(line, type=Attempt)
                except msgspec.DecodeError:
                    continue  # torn by a kill: that bug is tried again
                self.known[each.world, each.instance_id] = each
        partial = path.with_name(f"{path.name}.partial")
        partial.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in self.known.values()))
        partial.replace(path)
        self._file = path.open("ab")

    def add(self, attempt: Attempt) -> None:
        self.known[attempt.world, attempt.instance_id] = attempt
        self._file.write(msgspec.json.encode(attempt) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class RepairMaker:
    """Tries bugs in sandboxes of `runtime`, `jobs` at a time."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        journal: Journal,
        jobs: int,
        timeout_s: float,
        done: Callable[[Attempt], None] = lambda attempt: None,
    ) -> None:
        """`timeout_s`: of one run of the tests. `done` hears of each attempt as it ends."""
        self._runtime = runtime
        self._journal = journal
        self._jobs = jobs
        self._timeout_s = timeout_s
        self._done = done

    async def make(self, world: Package, candidates: Sequence[Mutation], *, count: int) -> Made:
        """The first `count` valid bugs of `candidates`, in their order; fewer if there are no more.

        Raises: PackageFailed when no test passes without a bug; SandboxError.
        """
        await self._runtime.prepare(_spec(world))
        clean = await self._clean(world)
        dockerfile = await asyncio.to_thread((world.context / "Dockerfile").read_text)
        key = hashlib.sha256(
            f"{world.stem} {world.test_cmd} {self._runtime.name} {dockerfile} {sorted(clean.passing)}".encode()
        ).hexdigest()[:16]
        found: dict[int, Attempt] = {}
        waiting = iter(enumerate(candidates))

        async def work() -> None:
            # Whatever was begun is ended: so the first `count` in order are the same however many run at once.
            while sum(each.state == "valid" for each in found.values()) < count:
                index, mutation = next(waiting, (-1, None))
                if mutation is None:
                    return
                instance_id = f"{world.stem}.{mutation.kind}__{mutation.digest}"
                known = self._journal.known.get((key, instance_id))
                if known is None:
                    known = await self._try(world, mutation, clean, key, instance_id)
                    self._journal.add(known)
                    self._done(known)
                found[index] = known

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._jobs):
                tasks.create_task(work())
        valid = [(index, each) for index, each in sorted(found.items()) if each.state == "valid"][:count]
        rows = [_row(world, candidates[index].patch, each) for index, each in valid]
        return Made(
            world=world,
            clean=clean,
            candidates=len(candidates),
            rows=rows,
            states=dict(Counter(each.state for each in found.values())),
        )

    async def _clean(self, world: Package) -> Clean:
        started_s = time.monotonic()
        logs = []
        for _ in range(CLEAN_RUNS):
            log = await self._run(world, "", [])
            if isinstance(log, str):
                raise PackageFailed(
                    f"the tests of {world.name} cannot be run: {log}",
                    remedy="They must run with pytest, in an image with bash, git and python3 (--base-image); "
                    "name what else they import with --with, or raise --timeout.",
                )
            logs.append(log)
        names = list(logs[0].statuses)
        passing = [name for name in names if all(log.status(name) in _PASSES for log in logs)]
        # What the judge runs is found by the ids' files.
        passing = [name for name in passing if files_of_tests([name])]
        if not passing:
            said = " | ".join(logs[0].text.strip().splitlines()[-6:])
            raise PackageFailed(
                f"no test of {world.name} passes: {said or 'pytest printed nothing'}",
                remedy="Name what else its tests import with --with, or choose a package that has its tests with it.",
            )
        everything = {name for log in logs for name in log.statuses}
        seconds = (time.monotonic() - started_s) / CLEAN_RUNS
        return Clean(passing=passing, left_out=len(everything) - len(passing), seconds=seconds)

    async def _try(self, world: Package, mutation: Mutation, clean: Clean, key: str, instance_id: str) -> Attempt:
        started_s = time.monotonic()
        files = files_of_tests(clean.passing)
        logs: list[TestLog] = []
        state: State = "valid"
        why = ""
        failing, passing = list(clean.passing), list(clean.passing)
        for _ in range(2):
            log = await self._run(world, mutation.patch, files)
            if isinstance(log, str) or log.contradiction:
                state = "timeout" if log == _LATE else "unfit"
                why = log if isinstance(log, str) else log.contradiction
                break
            logs.append(log)
            failing = [name for name in failing if log.status(name) == "FAILED"]
            passing = [name for name in passing if log.status(name) in _PASSES]
            if not passing:
                state = "broken"
            elif not failing:
                # An error is no failure: the tests did not get to say anything.
                errors = any(log.status(name) == "ERROR" for name in clean.passing)
                state = "flaky" if len(logs) == 2 else "broken" if errors else "survived"
            if state != "valid":
                break
        return Attempt(
            world=key,
            instance_id=instance_id,
            kind=mutation.kind,
            state=state,
            why=why,
            fail_to_pass=failing if state == "valid" else [],
            pass_to_pass=passing if state == "valid" else [],
            seconds=round(time.monotonic() - started_s, 3),
        )

    async def _run(self, world: Package, patch: str, files: Sequence[str]) -> TestLog | str:
        """The tests in a fresh sandbox; or why there is no log."""
        sandbox = await self._runtime.start(_spec(world))
        try:
            await sandbox.write(_PATCH, patch.encode())
            named = " ".join("'" + name.replace("'", "'\\''") + "'" for name in files)
            script = (
                "cd /testbed && git --version >/dev/null || exit 91\n"
                f"[ ! -s {_PATCH} ] || git -c safe.directory='*' apply --whitespace=nowarn {_PATCH} || exit 91\n"
                f"exec 2>&1\necho '{START}'\n{world.test_cmd} {named}\ncode=$?\necho '{END}'\nexit $code\n"
            )
            result = await sandbox.run(
                Command(
                    script=script,
                    timeout_s=self._timeout_s,
                    cwd="/",
                    user="root",
                    output_limit_bytes=LOG_LIMIT_BYTES,
                )
            )
        finally:
            await finish(sandbox.close(), limit_s=CLOSE_LIMIT_S)
        if result.timed_out:
            return _LATE
        output = (result.stdout + result.stderr).decode("utf-8", "replace")
        return read_log(output, "pytest_lines") or output.strip()[-300:] or f"exit code {result.exit_code}"


_LATE = "they ran past their limit"


def _spec(world: Package) -> SandboxSpec:
    return SandboxSpec(context=str(world.context.absolute()), workdir="/testbed")


def _row(world: Package, patch: str, attempt: Attempt) -> dict[str, Any]:
    """In SWE-smith's columns, with the two that a row made on this machine has besides."""
    return {
        "instance_id": attempt.instance_id,
        "repo": f"swesmith/{world.stem}",
        "patch": patch,
        "FAIL_TO_PASS": attempt.fail_to_pass,
        "PASS_TO_PASS": attempt.pass_to_pass,
        "created_at": GIT_DATE,
        "image_name": f"swesmith.x86_64.{world.stem.replace('__', '_1776_')}",
        "base_commit": world.commit,
        "problem_statement": "",
        "context": world.context.name,
        "test_cmd": world.test_cmd,
    }
