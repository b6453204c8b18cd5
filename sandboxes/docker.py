"""Sandboxes in Docker containers, through aiodocker. The agent is process 1, its pipe the attached streams.

So there is no `exec` (each would cost 50 ms of computing, more than most commands), and nothing to forget: when the
owner ends, however it ends, the daemon closes the agent's input, the agent ends, and AutoRemove takes the container.
An image without a python3 that can run the agent is left to `sandboxes.execs`; only there every call is an exec.
"""

import asyncio
import os
import secrets
from collections.abc import Mapping, Sequence

import aiodocker
from msgspec import structs

from sandboxes.base import Origin, Sandbox, SandboxSpec
from sandboxes.channel import Channel
from sandboxes.client import REMEDY, DockerClient
from sandboxes.container import (
    CHECKER_FOLDERS,
    CLOSE_LIMIT_S,
    FOREIGN,
    HOME,
    Container,
    NoPython,
    lacks_quotas,
    remove,
    settings,
    start_error,
)
from sandboxes.door import Door
from sandboxes.errors import BuildFailed, CloseFailed, ImageMissing, RuntimeUnavailable, SandboxError
from sandboxes.execs import ExecChannel, init_argv
from sandboxes.images import ImageStore
from sandboxes.owner import Owner
from sandboxes.pulls import Say
from sandboxes.retry import BRIEFLY_AWAY, BUSY_TOO, patiently
from sandboxes.session import AGENT_FOLDERS, AGENT_UID, TOO_OLD, AgentSandbox, Caller, Hello, agent_argv, greet
from sandboxes.shield import finish
from sandboxes.snapshots import Snapshots

SANDBOX_LABEL = "thundersync.sandbox"
START_LIMIT_S = 120.0
NO_QUOTAS = (
    "the Docker daemon's storage has no quotas: sandboxes' disk limits hold for each file, not for all they write "
    "(quotas: overlay2 on xfs mounted with pquota, btrfs, or zfs)"
)


