"""Images: pulled by name, or built from a folder and named by its content. Knows no containers."""

import asyncio
import io
import tarfile
from pathlib import Path

import aiodocker
import aiohttp

from sandboxes.base import SandboxSpec
from sandboxes.client import REMEDY, DockerClient
from sandboxes.errors import BuildFailed, DaemonGone, DiskFull, ImageMissing
from sandboxes.retry import BRIEFLY_AWAY, BUSY_TOO, patiently
from sandboxes.tree import content_hash

CONTEXT_LIMIT_BYTES = 1 << 30
LOG_LINES = 30


class ImageStore:
    """Makes images exist, each once, however many ask for it at the same time."""

    def __init__(self, client: DockerClient) -> None:
        self._client = client
        self._ready: dict[str, str] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._building = asyncio.Semaphore(2)

    async def ensure(self, spec: SandboxSpec) -> str:
        """The name of the image that `spec` starts from. Raises: ImageMissing, BuildFailed.

        A context is read once per store: one that changed under a run would give one group two worlds.
        """
        wanted = spec.image or spec.context  # a prebuilt image is what its task was validated with
        if not wanted:
            raise ImageMissing(
                "a Docker sandbox needs an image or a folder with a Dockerfile", remedy="Name one of them."
            )
        async with self._locks.setdefault(wanted, asyncio.Lock()):
            if wanted not in self._ready:
                async with self._building:
                    self._ready[wanted] = await (self._pull(spec) if spec.image else self._build(spec))
        return self._ready[wanted]

    def forget(self, spec: SandboxSpec) -> None:
        """Look again the next time: somebody removed this image."""
        self._ready.pop(spec.image or spec.context, None)

    async def _build(self, spec: SandboxSpec) -> str:
        context = Path(spec.context)
        if not (context / "Dockerfile").is_file():
            raise BuildFailed(f"no Dockerfile in {context}", remedy="Give a context folder with a Dockerfile.")
        tag = f"thundersync/context:{(await asyncio.to_thread(content_hash, context))[:32]}"
        if await self._exists(tag):
            return tag
        archive = await asyncio.to_thread(_archive, context)
        log: list[str] = []
        try:
            async with asyncio.timeout(spec.build_timeout_s):
                build = self._client.open().images.build(
                    fileobj=archive, encoding="identity", tag=tag, rm=True, forcerm=True, stream=True
                )
                async for line in build:
                    log += str(line.get("stream") or line.get("status") or line.get("error") or "").splitlines()
                    if "no space left" in str(line.get("error")):
                        raise _no_room(f"{context / 'Dockerfile'} did not build")
                    if "error" in line:
                        raise _failed(context, str(line["error"]), log)
        except TimeoutError as error:
            raise _failed(context, f"not done within {spec.build_timeout_s:.0f} s", log) from error
        except (aiodocker.DockerError, aiohttp.ClientError) as error:
            raise _failed(context, str(error), log) from error
        if not await self._exists(tag):
            raise _failed(context, "the daemon made no image", log)
        return tag

    async def _pull(self, spec: SandboxSpec) -> str:
        if await self._exists(spec.image):
            return spec.image
        remedy = f"Check the name, log in to its registry, or load it: docker load < {spec.image.split('/')[-1]}.tar"
        try:
            async with asyncio.timeout(spec.build_timeout_s):
                await self._client.open().images.pull(spec.image)
        except TimeoutError as error:
            limit = f"{spec.build_timeout_s:.0f} s"
            raise ImageMissing(f"image {spec.image} did not arrive within {limit}", remedy=remedy) from error
        except (aiodocker.DockerError, aiohttp.ClientError) as error:
            if "no space left" in str(error):
                raise _no_room(f"image {spec.image} was not pulled") from error
            raise ImageMissing(
                f"image {spec.image} is not here and cannot be pulled: {error}", remedy=remedy
            ) from error
        return spec.image

    async def _exists(self, name: str) -> bool:
        try:
            async for attempt in patiently(BUSY_TOO):
                with attempt:
                    await self._client.open().images.inspect(name)
        except aiodocker.DockerError as error:
            if error.status == 404:
                return False
            if BRIEFLY_AWAY.covers(error):
                raise DaemonGone(f"cannot look for image {name}: {error}", remedy=REMEDY) from error
            raise ImageMissing(f"cannot look for image {name}: {error}", remedy="Is Docker still running?") from error
        return True


def _archive(context: Path) -> io.BytesIO:
    """The context as a tar. The daemon itself reads .dockerignore."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(context, arcname=".", filter=_as_root)
    if buffer.tell() > CONTEXT_LIMIT_BYTES:
        raise BuildFailed(f"{context} is larger than {CONTEXT_LIMIT_BYTES >> 20} MiB", remedy="Move data out of it.")
    buffer.seek(0)
    return buffer


def _as_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def _no_room(what: str) -> DiskFull:
    remedy = "Make room where the daemon keeps its data (docker system df, docker system prune)."
    return DiskFull(f"{what}: the Docker daemon's disk is full", remedy=remedy)


def _failed(context: Path, reason: str, log: list[str]) -> BuildFailed:
    said = "\n".join(log[-LOG_LINES:])
    return BuildFailed(
        f"{context / 'Dockerfile'} did not build: {reason}\n{said}", remedy="Build it by hand to see more."
    )
