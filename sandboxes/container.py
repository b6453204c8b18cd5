"""One Docker container: its settings, its attached streams, its removal. Knows not what runs inside as process 1.

Nothing of a container outlives its owner: process 1 ends when its input does, and AutoRemove takes the rest.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import aiodocker
import aiohttp

from sandboxes.base import SandboxSpec
from sandboxes.client import REMEDY, DockerClient
from sandboxes.errors import CloseFailed, DaemonGone, DiskFull, ImageMissing, SandboxError, StartFailed
from sandboxes.retry import BRIEFLY_AWAY, BUSY_TOO, patiently
from sandboxes.session import TOO_OLD

HOME = "/home/agent"
CHECKER_FOLDERS = ("/tests", "/solution", "/logs")
CLOSE_LIMIT_S = 60.0
SCRATCH_MIB = 512
"""Size of each scratch area of a read-only root, where the spec gives none. It counts as memory once written."""

PYTHON_REMEDY = "Add python3 (3.8 or newer) and bash to the image."

# The agent changes users, kills what they left, and hands files over; checkers run with the same. User commands run
# as another user, who has none of these.
_CAPABILITIES = ["SETUID", "SETGID", "KILL", "CHOWN", "DAC_OVERRIDE", "FOWNER"]

FOREIGN = (aiodocker.DockerError, aiohttp.ClientError, OSError, AssertionError, RuntimeError)


class NoPython(StartFailed):
    """The image has no python3, or one that is too old, so that no agent can run in it."""


class Container:
    """A container by name. The name is ours, so that it can be removed even if no answer to its creation came."""

    def __init__(self, client: DockerClient, name: str) -> None:
        self._client = client
        self.name = name
        self._stream: Any = None
        self._said = bytearray()

    @property
    def docker(self) -> aiodocker.Docker:
        return self._client.open()

    async def create(self, settings: Mapping[str, Any]) -> None:
        """Make, attach, start: attached before the start, so that no output can be missed."""
        container = await self.docker.containers.create(dict(settings), name=self.name)
        self._stream = container.attach(stdin=True, stdout=True, stderr=True)
        await self._stream.__aenter__()
        await container.start()

    async def read(self) -> bytes:
        """Some bytes of process 1's output; empty at its end."""
        while (message := await self._stream.read_out()) is not None:
            if message.stream == 1:
                return bytes(message.data)
            self._said += message.data[: 4096 - len(self._said)]
        return b""

    async def write(self, data: bytes) -> None:
        """Bytes for process 1's input. Raises: EOFError when the connection is gone."""
        try:
            await self._stream.write_in(data)
        except AssertionError as error:  # how aiodocker says that the connection is gone
            raise EOFError("the daemon closed the connection") from error

    async def complaint(self) -> str:
        """What process 1 said on its error stream before it ended, also where nobody has read on since."""
        with contextlib.suppress(*FOREIGN, TimeoutError):
            async with asyncio.timeout(1.0):
                while self._stream is not None and await self.read():
                    pass
        return self._said.decode("utf-8", "replace").strip()

    async def remove(self) -> None:
        """Take it away; returns when it is gone. Raises: CloseFailed."""
        await remove(self._client, self.name)
        if self._stream is not None:
            with contextlib.suppress(*FOREIGN):
                await self._stream.close()


async def remove(client: DockerClient, name: str) -> None:
    """Remove a container by name or id, again if the daemon is busy. One that is gone is fine. Raises: CloseFailed."""
    container = client.open().containers.container(name)
    try:
        async with asyncio.timeout(CLOSE_LIMIT_S):
            async for attempt in patiently(BUSY_TOO):
                with attempt:
                    if await _status(container.delete(force=True, v=True)) == 409:
                        # AutoRemove was first: the daemon answers at once, so wait until it is really gone.
                        gone = client.open()._query_json(
                            f"containers/{name}/wait", "POST", params={"condition": "removed"}
                        )
                        await _status(gone)
    except FOREIGN as error:
        raise CloseFailed(f"container {name} cannot be removed: {error}", remedy=f"docker rm -f {name}") from error


