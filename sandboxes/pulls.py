"""Pulling an image, and telling how far it has come. Knows no containers, and not whether an image is needed.

A name may end with a digest (`image@sha256:...`): then it is that image or none.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import aiodocker
import aiohttp

from sandboxes.client import DockerClient
from sandboxes.errors import DiskFull, ImageMissing

Say = Callable[[str], None]
TELL_EVERY_S = 5.0
ROOM_REMEDY = "Make room where the daemon keeps its data (docker system df, docker system prune)."


async def pull(client: DockerClient, name: str, *, limit_s: float, say: Say) -> None:
    """Fetch `name` from its registry; `say` gets a line every few seconds. Raises: ImageMissing, DiskFull."""
    remedy = f"Check the name, log in to its registry, or load it: docker load < {name.split('/')[-1]}.tar"
    progress = Progress(name)
    told_s = time.monotonic()
    say(f"pulling {name}")
    try:
        async with asyncio.timeout(limit_s):
            async for line in client.open().images.pull(name, stream=True):
                if fault := line.get("error"):
                    raise _refused(name, str(fault), remedy)
                progress.see(line)
                if time.monotonic() - told_s >= TELL_EVERY_S:
                    told_s = time.monotonic()
                    say(progress.sentence())
    except TimeoutError as error:
        raise ImageMissing(f"image {name} did not arrive within {limit_s:.0f} s", remedy=remedy) from error
    except (aiodocker.DockerError, aiohttp.ClientError) as error:
        raise _refused(name, str(error), remedy) from error
    say(f"pulled {name}")


class Progress:
    """How far a pull has come, by the daemon's own lines."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._layers: dict[str, tuple[int, int]] = {}
        self._extracting: set[str] = set()
        self._done: set[str] = set()

    def see(self, line: Mapping[str, Any]) -> None:
        """One line of the daemon's answer."""
        layer, status, detail = str(line.get("id", "")), line.get("status"), line.get("progressDetail") or {}
        if status == "Downloading" and detail.get("total"):
            self._layers[layer] = (int(detail["current"]), int(detail["total"]))
        elif status == "Download complete" and layer in self._layers:
            self._layers[layer] = (self._layers[layer][1], self._layers[layer][1])
        elif status == "Extracting":
            self._extracting.add(layer)
        elif status in ("Pull complete", "Already exists"):
            self._done.add(layer)
            self._extracting.discard(layer)

    def sentence(self) -> str:
        """For people. The daemon tells a layer's size only once it has begun to load it."""
        got, known = (sum(each[index] for each in self._layers.values()) for index in (0, 1))
        text = f"pulling {self._name}: {got / 1e6:.0f} MB of {known / 1e6:.0f} MB known so far"
        if self._done:
            text += f", {len(self._done)} layers done"
        return text + (f", unpacking {len(self._extracting)}" if self._extracting else "")


def _refused(name: str, reason: str, remedy: str) -> ImageMissing | DiskFull:
    if "no space left" in reason:
        return DiskFull(f"image {name} was not pulled: the Docker daemon's disk is full", remedy=ROOM_REMEDY)
    return ImageMissing(f"image {name} is not here and cannot be pulled: {reason}", remedy=remedy)
