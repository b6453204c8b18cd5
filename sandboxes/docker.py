"""Sandboxes in Docker containers, through aiodocker. The agent is process 1, its pipe the attached streams.

So there is no `exec` (each would cost 50 ms of computing, more than most commands), and nothing to forget: when the
owner ends, however it ends, the daemon closes the agent's input, the agent ends, and AutoRemove takes the container.
"""

import asyncio
import contextlib
import os
import secrets
from collections.abc import Awaitable, Mapping
from typing import Any

import aiodocker
import aiohttp

from sandboxes.base import Sandbox, SandboxSpec
from sandboxes.channel import Channel
from sandboxes.client import REMEDY, DockerClient
from sandboxes.errors import CloseFailed, RuntimeUnavailable, StartFailed
from sandboxes.images import ImageStore
from sandboxes.owner import Owner
from sandboxes.session import AGENT_UID, AgentSandbox, Hello, agent_argv, greet
from sandboxes.shield import finish

SANDBOX_LABEL = "thundersync.sandbox"
HOME = "/home/agent"
START_LIMIT_S = 120.0
CLOSE_LIMIT_S = 60.0

# The agent changes users, kills what they left, and hands files over; checkers run with the same. User commands run
# as another user, who has none of these.
_CAPABILITIES = ["SETUID", "SETGID", "KILL", "CHOWN", "DAC_OVERRIDE", "FOWNER"]

_FOREIGN = (aiodocker.DockerError, aiohttp.ClientError, OSError, AssertionError, RuntimeError)


class DockerRuntime:
    """Makes containers on one daemon. `docker_host` as in DOCKER_HOST (empty: the default socket).

    `labels` are put on every container, beside those that say who owns it.
    """

    def __init__(self, docker_host: str = "", *, labels: Mapping[str, str] | None = None) -> None:
        self._client = DockerClient(docker_host)
        self._images = ImageStore(self._client)
        self._labels = dict(labels or {})
        self._owner = Owner.current()
        self._sandboxes: set[AgentSandbox] = set()
        # The daemon does 12 starts a second whatever is asked of it; more at once only wait inside it.
        width = max(4, 2 * (os.cpu_count() or 1))
        self._starting = asyncio.Semaphore(width)
        self._removing = asyncio.Semaphore(width)
        self._closed = False

    @property
    def name(self) -> str:
        return "docker"

    @property
    def isolation(self) -> str:
        return (
            "Commands run in Docker containers as an ordinary user without capabilities: own files, processes and "
            "network (off unless a task asks for it), limited memory, processors and processes; the size of the disk "
            "is not limited, and the host's kernel is shared."
        )

    async def check(self) -> None:
        """Raises: RuntimeUnavailable when no daemon answers."""
        await self._client.check()

    async def prepare(self, spec: SandboxSpec) -> None:
        """Pull or build the image, once. Raises: ImageMissing, BuildFailed."""
        await self._images.ensure(spec)

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """A new container. Raises: StartFailed and what `prepare` raises."""
        image = await self._images.ensure(spec)
        if self._closed:
            raise StartFailed("this runtime was closed", remedy="Make a new runtime.")
        async with self._starting:
            return await self._start(spec, image)

    async def reap(self, labels: Mapping[str, str]) -> int:
        """Remove containers with these labels whose owner on this machine has ended; returns how many.

        Only a container that was made but never started needs this, or one whose daemon was restarted.
        Raises: RuntimeUnavailable, CloseFailed.
        """
        wanted = {SANDBOX_LABEL: "", **labels}
        filters = {"label": [f"{key}={value}" if value else key for key, value in wanted.items()]}
        try:
            found = await self._client.open()._query_json(
                "containers/json", params={"all": 1, "filters": aiodocker.utils.clean_filters(filters)}
            )
        except _FOREIGN as error:
            raise RuntimeUnavailable(f"cannot list containers: {error}", remedy=REMEDY) from error
        owners = [(container["Id"], Owner.from_labels(container["Labels"])) for container in found]
        gone = [container_id for container_id, owner in owners if owner is not None and owner.is_gone()]
        for container_id in gone:
            await self._remove(container_id)
        return len(gone)

    async def close(self) -> None:
        """Remove every sandbox still owned, then end the session. Idempotent.

        Raises: CloseFailed, naming what is left.
        """
        self._closed = True
        await finish(self._close_all(), limit_s=2 * CLOSE_LIMIT_S)

    async def _close_all(self) -> None:
        sandboxes = list(self._sandboxes)
        ends = await asyncio.gather(*(sandbox.close() for sandbox in sandboxes), return_exceptions=True)
        await self._client.close()
        failed = [f"{one.sandbox_id}: {end}" for one, end in zip(sandboxes, ends, strict=True) if end is not None]
        if failed:
            raise CloseFailed(f"{len(failed)} containers are left: {'; '.join(failed)}", remedy="docker rm -f NAME")

    async def _start(self, spec: SandboxSpec, image: str) -> AgentSandbox:
        # Named by us, so that it can be removed even if the answer to its creation never reached us.
        name = f"thundersync-{secrets.token_hex(8)}"
        streams = _Streams()
        channel = Channel(streams, name)

        async def remove() -> None:
            async with self._removing:
                await self._remove(name)
            await streams.close()
            self._sandboxes.discard(sandbox)

        identity = {"HOME": HOME, "USER": "agent", "LOGNAME": "agent"}
        sandbox = AgentSandbox(
            name,
            channel,
            workdir=spec.workdir,
            user_env={"agent": identity, "root": {"HOME": "/root", "USER": "root", "LOGNAME": "root"}},
            remove=remove,
            close_limit_s=CLOSE_LIMIT_S,
        )
        self._sandboxes.add(sandbox)
        try:
            await finish(self._create(name, spec, image, streams), limit_s=START_LIMIT_S)
            await greet(channel, _hello(spec), deadline_s=START_LIMIT_S)
        except BaseException as error:
            await sandbox.close()
            if isinstance(error, _FOREIGN) and not isinstance(error, StartFailed):
                raise _start_failed(image, error) from error
            raise
        return sandbox

    async def _create(self, name: str, spec: SandboxSpec, image: str, streams: "_Streams") -> None:
        docker = self._client.open()
        labels = {**self._labels, **spec.labels, **self._owner.labels(), SANDBOX_LABEL: name}
        container = await docker.containers.create(_container(name, spec, image, labels), name=name)
        await streams.open(container)
        await container.start()

    async def _remove(self, name: str) -> None:
        container = self._client.open().containers.container(name)
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                if await _status(container.delete(force=True, v=True)) == 409:
                    # AutoRemove was first: the daemon answers at once, so wait until the container is really gone.
                    gone = self._client.open()._query_json(
                        f"containers/{name}/wait", "POST", params={"condition": "removed"}
                    )
                    await _status(gone)
        except (aiodocker.DockerError, aiohttp.ClientError, OSError) as error:
            raise CloseFailed(f"container {name} cannot be removed: {error}", remedy=f"docker rm -f {name}") from error


