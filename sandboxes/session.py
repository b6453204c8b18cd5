"""A live sandbox: the calls of `base.Sandbox` as questions to its agent. Knows not what kind of sandbox it is.

Both runtimes make the same class; they differ in how the channel is opened and in how the sandbox is taken away.
"""

import asyncio
import functools
import os
import posixpath
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from sandboxes.base import Command, Origin, Result
from sandboxes.channel import Field
from sandboxes.errors import CloseFailed, FileRefused, FileTooLarge, SandboxError, StartFailed
from sandboxes.shield import finish
from sandboxes.tree import count, pack_tree, unpack_tree

AGENT_UID = 1000
"""The user commands run as, where the agent is root and can change users."""
AGENT_FOLDERS = ("/logs/agent", "/logs/artifacts")
"""Where terminal tasks let an agent leave what somebody may want to see."""
GRACE_S = 30.0
"""What an answer may take beyond a command's own deadline on a busy machine, before the sandbox counts as lost."""
FILE_DEADLINE_S = 120.0
TREE_LIMIT_BYTES = 1 << 28
TOO_OLD = "this python3 cannot run the sandbox agent, which needs 3.8 or newer"
# A line that any python3 reads: older ones would not get through the agent's text (3.6), or far into its work (3.7).
_BEGIN = f"import sys; sys.version_info >= (3, 8) or sys.exit({TOO_OLD!r}); exec(sys.argv.pop(1))"


class Caller(Protocol):
    """Questions to a sandbox: `channel.Channel` asks its agent, `execs.ExecChannel` does without one."""

    def shut(self, reason: str) -> None:
        """Refuse every later call with this reason."""

    async def call(self, fields: Sequence[Field], *, deadline_s: float) -> list[bytes]: ...


class Hello(Struct, frozen=True, kw_only=True):
    """What an agent is told first."""

    ttl_s: float
    folders: Mapping[str, tuple[int, int]]
    """Path to (mode, uid): made where missing, with all their content given to that user."""
    env: Mapping[str, str]
    limits: Mapping[str, int] = {}
    """Names of the `resource` module (`RLIMIT_NPROC`) to soft and hard limits of every command."""
    files: Mapping[str, str] = {}


