"""Limits of a box as a whole: memory with its files, processes, processor time. Control groups, version 1 or 2.

A group is a folder that the kernel shows: made before the box, entered by its launcher before anything else, removed
after its end. Its name says whose it is, so that what a killed owner left can be told. What this machine does not let
us limit is not limited, and `Cgroups.limited` says so. Knows not what runs inside.
"""

import asyncio
import contextlib
import errno
import os
import secrets
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from sandboxes.base import SandboxSpec
from sandboxes.controllers import Place, find_places
from sandboxes.errors import CloseFailed, StartFailed
from sandboxes.owner import Owner

PREFIX = "thundersync:"
_DOORS = {1: "tasks", 2: "cgroup.procs"}
PERIOD_US = 100_000
LEAVE_LIMIT_S = 5.0
_OOM_FILES = {1: "/sys/fs/cgroup/memory/memory.oom_control", 2: "/sys/fs/cgroup/memory.events"}
"""Where a container finds how often the kernel killed in it for want of memory, and so does an agent in a box."""


class Group(Struct, frozen=True, kw_only=True):
    """One box's group: a folder, or one for each controller. Without any, a box is not limited as a whole."""

    doors: tuple[Path, ...] = ()
    """In each folder, the file that a process enters by."""
    shown: Mapping[str, str] = {}
    """Files of it that the box may read, by their path inside."""

    def entering(self, argv: Sequence[str]) -> list[str]:
        """A command line that enters the group and turns into `argv`, or ends if it cannot."""
        if not self.doors:
            return list(argv)
        # 0 is whoever writes, who enters version 1's `tasks` at once. By its number, or into `cgroup.procs`, only when
        # the kernel has held up all forks of the machine: 5 to 15 ms for each controller.
        steps = [f"echo 0 > {shlex.quote(str(door))}" for door in self.doors]
        return ["/bin/sh", "-c", " && ".join([*steps, 'exec "$@"']), "sh", *argv]

    async def remove(self) -> None:
        """Take it away once its last process is gone, which the kernel may still be at. Raises: CloseFailed."""
        deadline = asyncio.get_running_loop().time() + LEAVE_LIMIT_S
        for folder in (door.parent for door in self.doors):
            while (error := _remove(folder)) is not None:
                if asyncio.get_running_loop().time() > deadline:
                    raise CloseFailed(f"control group {folder} cannot be removed: {error}", remedy=f"rmdir '{folder}'")
                await asyncio.sleep(0.005)


class Cgroups:
    """Makes groups. `places` says where, by controller; what is not there is not limited."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        self._places = places
        self._owner = Owner.current()

    @classmethod
    def find(cls, proc: Path = Path("/proc/self")) -> "Cgroups":
        """What this process may limit, each tried out with a process; some milliseconds."""
        try:
            found = find_places((proc / "mountinfo").read_text(), (proc / "cgroup").read_text())
        except FileNotFoundError:  # not Linux
            found = {}
        return cls({controller: place for controller, place in found.items() if _works(controller, place)})

    @property
    def limited(self) -> frozenset[str]:
        """The controllers that hold for each box."""
        return frozenset(self._places)

    def make(self, sandbox_id: str, spec: SandboxSpec) -> Group:
        """A group with the limits of `spec`; under a millisecond. Raises: StartFailed.

        Where a first one could be made, none after it is done without: nobody was told of weaker boxes.
        """
        name = f"{PREFIX}{self._owner.word}:{sandbox_id}"
        doors = tuple(dict.fromkeys(place.folder / name / _DOORS[place.version] for place in self._places.values()))
        try:
            for door in doors:
                door.parent.mkdir()
            for controller, place in self._places.items():
                _limit(place.folder / name, controller, place.version, spec)
        except OSError as error:
            for door in doors:
                _remove(door.parent)
            raise StartFailed(
                f"a box's control group cannot be made: {error}",
                remedy="The machine may have run out of control groups: see /proc/cgroups.",
            ) from error
        if "memory" not in self._places:
            return Group(doors=doors)
        inside = _OOM_FILES[self._places["memory"].version]
        return Group(doors=doors, shown={inside: str(self._places["memory"].folder / name / Path(inside).name)})

    def reap(self) -> set[str]:
        """Remove groups whose owner on this machine has certainly ended; returns the boxes they were of.

        Searched in the whole of what is shown here: an owner's own group, where it made them, may be gone or another.
        """
        gone: set[str] = set()
        for top in {place.top for place in self._places.values()}:
            for folder, names, _ in os.walk(top):
                for name in [name for name in names if name.startswith(PREFIX)]:
                    names.remove(name)
                    word, _, sandbox_id = name.removeprefix(PREFIX).rpartition(":")
                    owner = Owner.from_word(word)
                    if owner is not None and owner.is_gone() and _remove(Path(folder, name)) is None:
                        gone.add(sandbox_id)
        return gone


def _works(controller: str, place: Place) -> bool:
    """Whether a process of ours really comes under a limit here."""
    try:
        group = Cgroups({controller: place}).make(f"trial-{secrets.token_hex(6)}", SandboxSpec())
    except StartFailed:
        return False
    try:
        return subprocess.run(group.entering(["true"]), stderr=subprocess.DEVNULL, check=False).returncode == 0
    finally:
        for door in group.doors:
            _remove(door.parent)


def _limit(folder: Path, controller: str, version: int, spec: SandboxSpec) -> None:
    """Write the limits of `spec` for one controller. Raises: OSError."""
    memory, quota_us = str(spec.memory_mib << 20), max(1000, int(spec.cpus * PERIOD_US))
    values = {
        (1, "memory"): {"memory.limit_in_bytes": memory, "memory.memsw.limit_in_bytes": memory},
        (2, "memory"): {"memory.max": memory, "memory.swap.max": "0"},
        (1, "cpu"): {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota_us)},
        (2, "cpu"): {"cpu.max": f"{quota_us} {PERIOD_US}"},
    }.get((version, controller), {"pids.max": str(spec.pids + 1)})  # the launcher is one, and waits outside the box
    for name, value in values.items():
        if "sw" in name and not (folder / name).exists():
            continue  # this kernel does not count swap
        try:
            (folder / name).write_text(value)
        except OSError as error:
            if (version, controller, error.errno) != (1, "cpu", errno.EINVAL):
                raise
            # Version 1 takes no quota above that of the group we are in, which then holds for all boxes together.


def _remove(folder: Path) -> OSError | None:
    """Why it is still there; None once it is gone."""
    try:
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()
    except OSError as error:
        return error
    return None