def settings(
    spec: SandboxSpec, image: str, labels: Mapping[str, str], *, argv: Sequence[str], quota: bool
) -> dict[str, Any]:
    """What the daemon is told to make: `argv` as process 1, all limits. `quota`: the storage driver has disk quotas."""
    memory = spec.memory_mib << 20
    ulimits = [{"Name": "nofile", "Soft": 4096, "Hard": 4096}, {"Name": "core", "Soft": 0, "Hard": 0}]
    if spec.disk_mib:
        ulimits.append({"Name": "fsize", "Soft": spec.disk_mib << 20, "Hard": spec.disk_mib << 20})
    host: dict[str, Any] = {
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
        "Ulimits": ulimits,
    }
    if spec.disk_mib and quota:
        host["StorageOpt"] = {"size": f"{spec.disk_mib}m"}
    volumes: dict[str, dict[str, str]] = {}
    if spec.read_only_root:
        size = f"size={spec.disk_mib or SCRATCH_MIB}m,exec,nosuid,nodev,mode="
        work = {"/workspace", spec.workdir}
        open_to_all = {"/tmp", "/var/tmp", "/run"} - work
        host["ReadonlyRootfs"] = True
        host["Tmpfs"] = dict.fromkeys(open_to_all, size + "1777")
        host["Tmpfs"] |= dict.fromkeys({HOME, *CHECKER_FOLDERS} - work, size + "0755")
        # Anonymous volumes, unlike tmpfs, begin with what the image has there, and are removed with the container.
        volumes = {path: {} for path in work}
    return {
        "Image": image,
        "Entrypoint": list(argv),
        "Cmd": [],
        "User": "0:0",
        "WorkingDir": "/",
        "Hostname": "sandbox",
        "Env": [f"{key}={value}" for key, value in spec.env.items()],
        "Labels": dict(labels),
        "Volumes": volumes,
        "Healthcheck": {"Test": ["NONE"]},
        "StopTimeout": 1,
        "Tty": False,
        # StdinOnce: when our connection ends, so does process 1's input, and with it the container.
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "HostConfig": host,
    }


def start_error(image: str, error: BaseException) -> SandboxError:
    """A foreign error of a start, by what the user can do about it."""
    text = str(error)
    if isinstance(error, BRIEFLY_AWAY.kinds) and BRIEFLY_AWAY.covers(error):
        return DaemonGone(f"the Docker daemon went away while a container of {image} started: {text}", remedy=REMEDY)
    if "no space left" in text:
        return DiskFull(
            f"the Docker daemon's disk is full, so a container of {image} did not start: {text}",
            remedy="Make room where the daemon keeps its data (docker system df, docker system prune).",
        )
    if "No such image" in text or "no such image" in text:
        return ImageMissing(f"image {image} was removed meanwhile", remedy="Pull or build it again.")
    if TOO_OLD in text:
        return NoPython(f"image {image} has a python3 that is too old", remedy=PYTHON_REMEDY)
    if "python3" in text and ("not found" in text or "no such file" in text):
        return NoPython(f"image {image} has no python3", remedy=PYTHON_REMEDY)
    return StartFailed(f"a container of {image} did not start: {text}", remedy="See the daemon's log.")


def lacks_quotas(error: BaseException) -> bool:
    """Whether the daemon refused a disk limit because its storage driver has none."""
    return isinstance(error, aiodocker.DockerError) and ("storage-opt" in str(error) or "quota" in str(error).lower())


async def _status(call: Awaitable[Any]) -> int:
    """What a removal came to: 204 done, 404 gone before, 409 under way. Raises: DockerError for any other."""
    try:
        await call
    except aiodocker.DockerError as error:
        if error.status not in (404, 409):
            raise
        return int(error.status)
    return 204
