"""Images: pulled by name, or built from a folder and named by its content. Knows no containers."""

import asyncio
import io
import tarfile
from pathlib import Path

import aiodocker
import aiohttp

from sandboxes.base import Origin, SandboxSpec
from sandboxes.client import REMEDY, DockerClient
from sandboxes.errors import BuildFailed, DaemonGone, DiskFull, ImageMissing
from sandboxes.pulls import ROOM_REMEDY, Say, pull
from sandboxes.retry import BRIEFLY_AWAY, BUSY_TOO, patiently
from sandboxes.shelf import LABEL, REPOSITORY, Shelf
from sandboxes.tree import content_hash

CONTEXT_LIMIT_BYTES = 1 << 30
LOG_LINES = 30


class ImageStore:
    """Makes images exist, each once, however many ask for it at the same time.

    What a name means is settled at its first use: all sandboxes of one store start from the same image, whatever is
    pulled or tagged meanwhile. `budget_bytes`: of the disk that images built here may take; 0 = no limit.
    """

    def __init__(self, client: DockerClient, *, budget_bytes: int = 0, say: Say = lambda text: None) -> None:
        self._client = client
        self._say = say
        self._shelf = Shelf(client, budget_bytes=budget_bytes, say=say)
        self._ready: dict[str, str] = {}
        self._pinned: dict[str, str] = {}
        self._digests: dict[str, str] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._building = asyncio.Semaphore(2)

    async def ensure(self, spec: SandboxSpec) -> str:
        """The id (`sha256:...`) of the image that `spec` starts from. Raises: ImageMissing, BuildFailed, DiskFull.

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
                    self._ready[wanted] = await (self._named(spec) if spec.image else self._built(spec))
        return self._ready[wanted]

    def origin(self, image: str) -> Origin:
        """Of sandboxes that are made from the image with this id, which `ensure` gave."""
        return Origin(image=image, digest=self._digests.get(image, ""))

    def forget(self, spec: SandboxSpec) -> None:
        """Look again the next time: somebody removed this image."""
        self._ready.pop(spec.image or spec.context, None)

    async def _named(self, spec: SandboxSpec) -> str:
        found = await self._find(spec.image)
        if found is None:
            await pull(self._client, spec.image, limit_s=spec.build_timeout_s, say=self._say)
            found = await self._find(spec.image)
        if found is None:
            raise ImageMissing(f"image {spec.image} is not here although it was pulled", remedy="Report it.")
        if self._pinned.setdefault(spec.image, found) != found:
            raise ImageMissing(
                f"image {spec.image} is another one than before: {found[:19]} in the place of "
                f"{self._pinned[spec.image][:19]}",
                remedy="What it was validated with is gone. Name it by its digest (image@sha256:...) and run again.",
            )
        return found

    async def _find(self, name: str) -> str | None:
        """The id of a local image. `name@sha256:...` may also give the id of an image that came from no registry."""
        if (found := await self._id(name)) is not None or "@" not in name:
            return found
        plain, _, digest = name.partition("@")
        return digest if await self._id(digest) == digest and await self._id(plain) == digest else None

    async def _built(self, spec: SandboxSpec) -> str:
        tag = await self._build(spec)
        await self._shelf.touch(tag.partition(":")[2])
        found = await self._id(tag)
        if found is None:
            raise BuildFailed(f"the image of {spec.context} was removed as it was made", remedy="Try again.")
        await self._shelf.make_room({*self._ready.values(), found})
        return found

    async def _build(self, spec: SandboxSpec) -> str:
        context = Path(spec.context)
        if not (context / "Dockerfile").is_file():
            raise BuildFailed(f"no Dockerfile in {context}", remedy="Give a context folder with a Dockerfile.")
        tag = f"{REPOSITORY}:{(await asyncio.to_thread(content_hash, context))[:32]}"
        if await self._id(tag) is not None:
            return tag
        archive = await asyncio.to_thread(_archive, context)
        log: list[str] = []
        try:
            async with asyncio.timeout(spec.build_timeout_s):
                build = self._client.open().images.build(
                    fileobj=archive,
                    encoding="identity",
                    tag=tag,
                    rm=True,
                    forcerm=True,
                    stream=True,
                    labels={LABEL: "context"},
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
        if await self._id(tag) is None:
            raise _failed(context, "the daemon made no image", log)
        return tag

    async def _id(self, name: str) -> str | None:
        """What the daemon calls a local image; None if it has none of this name."""
        try:
            async for attempt in patiently(BUSY_TOO):
                with attempt:
                    found = await self._client.open().images.inspect(name)
                    self._digests[found["Id"]] = next(iter(found.get("RepoDigests") or ()), "")
                    return str(found["Id"])
        except aiodocker.DockerError as error:
            if error.status == 404:
                return None
            if BRIEFLY_AWAY.covers(error):
                raise DaemonGone(f"cannot look for image {name}: {error}", remedy=REMEDY) from error
            raise ImageMissing(f"cannot look for image {name}: {error}", remedy="Is Docker still running?") from error
        raise AssertionError("the last attempt returns or raises")


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
    return DiskFull(f"{what}: the Docker daemon's disk is full", remedy=ROOM_REMEDY)


def _failed(context: Path, reason: str, log: list[str]) -> BuildFailed:
    said = "\n".join(log[-LOG_LINES:])
    return BuildFailed(
        f"{context / 'Dockerfile'} did not build: {reason}\n{said}", remedy="Build it by hand to see more."
    )