class AgentSandbox:
    """A sandbox with an agent as its process 1. `remove` takes the sandbox itself away; it is called once."""

    def __init__(
        self,
        sandbox_id: str,
        channel: Caller,
        *,
        workdir: str,
        origin: Origin,
        user_env: Mapping[str, Mapping[str, str]],
        remove: Callable[[], Awaitable[None]],
        close_limit_s: float,
    ) -> None:
        self._sandbox_id = sandbox_id
        self._channel = channel
        self._workdir = workdir
        self._origin = origin
        self._user_env = user_env
        self._remove = remove
        self._close_limit_s = close_limit_s
        self._closing: asyncio.Lock = asyncio.Lock()
        self._closed = False

    @property
    def sandbox_id(self) -> str:
        return self._sandbox_id

    @property
    def origin(self) -> Origin:
        return self._origin

    @property
    def channel(self) -> Caller:
        return self._channel

    async def run(self, command: Command) -> Result:
        """Run to the end or to its deadline; then everything it started is killed. Raises: SandboxGone."""
        return await self.execute(["bash", "-c", command.script], command)

    async def execute(self, argv: list[str], command: Command) -> Result:
        """Run `argv` instead of the command's script, with the command's other settings."""
        env = {**self._user_env[command.user], **command.env}
        fields: list[Field] = ["run", AGENT_UID if command.user == "agent" else -1]
        fields += [int(command.timeout_s * 1000), command.output_limit_bytes, int(command.keeps_running)]
        fields += [command.cwd or self._workdir]
        fields += [command.stdin, len(argv), *argv, len(env), *(field for pair in env.items() for field in pair)]
        answer = await self._channel.call(fields, deadline_s=command.timeout_s + GRACE_S)
        status, timed_out, oom_killed, milliseconds = map(int, answer[:4])
        stdout, stdout_total, stderr, stderr_total = answer[4:]
        return Result(
            exit_code=_exit_code(status),
            stdout=stdout,
            stderr=stderr,
            stdout_cut_bytes=int(stdout_total) - len(stdout),
            stderr_cut_bytes=int(stderr_total) - len(stderr),
            timed_out=bool(timed_out),
            oom_killed=bool(oom_killed),
            seconds=milliseconds / 1000,
        )

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Put a file in place, with its parents; it belongs to the owner of the folder it lands in.

        Raises: FileRefused for a path that is not absolute and plain, or when the sandbox has no room; SandboxGone.
        """
        await self._channel.call(["write", checked_path(path), mode & 0o777, data], deadline_s=FILE_DEADLINE_S)

    async def read(self, path: str, *, limit_bytes: int = 1 << 24) -> bytes:
        """Content of a regular file. Raises: FileMissing, FileTooLarge, FileRefused, SandboxGone."""
        size, content = await self._channel.call(["read", checked_path(path), limit_bytes], deadline_s=FILE_DEADLINE_S)
        if int(size) > limit_bytes:
            raise FileTooLarge(f"{path} has {int(size)} bytes, the limit is {limit_bytes}")
        return content

    async def put_tree(self, source: Path, target: str) -> None:
        """Copy the content of a host folder into `target`. Links are copied as links, modes and times are kept.

        Raises: FileMissing, FileTooLarge (256 MiB in all), FileRefused, SandboxGone.
        """
        checked = checked_path(target)
        entries = await asyncio.to_thread(pack_tree, source, limit_bytes=TREE_LIMIT_BYTES)
        await self._channel.call(["unpack", checked, count(entries), *entries], deadline_s=FILE_DEADLINE_S)

    async def get_tree(self, source: str, target: Path, *, limit_bytes: int = TREE_LIMIT_BYTES) -> None:
        """Copy the content of a folder inside into the new host folder `target`, links that lead out of it refused.

        Raises: FileMissing, FileTooLarge, FileRefused, SandboxGone.
        """
        entries = await self._channel.call(["pack", checked_path(source), limit_bytes], deadline_s=FILE_DEADLINE_S)
        await asyncio.to_thread(unpack_tree, entries, target)

    async def unpack(self, entries: list[bytes]) -> None:
        """Lay a start state over the sandbox's root; `entries` came from `pack`."""
        await self._channel.call(["unpack", "/", count(entries), *entries], deadline_s=FILE_DEADLINE_S)

    async def pack(self, *, limit_bytes: int) -> list[bytes]:
        """Every file of the sandbox's own file system, as entries. Raises: FileTooLarge, FileRefused, SandboxGone."""
        return await self._channel.call(["pack", "/", limit_bytes], deadline_s=FILE_DEADLINE_S)

    async def kill_all(self) -> None:
        """Kill every process of the sandbox except its agent. Raises: SandboxGone."""
        await self._channel.call(["kill"], deadline_s=GRACE_S)

    async def close(self) -> None:
        """Remove it. Idempotent, bounded, safe under cancellation. Raises: what removing it raised, the first time."""
        if not self._closed:
            try:
                await finish(self._close(), limit_s=self._close_limit_s)
            except TimeoutError as error:
                raise CloseFailed(f"sandbox {self._sandbox_id} would not go") from error

    async def _close(self) -> None:
        async with self._closing:
            if self._closed:
                return
            self._channel.shut("it was closed")
            await self._remove()
            self._closed = True


async def greet(channel: Caller, hello: Hello, *, deadline_s: float) -> None:
    """Tell a fresh agent what it needs; returns once it is ready. Raises: StartFailed."""
    lists: tuple[Mapping[str, Field], ...] = (hello.files, hello.env)
    fields: list[Field] = ["hello", int(hello.ttl_s * 1000)]
    fields += [len(hello.limits), *(field for pair in hello.limits.items() for field in pair)]
    fields.append(len(hello.folders))
    for path, (mode, uid) in hello.folders.items():
        fields += [checked_path(path), mode, uid]
    for pairs in lists:
        fields += [len(pairs), *(field for pair in pairs.items() for field in pair)]
    try:
        await channel.call(fields, deadline_s=deadline_s)
    except SandboxError as error:
        raise StartFailed(f"a sandbox did not start: {error.message}", remedy=error.remedy) from error


def agent_argv(python: str, sandbox_id: str) -> list[str]:
    """The command line of an agent; the id is there for people who read process lists."""
    return [python, "-I", "-S", "-c", _BEGIN, _agent_source(), sandbox_id]


@functools.cache
def _agent_source() -> str:
    """Read once: a file that changes under a run must not give its sandboxes two agents."""
    return files("sandboxes").joinpath("agent.py").read_text(encoding="utf-8")


def checked_path(path: str) -> str:
    """`path` if it is absolute, without `..` and NUL. Raises: FileRefused."""
    if not path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise FileRefused(
            f"not a path inside a sandbox: {path!r}", remedy="Give an absolute path without `..`, such as /tmp/a.txt."
        )
    return "/" + posixpath.normpath(path).lstrip("/")


def _exit_code(status: int) -> int:
    """Bash's way to tell how a process ended: its exit code, or 128 + signal."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