async def _status(call: Awaitable[Any]) -> int:
    """What a removal came to: 204 done, 404 gone before, 409 under way. Raises: DockerError for any other."""
    try:
        await call
    except aiodocker.DockerError as error:
        if error.status not in (404, 409):
            raise
        return int(error.status)
    return 204


class _Streams:
    """A container's attached streams as a carrier."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._said = bytearray()

    async def open(self, container: Any) -> None:
        """Attach before the start, so that no output can be missed."""
        self._stream = container.attach(stdin=True, stdout=True, stderr=True)
        await self._stream.__aenter__()

    async def read(self) -> bytes:
        while (message := await self._stream.read_out()) is not None:
            if message.stream == 1:
                return bytes(message.data)
            self._said += message.data[: 4096 - len(self._said)]
        return b""

    async def write(self, data: bytes) -> None:
        try:
            await self._stream.write_in(data)
        except AssertionError as error:  # how aiodocker says that the connection is gone
            raise EOFError("the daemon closed the connection") from error

    async def complaint(self) -> str:
        return self._said.decode("utf-8", "replace").strip()

    async def close(self) -> None:
        if self._stream is not None:
            with contextlib.suppress(*_FOREIGN):
                await self._stream.close()


def _container(name: str, spec: SandboxSpec, image: str, labels: dict[str, str]) -> dict[str, Any]:
    memory = spec.memory_mib << 20
    return {
        "Image": image,
        "Entrypoint": agent_argv("python3", name),
        "Cmd": [],
        "User": "0:0",
        "WorkingDir": "/",
        "Hostname": "sandbox",
        "Env": [f"{key}={value}" for key, value in spec.env.items()],
        "Labels": labels,
        "Healthcheck": {"Test": ["NONE"]},
        "StopTimeout": 1,
        "Tty": False,
        # StdinOnce: when our connection ends, so does the agent's input, and with it the container.
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "HostConfig": {
            "NetworkMode": "bridge" if spec.network else "none",
            "AutoRemove": True,
            "Memory": memory,
            "MemorySwap": memory,
            "NanoCpus": int(spec.cpus * 1e9),
            "PidsLimit": spec.pids,
            "CapDrop": ["ALL"],
            "CapAdd": _CAPABILITIES,
            "SecurityOpt": ["no-new-privileges"],
            "LogConfig": {"Type": "none"},
            "Ulimits": [{"Name": "nofile", "Soft": 4096, "Hard": 4096}, {"Name": "core", "Soft": 0, "Hard": 0}],
        },
    }


def _hello(spec: SandboxSpec) -> Hello:
    # The checker's folders are root's alone to write; what the agent works in is the agent's.
    folders = {"/tests": (0o755, 0), "/solution": (0o755, 0), "/logs": (0o755, 0), HOME: (0o755, AGENT_UID)}
    folders |= {"/work": (0o755, AGENT_UID), spec.workdir: (0o755, AGENT_UID)}
    return Hello(ttl_s=spec.ttl_s, folders=folders, env={})


def _start_failed(image: str, error: BaseException) -> StartFailed:
    if "python3" in str(error) and "not found" in str(error):
        return StartFailed(f"image {image} has no python3", remedy="Add python3 (3.8 or newer) and bash to the image.")
    return StartFailed(f"a container of {image} did not start: {error}", remedy="See the daemon's log.")
