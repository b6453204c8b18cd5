"""Judges repairs: takes the agent's change out of its sandbox as a patch, and runs the tests on it in a fresh one.

Place in the flow: `reward.RewardChecker` prepares the start state before the first turn and judges after the last.
Knows nothing of tokens or groups. What leaves the agent's sandbox is a text that git can apply, and nothing else: test
files and whatever configures the test framework are put back before the tests run (`tasks.repair.is_surface`).
"""

import asyncio
import re
from collections.abc import Mapping

from msgspec import Struct

from sandboxes.base import Command, Result, Runtime, Sandbox, SandboxSpec
from sandboxes.shield import finish
from thundersync.core.types import RolloutId, Task
from thundersync.errors import ThundersyncError
from thundersync.score.disk import is_full
from thundersync.score.missing_tools import missing_tool, told_of_full_disk
from thundersync.score.official import official_statuses
from thundersync.score.test_logs import TestLog, merged, read_log
from thundersync.tasks.repair import Repair, is_surface, load_repair, terminated

PATCH_LIMIT_BYTES = 1 << 24
LOG_LIMIT_BYTES = 1 << 25
GIT_TIMEOUT_S = 600.0
CLOSE_LIMIT_S = 60.0
_PATCH, _GOLD, _SCRIPT = (f"/tmp/.thundersync-{name}" for name in ("change.patch", "reference.patch", "tests.sh"))
_ROOM_REMEDY = "Make room where sandboxes keep their files; the rollout is tried again."
_HEADERS_WE_NEVER_MAKE = re.compile(r"^(rename|copy) (from|to) ", re.MULTILINE)

_GIT = """
git() {
  command git -c safe.directory='*' -c core.fsmonitor=false -c core.hooksPath=/dev/null -c core.autocrlf=false \\
    -c user.name=thundersync -c user.email=thundersync@localhost -c commit.gpgsign=false -c gc.auto=0 "$@"
}
export GIT_AUTHOR_DATE='2020-01-01T00:00:00Z' GIT_COMMITTER_DATE='2020-01-01T00:00:00Z'
"""
_APPLY = """
put() { # FILE
  git apply --whitespace=nowarn "$1" && return
  git checkout -q -- . && git clean -qfd
  git apply --whitespace=nowarn --3way "$1" && { git reset -q; return; }
  git checkout -q -- . && git clean -qfd
  command -v patch >/dev/null && patch --batch --forward --fuzz=5 -p1 -s -i "$1" >/dev/null && return
  git checkout -q -- . && git clean -qfd; return 1
}
"""
_START = """
set -eu
[ -e .git ] || git init -q
git add -A && git commit -q --allow-empty -m start
if [ ! -s "$BUG" ]; then
  # The reference must fit: else this is not the repository that the row is about, and every change would fail.
  git apply --check "$GOLD" 2>/dev/null || { command -v patch >/dev/null &&
    patch --dry-run --batch --forward --fuzz=5 -p1 -s -i "$GOLD" >/dev/null; } ||
    { echo "the reference change does not fit the repository in $PWD"; exit 3; }
fi
if [ -s "$BUG" ]; then put "$BUG" || { echo "the bug's patch does not apply"; exit 3; }; fi
git add -A && git commit -q --allow-empty -m bug
"""
# One commit without a past: a repository's later commits, tags, reflogs and unreachable objects hold the fix.
_FORGET = """
while IFS= read -r -d '' file; do rm -f -- "$file"; done
git add -A
git remote | while read -r each; do git remote remove "$each"; done
rm -rf .git/refs/stash .git/worktrees .git/modules .git/objects/info/alternates .git/rebase-* .git/*_HEAD
base=$(git commit-tree "$(git write-tree)" -m base)
git checkout -q --detach "$base"
git for-each-ref --format='%(refname)' | while read -r each; do git update-ref --no-deref -d "$each"; done
git checkout -q -B main "$base"
git update-ref refs/thundersync/base "$base"
rm -rf .git/logs && git reflog expire --expire=now --all && git gc -q --prune=now
commits=$(git cat-file --batch-all-objects --batch-check='%(objecttype)' | grep -c commit)
[ "$commits" = 1 ] || { echo "$commits commits are left in the repository"; exit 4; }
if id -u agent >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then chown -R agent: . 2>/dev/null || true; fi
"""
_TAKE = """
set -eu
export GIT_INDEX_FILE=$(mktemp -u)
trap 'rm -f "$GIT_INDEX_FILE"' EXIT
git read-tree refs/thundersync/base
git add -A
git diff --cached --binary --full-index --no-color --no-ext-diff --no-textconv --no-renames refs/thundersync/base
"""
_RESTORE = """
while IFS= read -r -d '' path; do
  rm -rf -- "$path"
  git checkout -q HEAD -- ":(literal)$path" 2>/dev/null || true
done
"""


class RepairVerdict(Struct, frozen=True, kw_only=True):
    """`resolved` is the reward. `why` says in words what decided, `rewards` in numbers."""

    resolved: bool
    why: str
    rewards: dict[str, float]


class JudgeBroken(ThundersyncError):
    """The repair could not be judged: that is not the agent's doing."""


