"""Where this process might make control groups, by controller, as the kernel shows it. Makes none itself."""

import os
from pathlib import Path

from msgspec import Struct

CONTROLLERS = ("memory", "pids", "cpu")


class Place(Struct, frozen=True, kw_only=True):
    """Where groups of one controller can be made: `folder`, somewhere below `top`."""

    folder: Path
    top: Path
    version: int


def find_places(mounts: str, groups: str) -> dict[str, Place]:
    """Where groups of each controller might be made: `mounts` and `groups` as in /proc/self/mountinfo and cgroup.

    Version 1: below our own group, whose limits then hold for all boxes together. Version 2: beside it or further up,
    since a group with processes can have none with limits below it: in the nearest that is ours to write and hands on
    the memory controller.
    """
    own: dict[str, str] = {}
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)
    places: dict[str, Place] = {}
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        root, top = left.split()[3:5]
        kind, _, options = right.split(" ", 2)
        names = {"cgroup": options.split(","), "cgroup2": [""]}.get(kind, [])
        for name in own.keys() & names:
            way = os.path.relpath(own[name], root)
            if way.startswith(".."):
                continue  # a mount that does not show our group
            if kind == "cgroup":
                found = {name: Place(folder=Path(top, way), top=Path(top), version=1)}
            else:
                found = _handed_on(Path(top, way), Path(top))
            places = {**{one: found[one] for one in CONTROLLERS if one in found}, **places}
    return places


def _handed_on(own: Path, top: Path) -> dict[str, Place]:
    for folder in (own, *own.parents):
        handed_on = _words(folder / "cgroup.subtree_control") if folder.is_relative_to(top) else []
        if "memory" in handed_on and os.access(folder, os.W_OK):
            return dict.fromkeys(handed_on, Place(folder=folder, top=top, version=2))
    return {}


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
