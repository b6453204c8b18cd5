"""Sandboxes without Docker: one bubblewrap box each. The embedded default.

A box is process, pipes and memory only, so that its end, of whatever kind, leaves nothing behind: its agent ends when
its pipe closes, the kernel ends the box with the agent, and with the box go its files.
"""

import asyncio
import functools
import os
import platform
import secrets
from collections.abc import Mapping
from pathlib import Path

from msgspec import structs

from sandboxes.base import Command, Origin, Sandbox, SandboxSpec
from sandboxes.bwrap import BOX_PATH, box_argv, find_python
from sandboxes.cgroups import Cgroups, Group
from sandboxes.channel import Channel
from sandboxes.dockerfile import load_dockerfile
from sandboxes.door import Door
from sandboxes.errors import CloseFailed, ImageMissing, RuntimeUnavailable, SandboxError
from sandboxes.orphans import end_orphans, owner_word
from sandboxes.pipes import Pipes
from sandboxes.seccomp import filter_fds, filter_program
from sandboxes.session import AGENT_FOLDERS, AgentSandbox, Hello, agent_argv, greet
from sandboxes.shield import finish
from sandboxes.startstate import LIMIT_BYTES, StartState, build_state

HOME = "/home/agent"
BOX_MIB = 512
SPARE_MIB = 128
"""Of a box's memory, that files outside /dev/shm cannot take; half of it where it is less than twice this."""
START_LIMIT_S = 60.0
CLOSE_LIMIT_S = 30.0
NOBODY_HERE = "agent:x:1000:1000::/home/agent:/bin/bash\nnobody:x:65534:65534::/:/bin/false\n"


