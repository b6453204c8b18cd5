"""Images made of live containers, so that many start where one has been prepared. Knows no specs.

Files only: no process, no tmpfs, no volume is in one. A snapshot carries its owner's labels, like a container.
"""

import secrets
from collections.abc import Mapping

import aiodocker

from sandboxes.client import REMEDY, DockerClient
from sandboxes.container import FOREIGN
from sandboxes.errors import BuildFailed, CloseFailed, DiskFull, RuntimeUnavailable
from sandboxes.owner import Owner
from sandboxes.retry import BUSY_TOO, patiently

REPOSITORY = "thundersync/snapshot"


class Snapshots:
    """The snapshots of one runtime; `drop_all` removes them."""

    def __init__(self, client: DockerClient) -> None:
        self._client = client
        self._taken: set[str] = set()

    async def take(self, container: str) -> str:
        """Name of a new image with the container's files as they are now. Raises: BuildFailed, DiskFull."""
        name = secrets.token_hex(8)
        self._taken.add(f"{REPOSITORY}:{name}")
        try:
            # Paused meanwhile, so that no file is caught half written.
            wanted = {"container": container, "repo": REPOSITORY, "tag": name, "pause": "1"}
            await self._client.open()._query_json("commit", "POST", params=wanted, data={})
        except FOREIGN as error:
            if "no space left" in str(error):
                raise DiskFull("the Docker daemon's disk has no room for a snapshot", remedy="Make room.") from error
            raise BuildFailed(f"no snapshot of container {container}: {error}", remedy="Is it alive?") from error
        return f"{REPOSITORY}:{name}"

    async def drop(self, image: str) -> None:
        """Remove one; containers that run from it go on. Raises: CloseFailed."""
        await _delete(self._client, image)
        self._taken.discard(image)

    async def drop_all(self) -> None:
        """Remove all that were taken. Raises: CloseFailed."""
        for image in list(self._taken):
            await self.drop(image)

    async def reap(self, labels: Mapping[str, str]) -> int:
        """Remove those with these labels whose owner has ended; returns how many. Raises: RuntimeUnavailable."""
        filters = {"reference": [REPOSITORY], "label": [f"{k}={v}" if v else k for k, v in labels.items()]}
        try:
            found = await self._client.open()._query_json(
                "images/json", params={"filters": aiodocker.utils.clean_filters(filters)}
            )
        except FOREIGN as error:
            raise RuntimeUnavailable(f"cannot list images: {error}", remedy=REMEDY) from error
        owners = [(image["Id"], Owner.from_labels(image["Labels"] or {})) for image in found]
        gone = [image for image, owner in owners if owner is not None and owner.is_gone()]
        for image in gone:
            await _delete(self._client, image)
        return len(gone)


async def _delete(client: DockerClient, image: str) -> None:
    try:
        async for attempt in patiently(BUSY_TOO):
            with attempt:
                await client.open().images.delete(image, force=True)
    except aiodocker.DockerError as error:
        if error.status != 404:
            raise CloseFailed(f"image {image} cannot be removed: {error}", remedy=f"docker rmi -f {image}") from error
    except FOREIGN as error:
        raise CloseFailed(f"image {image} cannot be removed: {error}", remedy=f"docker rmi -f {image}") from error