async def prepare_repair(sandbox: Sandbox, repair: Repair, *, for_agent: bool = True) -> None:
    """Make the start state: the bug in, and, `for_agent`, hidden tests and the repository's past out.

    Raises: JudgeBroken, and the sandbox's SandboxError.
    """
    await sandbox.write(_PATCH, repair.bug.encode("utf-8", "surrogateescape"))
    await sandbox.write(_GOLD, b"" if repair.bug else repair.gold.encode("utf-8", "surrogateescape"))
    script = f"trap 'rm -f {_PATCH} {_GOLD}' EXIT\nBUG={_PATCH} GOLD={_GOLD}\n"
    script += _GIT + _APPLY + _START + (_FORGET if for_agent else "")
    result = await _git(sandbox, repair, script, stdin=_nul(repair.hidden))
    if result.exit_code != 0:
        raise JudgeBroken(
            f"the start state of {repair.instance_id} could not be made: {_said(result)}",
            remedy="Its image must hold git and the repository that the row's patch was made for.",
        )


async def take_change(sandbox: Sandbox, repair: Repair) -> str | None:
    """The agent's change as a patch; None if its repository is beyond saying, or the change beyond any size.

    Runs as the agent: its repository's settings are its own work. Raises: JudgeBroken where time, memory or disk ran
    out, and the sandbox's SandboxError.
    """
    script = f"cd {repair.repo_dir}\n{_GIT}{_TAKE}"
    command = Command(script=script, timeout_s=GIT_TIMEOUT_S, cwd="/", output_limit_bytes=PATCH_LIMIT_BYTES)
    result = await sandbox.run(command)
    await _refuse_want(sandbox, result, f"the change of {repair.instance_id} could not be taken")
    if result.exit_code != 0 or result.stdout_cut_bytes:
        return None
    return result.stdout.decode("utf-8", "surrogateescape")


class RepairJudge:
    """Judges any number of changes at once, each in a sandbox of its own, of `pids` processes, with `labels`."""

    def __init__(self, runtime: Runtime, *, pids: int = 256, labels: Mapping[str, str] | None = None) -> None:
        self._runtime = runtime
        self._pids = pids
        self._labels = dict(labels or {})

    async def judge(
        self, task: Task, change: str | None, *, even_empty: bool = False, rollout_id: RolloutId = ""
    ) -> RepairVerdict:
        """Run the tests on `change`. Without one nothing can be resolved, and nothing runs unless `even_empty`.

        Raises: JudgeBroken, and the runtime's SandboxError.
        """
        repair = await asyncio.to_thread(load_repair, task.checker.tests)
        if change is None:
            return _unresolved(repair, "the repository was beyond saying what changed")
        if not change.strip() and not even_empty:
            return _unresolved(repair, "nothing was changed")
        labels = {**self._labels, "rollout": rollout_id}
        sandbox = await self._runtime.start(spec_of(task, pids=self._pids, labels=labels))
        try:
            await prepare_repair(sandbox, repair, for_agent=False)
            if change.strip() and not await self._apply(sandbox, repair, change):
                return _unresolved(repair, "the change does not apply")
            return await self._run(sandbox, task, repair)
        finally:
            await finish(sandbox.close(), limit_s=CLOSE_LIMIT_S)

    async def _apply(self, sandbox: Sandbox, repair: Repair, change: str) -> bool:
        if _HEADERS_WE_NEVER_MAKE.search(change):
            return False
        await sandbox.write(_PATCH, terminated(change).encode("utf-8", "surrogateescape"))
        excludes = " ".join(f"--exclude={_quoted(_glob_literal(path))}" for path in repair.hidden)
        script = (
            f"{_GIT}{_APPLY}git apply --numstat -z {_PATCH} || exit 3\n"
            f"git apply --whitespace=nowarn {excludes} {_PATCH} || put {_PATCH} || exit 3\n"
        )
        result = await _git(sandbox, repair, script, stdin=b"", limit_bytes=PATCH_LIMIT_BYTES)
        await _refuse_want(sandbox, result, f"the change could not be put into {repair.instance_id}")
        if result.exit_code != 0:
            return False
        changed = [
            entry.split("\t", 2)[2] for entry in result.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1]
        ]
        back = [path for path in changed if is_surface(path, repair)]
        files = " ".join(f"':(literal)'{_quoted(path)}" for path in repair.restored)
        check = f"git diff --quiet HEAD -- {files}\n" if files else ""
        restored = await _git(sandbox, repair, _GIT + _RESTORE + check, stdin=_nul(back))
        if restored.exit_code != 0:
            raise JudgeBroken(
                f"the test files of {repair.instance_id} could not be put back: {_said(restored)}",
                remedy="Report it with the rollout: a change must not be able to do this.",
            )
        return True

    async def _run(self, sandbox: Sandbox, task: Task, repair: Repair) -> RepairVerdict:
        await sandbox.write(_SCRIPT, repair.script.encode("utf-8", "surrogateescape"), mode=0o755)
        result = await sandbox.run(
            Command(
                script=f"exec 2>&1; bash {_SCRIPT}; code=$?; rm -f {_SCRIPT}; exit $code",
                timeout_s=task.checker.timeout_s,
                cwd=repair.repo_dir,
                env=task.checker.env,
                user="root",
                output_limit_bytes=LOG_LIMIT_BYTES,
            )
        )
        if result.timed_out:
            return _unresolved(repair, f"the tests ran past {task.checker.timeout_s:g} s")
        output = result.stdout.decode("utf-8", "replace")
        log = read_log(output, repair.parser)
        if log is None:
            raise JudgeBroken(
                f"the tests of {repair.instance_id} did not begin: {_said(result)}",
                remedy="Run the reference through `tasks check`; the image must hold what the test script calls.",
            )
        official = await official_statuses(log.text, repair.parser)
        if official is not None:
            log = TestLog(
                statuses=merged(official.items()),
                totals=log.totals,
                counted=log.counted,
                exit_code=log.exit_code,
                text=log.text,
            )
        if not log.statuses and (fault := missing_tool(output, wanted_by=repair.script)):
            raise JudgeBroken(
                f"no test of {repair.instance_id} ran, for want of {fault}",
                remedy="Put what its test script calls into the image.",
            )
        verdict = grade(repair, log)
        if not verdict.resolved and told_of_full_disk(output) and await is_full(sandbox):
            raise JudgeBroken(f"the disk was full while {repair.instance_id} was tested", remedy=_ROOM_REMEDY)
        return verdict


