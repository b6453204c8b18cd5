"""The images that were built here, within a disk budget: those that were used longest ago go first.

Only images with our label are ever removed, and none that a container runs from. When one was last used is kept by the
daemon itself: every use tags it again, and it notes the time of that. Knows nothing of how images are built.
"""

import asyncio
import contextlib

import aiodocker
from msgspec import Struct

from sandboxes.client import DockerClient
from sandboxes.container import FOREIGN
from sandboxes.pulls import Say
from sandboxes.retry import BUSY_TOO, patiently

LABEL = "thundersync.built"
REPOSITORY = "thundersync/context"


class Kept(Struct, frozen=True):
    """One image of ours."""

    image_id: str
    size_bytes: int
    """What only this image takes, where the daemon tells; else with all below it."""
    used: str
    """When it was last tagged, in a form that sorts by time."""


class Shelf:
    """Holds a daemon's images of ours within `budget_bytes` (0: no limit)."""

    def __init__(self, client: DockerClient, *, budget_bytes: int, say: Say) -> None:
        self._client = client
        self._budget_bytes = budget_bytes
        self._say = say
        self._turn = asyncio.Lock()

    async def touch(self, tag: str) -> None:
        """This image is used now. One that is gone meanwhile is somebody else's business."""
        with contextlib.suppress(*FOREIGN):
            await self._client.open().images.tag(f"{REPOSITORY}:{tag}", REPOSITORY, tag=tag)

    async def make_room(self, in_use: set[str]) -> int:
        """Remove what is beyond the budget, but nothing of `in_use` (ids); returns how many images.

        Nothing here fails a run: what cannot be removed is told, and stays.
        """
        if not self._budget_bytes:
            return 0
        async with self._turn:
            try:
                return await self._remove_oldest(in_use)
            except FOREIGN as error:
                self._say(f"images could not be looked through for their budget: {error}")
                return 0

    async def _remove_oldest(self, in_use: set[str]) -> int:
        kept = sorted(await self._kept(), key=lambda each: each.used)
        total, removed = sum(each.size_bytes for each in kept), 0
        for each in kept:
            if total <= self._budget_bytes:
                break
            if each.image_id in in_use:
                continue
            try:
                # By its id and with force: it may have the tags of several uses. One that a container runs from stays.
                await self._client.open().images.delete(each.image_id, force=True)
            except aiodocker.DockerError as error:
                if error.status not in (404, 409):
                    raise
                continue
            total -= each.size_bytes
            removed += 1
        if removed:
            self._say(f"removed {removed} built images that were used longest ago")
        if total > self._budget_bytes:
            self._say(f"built images take {total / 1e9:.1f} GB, the budget is {self._budget_bytes / 1e9:.1f} GB")
        return removed

    async def _kept(self) -> list[Kept]:
        docker = self._client.open()
        filters = aiodocker.utils.clean_filters({"label": [LABEL]})
        async for attempt in patiently(BUSY_TOO):
            with attempt:
                found = await docker._query_json("images/json", params={"filters": filters, "shared-size": "1"})
                if any(image.get("SharedSize", -1) < 0 for image in found):
                    # Daemons before API 1.42 tell it only where they add up the whole disk.
                    ours = {image["Id"] for image in found}
                    whole = await docker._query_json("system/df")
                    found = [image for image in whole["Images"] if image["Id"] in ours]
        kept = []
        for image in found:
            try:
                details = await docker.images.inspect(image["Id"])
            except aiodocker.DockerError:
                continue  # gone meanwhile
            shared = max(0, image.get("SharedSize", 0))
            tagged = (details.get("Metadata") or {}).get("LastTagTime") or ""
            used = tagged if tagged and not tagged.startswith("0001") else details["Created"]
            kept.append(Kept(image["Id"], image["Size"] - shared, used))
        return kept