class DockerRuntime:
    """Makes containers on one daemon. `docker_host` as in DOCKER_HOST (empty: the default socket).

    `labels` are put on every container, beside those that say who owns it. `images_bytes`: of disk that images built
    here may take, 0 = no limit. `say` gets a line at a time about images that are pulled or removed, and once that disk
    limits cannot be kept.
    """

    def __init__(
        self,
        docker_host: str = "",
        *,
        labels: Mapping[str, str] | None = None,
        images_bytes: int = 0,
        say: Say = lambda text: None,
    ) -> None:
        self._client = DockerClient(docker_host)
        self._images = ImageStore(self._client, budget_bytes=images_bytes, say=say)
        self._snapshots = Snapshots(self._client)
        self._forked: dict[str, Origin] = {}
        self._labels = dict(labels or {})
        self._say = say
        self._owner = Owner.current()
        self._sandboxes: set[AgentSandbox] = set()
        self._without_python: set[str] = set()
        self._quota = True
        # The daemon does 12 starts a second whatever is asked of it; more at once only wait inside it.
        width = max(4, 2 * (os.cpu_count() or 1))
        self._starting = asyncio.Semaphore(width)
        self._removing = asyncio.Semaphore(width)
        self._executing = asyncio.Semaphore(width)
        self._door = Door()

    @property
    def name(self) -> str:
        return "docker"

    @property
    def isolation(self) -> str:
        return (
            "Commands run in Docker containers as an ordinary user without capabilities: own files, processes and "
            "network (off unless a task asks for it), limited memory, processors and processes; the size of the disk "
            "is limited only where the daemon's storage has quotas, and the host's kernel is shared."
        )

    @property
    def outage_limit_s(self) -> float:
        return 0.0

    async def check(self) -> None:
        """Raises: RuntimeUnavailable when no daemon answers."""
        await self._client.check()

    async def prepare(self, spec: SandboxSpec) -> None:
        """Pull or build the image, once. Raises: ImageMissing, BuildFailed."""
        await self._images.ensure(spec)

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """A new container. Raises: StartFailed, DaemonGone, DiskFull and what `prepare` raises."""
        image = await self._images.ensure(spec)
        try:
            return await self._patient_start(spec, image)
        except ImageMissing:  # removed since `ensure` saw it
            self._images.forget(spec)
            return await self._patient_start(spec, await self._images.ensure(spec))

    async def snapshot(self, sandbox: Sandbox, spec: SandboxSpec) -> SandboxSpec:
        """As `Runtime.snapshot`; half a second, and as much disk as was written. Fork from one, do not chain them."""
        if spec.read_only_root:
            raise BuildFailed(
                "a sandbox with a read-only root keeps its work in volumes, which no snapshot has",
                remedy="Prepare it with a writable root.",
            )
        await sandbox.kill_all()
        with self._door:
            image = await finish(self._snapshots.take(sandbox.sandbox_id), limit_s=START_LIMIT_S)
        self._forked[image] = sandbox.origin
        return structs.replace(spec, image=image, context="")

    async def forget(self, spec: SandboxSpec) -> None:
        """Remove the snapshot that `spec` names."""
        self._images.forget(spec)
        self._forked.pop(spec.image, None)
        await self._snapshots.drop(spec.image)

    async def reap(self, labels: Mapping[str, str]) -> int:
        """Remove containers and snapshots with these labels whose owner on this machine has ended; returns how many.

        Only a container that was made but never started needs this, or one whose daemon was restarted.
        Raises: RuntimeUnavailable, CloseFailed.
        """
        wanted = {SANDBOX_LABEL: "", **labels}
        filters = {"label": [f"{key}={value}" if value else key for key, value in wanted.items()]}
        try:
            async for attempt in patiently(BUSY_TOO):
                with attempt:
                    found = await self._client.open()._query_json(
                        "containers/json", params={"all": 1, "filters": aiodocker.utils.clean_filters(filters)}
                    )
        except FOREIGN as error:
            raise RuntimeUnavailable(f"cannot list containers: {error}", remedy=REMEDY) from error
        owners = [(container["Id"], Owner.from_labels(container["Labels"])) for container in found]
        gone = [container_id for container_id, owner in owners if owner is not None and owner.is_gone()]
        for container_id in gone:
            await remove(self._client, container_id)
        return len(gone) + await self._snapshots.reap(wanted)

    async def close(self) -> None:
        """Remove every sandbox still owned, then end the session. Idempotent.

        Raises: CloseFailed, naming what is left.
        """
        try:
            await finish(self._close_all(), limit_s=2 * CLOSE_LIMIT_S)
        except TimeoutError as error:
            left = [sandbox.sandbox_id for sandbox in self._sandboxes]
            raise CloseFailed(f"containers would not go: {left}", remedy="docker rm -f NAME") from error

    async def _close_all(self) -> None:
        try:
            await self._door.shut()
            sandboxes = list(self._sandboxes)
            ends = await asyncio.gather(*(sandbox.close() for sandbox in sandboxes), return_exceptions=True)
            await self._snapshots.drop_all()
        finally:
            await self._client.close()
        failed = [f"{one.sandbox_id}: {end}" for one, end in zip(sandboxes, ends, strict=True) if end is not None]
        if failed:
            raise CloseFailed(f"{len(failed)} containers are left: {'; '.join(failed)}", remedy="docker rm -f NAME")

    async def _patient_start(self, spec: SandboxSpec, image: str) -> AgentSandbox:
        """Start anew, under a new name, when the daemon was away for a moment: nothing has run yet."""
        async for attempt in patiently(BRIEFLY_AWAY):
            with attempt:
                async with self._starting:
                    with self._door:
                        return await self._start_some_way(spec, image)
        raise AssertionError("the last attempt returns or raises")

    async def _start_some_way(self, spec: SandboxSpec, image: str) -> AgentSandbox:
        if image not in self._without_python:
            name = _new_name()
            container = Container(self._client, name)
            try:
                return await self._start(
                    spec, image, container, Channel(container, name), agent_argv("python3", container.name)
                )
            except NoPython:
                self._without_python.add(image)
        container = Container(self._client, _new_name())
        return await self._start(spec, image, container, ExecChannel(container, self._executing), init_argv(spec.ttl_s))

    async def _start(
        self, spec: SandboxSpec, image: str, container: Container, channel: Caller, argv: Sequence[str]
    ) -> AgentSandbox:
        async def take_away() -> None:
            async with self._removing:
                await container.remove()
            self._sandboxes.discard(sandbox)

        identity = {"HOME": HOME, "USER": "agent", "LOGNAME": "agent"}
        sandbox = AgentSandbox(
            container.name,
            channel,
            workdir=spec.workdir,
            origin=self._forked.get(spec.image) or self._images.origin(image),
            user_env={"agent": identity, "root": {"HOME": "/root", "USER": "root", "LOGNAME": "root"}},
            remove=take_away,
            close_limit_s=CLOSE_LIMIT_S,
        )
        self._sandboxes.add(sandbox)
        try:
            await finish(self._create(container, spec, image, argv), limit_s=START_LIMIT_S)
            await greet(channel, _hello(spec), deadline_s=START_LIMIT_S)
        except BaseException as error:
            try:
                await sandbox.close()
            except CloseFailed as left:
                error.add_note(str(left))
            if not isinstance(error, SandboxError) and isinstance(error, FOREIGN):
                raise start_error(spec.image or spec.context, error) from error
            if TOO_OLD in str(error):
                raise start_error(spec.image or spec.context, error) from error
            raise
        return sandbox

    async def _create(self, container: Container, spec: SandboxSpec, image: str, argv: Sequence[str]) -> None:
        labels = {**self._labels, **spec.labels, **self._owner.labels(), SANDBOX_LABEL: container.name}
        quota = self._quota and spec.disk_mib > 0
        try:
            await container.create(settings(spec, image, labels, argv=argv, quota=quota))
        except aiodocker.DockerError as error:
            if not (quota and lacks_quotas(error)):
                raise
            if self._quota:
                self._quota = False
                self._say(NO_QUOTAS)
            await container.create(settings(spec, image, labels, argv=argv, quota=False))


def _new_name() -> str:
    return f"thundersync-{secrets.token_hex(8)}"


def _hello(spec: SandboxSpec) -> Hello:
    # The checker's folders are root's alone to write; what the agent works in is the agent's.
    folders = dict.fromkeys(CHECKER_FOLDERS, (0o755, 0)) | dict.fromkeys((HOME, *AGENT_FOLDERS), (0o755, AGENT_UID))
    folders |= {"/workspace": (0o755, AGENT_UID), spec.workdir: (0o755, AGENT_UID)}
    return Hello(ttl_s=spec.ttl_s, folders=folders, env={})