def grade(repair: Repair, log: TestLog) -> RepairVerdict:
    """Resolved: every test that must pass does, and every one that passed still does."""
    if log.contradiction:
        return _unresolved(repair, log.contradiction)
    fixed = [test for test in repair.fail_to_pass if _holds(log, test, repair, skipped=False)]
    kept = [test for test in repair.pass_to_pass if _holds(log, test, repair, skipped=repair.skipped_holds)]
    resolved = len(fixed) == len(repair.fail_to_pass) and len(kept) == len(repair.pass_to_pass)
    return RepairVerdict(
        resolved=resolved,
        why=f"{len(fixed)} of {len(repair.fail_to_pass)} failing tests pass, "
        f"{len(kept)} of {len(repair.pass_to_pass)} others still do",
        rewards={
            "reward": float(resolved),
            "fixed": _share(len(fixed), len(repair.fail_to_pass)),
            "kept": _share(len(kept), len(repair.pass_to_pass)),
        },
    )


def spec_of(task: Task, *, pids: int = 256, labels: Mapping[str, str] | None = None) -> SandboxSpec:
    """The sandbox a task's agent gets, for whoever else needs one like it."""
    return SandboxSpec(
        image=task.image.name,
        context=task.image.context,
        workdir=task.workdir,
        env=task.env,
        network=task.network,
        cpus=task.cpus,
        memory_mib=task.memory_mib,
        disk_mib=task.disk_mib,
        pids=pids,
        build_timeout_s=task.build_timeout_s,
        ttl_s=task.checker.timeout_s + task.build_timeout_s + 3 * GIT_TIMEOUT_S,
        labels=dict(labels or {}),
    )


def _holds(log: TestLog, test: str, repair: Repair, *, skipped: bool) -> bool:
    status = log.status(test)
    if status is None:
        return repair.fail_only
    return status in ("PASSED", "XFAIL") or (skipped and status == "SKIPPED")


def _unresolved(repair: Repair, why: str) -> RepairVerdict:
    return RepairVerdict(resolved=False, why=why, rewards={"reward": 0.0, "fixed": 0.0, "kept": 0.0})


async def _refuse_want(sandbox: Sandbox, result: Result, what: str) -> None:
    """Time, memory or disk that ran out is no answer of git's. Raises: JudgeBroken."""
    if result.timed_out:
        raise JudgeBroken(f"{what} within {GIT_TIMEOUT_S:g} s", remedy="Look what else this machine is busy with.")
    if result.oom_killed:
        raise JudgeBroken(f"{what}: git ran out of memory", remedy="Give the task more memory.")
    if result.exit_code != 0 and told_of_full_disk(result.stderr.decode("utf-8", "replace")) and await is_full(sandbox):
        raise JudgeBroken(f"{what}: the disk is full", remedy=_ROOM_REMEDY)


async def _git(sandbox: Sandbox, repair: Repair, script: str, *, stdin: bytes, limit_bytes: int = 65536) -> Result:
    command = Command(
        script=f"cd {repair.repo_dir} || exit 5\n{script}",
        timeout_s=GIT_TIMEOUT_S,
        cwd="/",
        stdin=stdin,
        user="root",
        output_limit_bytes=limit_bytes,
    )
    return await sandbox.run(command)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


def _nul(paths: list[str]) -> bytes:
    return b"".join(path.encode("utf-8", "surrogateescape") + b"\0" for path in paths)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _glob_literal(path: str) -> str:
    return re.sub(r"([*?\[\\])", r"\\\1", path)


def _said(result: Result) -> str:
    if result.timed_out:
        return "it ran out of time"
    said = (result.stdout + result.stderr).decode("utf-8", "replace").strip()
    return said[-600:] or f"exit code {result.exit_code}"