class ProcessRuntime:
    """Makes bubblewrap boxes. Files of a box live in memory, at most `disk_mib` where a spec does not say, and at most
    `box_mib` whatever it says (0: as it says). Where memory is limited per box, they count as such.
    """

    def __init__(self, *, disk_mib: int = BOX_MIB, box_mib: int = 0) -> None:
        self._disk_bytes = disk_mib << 20
        self._box_bytes = box_mib << 20
        self._boxes: set[AgentSandbox] = set()
        # A start is 30 ms of computing: more at once than cores would only make all of them late.
        self._starting = asyncio.Semaphore(2 * (os.cpu_count() or 1))
        self._states: dict[str, StartState] = {}
        self._building: dict[str, asyncio.Lock] = {}
        self._door = Door()

    @property
    def name(self) -> str:
        return "process"

    @property
    def isolation(self) -> str:
        calls = "dangerous system calls refused"
        if not filter_program():
            calls = f"system calls are not filtered, because their numbers on {platform.machine()} are not known"
        return (
            "Commands run in bubblewrap boxes: the host's programs read-only, no network, nothing else of the host in "
            f"sight, {calls}; {_limits(self._cgroups.limited)}; agent and checker are one user, and the host's kernel "
            "is shared."
        )

    @functools.cached_property
    def _cgroups(self) -> Cgroups:
        return Cgroups.find()

    @property
    def outage_limit_s(self) -> float:
        return 0.0

    async def check(self) -> None:
        """Start a box and run a command in it. Raises: RuntimeUnavailable."""
        try:
            box = await self._start(SandboxSpec(), StartState())
            try:
                result = await box.run(Command(script="test ! -e /root && test ! -e /run", timeout_s=30.0))
            finally:
                await box.close()
        except RuntimeUnavailable:
            raise
        except SandboxError as error:
            raise RuntimeUnavailable(
                f"bubblewrap cannot make a sandbox here: {error.message}",
                remedy="Allow unprivileged user namespaces (Ubuntu 24.04: an AppArmor profile for bwrap; in a "
                "container: --security-opt seccomp=unconfined --security-opt systempaths=unconfined), install "
                "bubblewrap 0.8 or newer, or use Docker.",
            ) from error
        if result.exit_code != 0:
            raise RuntimeUnavailable("a bubblewrap box shows files of the host", remedy="Use Docker on this machine.")

    async def prepare(self, spec: SandboxSpec) -> None:
        """Build the start state of `spec`, once. Raises: RuntimeUnavailable, ImageMissing, BuildFailed."""
        await self._state(spec)

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """A new box in the start state of `spec`. Raises: StartFailed and what `prepare` raises."""
        state = await self._state(spec)
        return await self._start(spec, state)

    async def snapshot(self, sandbox: Sandbox, spec: SandboxSpec) -> SandboxSpec:
        """As `Runtime.snapshot`; kept in this process's memory, at most 64 MiB."""
        (box,) = [box for box in self._boxes if box.sandbox_id == sandbox.sandbox_id]
        before = await self._state(spec)
        await box.kill_all()
        name = f"snapshot:{secrets.token_hex(8)}"
        self._states[name] = StartState(await box.pack(limit_bytes=LIMIT_BYTES), before.env, before.digest)
        return structs.replace(spec, context=name)

    async def forget(self, spec: SandboxSpec) -> None:
        """Remove the snapshot that `spec` names."""
        self._states.pop(spec.context, None)

    async def reap(self, labels: Mapping[str, str]) -> int:
        """Remove what is left of boxes whose owner on this machine has ended; returns how many boxes. None has labels.

        The kernel ends a box with its owner. What stays is its empty control group, and where a launcher lost its owner
        in the middle of its start, a half-made child, which waits for ever.
        """
        ended = await asyncio.to_thread(end_orphans)
        return len(ended | await asyncio.to_thread(lambda: self._cgroups.reap()))

    async def close(self) -> None:
        """Remove every box. Idempotent. Raises: CloseFailed, naming boxes that would not end."""
        try:
            await finish(self._close_all(), limit_s=2 * CLOSE_LIMIT_S)
        except TimeoutError as error:
            raise CloseFailed(f"boxes would not end: {[box.sandbox_id for box in self._boxes]}") from error

    async def _close_all(self) -> None:
        await self._door.shut()
        boxes = list(self._boxes)
        ends = await asyncio.gather(*(box.close() for box in boxes), return_exceptions=True)
        failed = [f"{box.sandbox_id}: {end}" for box, end in zip(boxes, ends, strict=True) if end is not None]
        if failed:
            raise CloseFailed(f"{len(failed)} boxes did not end: {'; '.join(failed)}", remedy="End them by hand.")

    async def _state(self, spec: SandboxSpec) -> StartState:
        if spec.network:
            raise RuntimeUnavailable(
                "a process sandbox has no network, and this one asks for it",
                remedy="Use the Docker runtime, or ask for no network.",
            )
        if not spec.context:
            if spec.image:
                raise ImageMissing(f"process sandboxes have no images ({spec.image})", remedy="Use Docker.")
            return StartState()
        # Read once per runtime: a context that changed under a run would give one group two worlds.
        lock = self._building.setdefault(spec.context, asyncio.Lock())
        async with lock:
            if spec.context not in self._states:
                if spec.context.startswith("snapshot:"):
                    raise ImageMissing(f"{spec.context} was removed", remedy="Take another snapshot.")
                self._states[spec.context] = await self._build(spec)
        return self._states[spec.context]

    async def _build(self, spec: SandboxSpec) -> StartState:
        context = Path(spec.context)
        instructions = await asyncio.to_thread(load_dockerfile, context, path=BOX_PATH)
        box = await self._start(spec, StartState())
        try:
            return await build_state(box, context, instructions, timeout_s=spec.build_timeout_s)
        finally:
            await box.close()

    async def _start(self, spec: SandboxSpec, state: StartState) -> AgentSandbox:
        await asyncio.to_thread(lambda: self._cgroups)  # the first time, it tries them out with processes
        sandbox_id = f"box-{secrets.token_hex(6)}"
        python, prefix = find_python()
        disk_bytes = self._room(spec)
        command = [*agent_argv(python, sandbox_id), owner_word()]
        path = f"{BOX_PATH}:{prefix}/bin" if prefix else BOX_PATH
        env = {"PATH": path, "HOME": HOME, "USER": "agent", "LOGNAME": "agent", "TERM": "dumb", "LANG": "C.UTF-8"}
        async with self._starting:
            with self._door, filter_fds() as fds:
                group = self._cgroups.make(sandbox_id, spec)
                pipes = Pipes()
                box = self._box(sandbox_id, spec, pipes, group, Origin(image=state.digest))
                self._boxes.add(box)
                try:
                    argv = box_argv(
                        command, python_prefix=prefix, disk_bytes=disk_bytes, shown=group.shown, filter_fds=fds
                    )
                    # Cancelling asyncio while it starts a process can hang for ever (3.11), so it never sees one.
                    await finish(pipes.open(group.entering(argv), fds), limit_s=START_LIMIT_S)
                    hello = self._hello(spec, {**env, **state.env, **spec.env})
                    await greet(box.channel, hello, deadline_s=START_LIMIT_S)
                    if state.entries:
                        await box.unpack(state.entries)
                except BaseException:
                    await box.close()
                    raise
        return box

    def _room(self, spec: SandboxSpec) -> int:
        room = spec.disk_mib << 20 or self._box_bytes or self._disk_bytes
        if self._box_bytes:
            room = min(room, self._box_bytes)
        if "memory" in self._cgroups.limited:
            # Files are memory. Could they take all of it, every command would be killed, and then the agent too.
            room = min(room, max(spec.memory_mib // 2, spec.memory_mib - SPARE_MIB) << 20)
        return room

    def _box(self, sandbox_id: str, spec: SandboxSpec, pipes: Pipes, group: Group, origin: Origin) -> AgentSandbox:
        async def remove() -> None:
            await pipes.end(sandbox_id)
            await group.remove()
            self._boxes.discard(box)

        box = AgentSandbox(
            sandbox_id,
            Channel(pipes, sandbox_id),
            workdir=spec.workdir,
            origin=origin,
            user_env={"agent": {}, "root": {}},
            remove=remove,
            close_limit_s=CLOSE_LIMIT_S,
        )
        return box

    def _hello(self, spec: SandboxSpec, env: dict[str, str]) -> Hello:
        limits = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": 4096, "RLIMIT_FSIZE": self._room(spec)}
        limited = self._cgroups.limited
        if "memory" not in limited:
            # Not RLIMIT_AS: runtimes that reserve address space without using it (Go, Node, Java) would not start.
            limits["RLIMIT_DATA"] = spec.memory_mib << 20
        if "pids" not in limited and _counts_per_box():
            limits["RLIMIT_NPROC"] = spec.pids
        places = ["/workspace", HOME, "/etc", "/logs", *AGENT_FOLDERS, "/tests", "/solution", spec.workdir]
        folders = dict.fromkeys(places, (0o755, 0))
        folders |= {"/tmp": (0o1777, 0), "/var/tmp": (0o1777, 0)}
        files = {"/etc/passwd": NOBODY_HERE, "/etc/group": "agent:x:1000:\nnogroup:x:65534:\n"}
        files["/etc/hosts"] = "127.0.0.1 localhost sandbox\n"
        return Hello(ttl_s=spec.ttl_s, folders=folders, env=env, limits=limits, files=files)


def _limits(limited: frozenset[str]) -> str:
    """What is limited for a box as a whole, and what is not, in words."""
    whole = {"memory": "memory", "pids": "processes", "cpu": "processor time"}
    else_ = {"memory": "memory is limited per process only", "pids": "processes are not limited on this kernel"}
    else_["cpu"] = "processor time is not limited"
    held = limited | {"pids"} if _counts_per_box() else limited
    per_box = ", ".join(["files", *(word for controller, word in whole.items() if controller in held)])
    return "; ".join([f"limited per box: {per_box}", *(else_[one] for one in whole if one not in held)])


def _counts_per_box() -> bool:
    """Whether RLIMIT_NPROC counts within a box. Before Linux 5.14 it counts all processes of our user."""
    major, minor = (int(part) for part in platform.release().split("-")[0].split(".")[:2])
    return (major, minor) >= (5, 14)
