"""All kinds behind one name: a test that takes `lab` runs over real boxes, and containers with and without an agent."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from sandboxes import DockerRuntime, Pool, ProcessRuntime, Runtime, RuntimeUnavailable, Sandbox, SandboxSpec
from sandboxes.cgroups import PREFIX, Cgroups
from tests.docker_daemon import BARE_IMAGE, BASE_IMAGE, DockerDaemon

KINDS = [
    "process",
    "process in a pool",
    pytest.param("docker", marks=pytest.mark.docker),
    pytest.param("docker without python3", marks=pytest.mark.docker),
]


class Lab:
    """A runtime, specs it can start, and a view of its sandboxes from outside."""

    def __init__(self, runtime: Runtime, *, image: str, daemon: DockerDaemon | None) -> None:
        self.runtime = runtime
        self.image = image
        self.daemon = daemon

    @property
    def has_agent(self) -> bool:
        return self.image != BARE_IMAGE

    @property
    def limits_memory(self) -> bool:
        """In all, not per process."""
        return self.daemon is not None or "memory" in Cgroups.find().limited

    def spec(self, **settings: object) -> SandboxSpec:
        return SandboxSpec(image=self.image, **settings)  # type: ignore[arg-type]

    async def start(self, **settings: object) -> Sandbox:
        return await self.runtime.start(self.spec(**settings))

    def exists(self, sandbox_id: str) -> bool:
        """Whether the machine (or the daemon) still knows anything of this sandbox."""
        if self.daemon is not None:
            return bool(self.daemon.docker("ps", "-aq", "--filter", f"name={sandbox_id}").strip())
        return any(sandbox_id.encode() in _command_line(pid) for pid in _pids())

    def all_ids(self) -> set[str]:
        """Names of all containers, or ids of all boxes on this machine that this process owns."""
        if self.daemon is not None:
            return set(self.daemon.docker("ps", "-a", "--format", "{{.Names}}").split())
        return {
            word.decode()
            for pid in _pids()
            if _parent(pid) == os.getpid()
            for word in _command_line(pid).split(b"\0")
            if word.startswith(b"box-")
        }


def groups(word: str = "") -> list[Path]:
    """Control groups on this machine whose name has this in it, such as a box's id; without: all of this process."""
    word = word or f":{os.getpid()}:"
    found = [Path(top, name) for top, names, _ in os.walk("/sys/fs/cgroup") for name in names]
    return [folder for folder in found if folder.name.startswith(PREFIX) and word in folder.name]


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


async def until(holds: Callable[[], bool], *, limit_s: float = 30.0) -> None:
    """Wait for something that only the kernel or the daemon can do, and that tells nobody."""
    async with asyncio.timeout(limit_s):
        while not await asyncio.to_thread(holds):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.fixture(scope="session", params=KINDS)
async def lab(request: pytest.FixtureRequest) -> AsyncIterator[Lab]:
    if not request.param.startswith("process"):
        daemon: DockerDaemon = request.getfixturevalue("docker_daemon")
        image = BASE_IMAGE if request.param == "docker" else BARE_IMAGE
        lab = Lab(DockerRuntime(daemon.host, labels={"test": "contract"}), image=image, daemon=daemon)
    else:
        runtime = ProcessRuntime() if request.param == "process" else Pool(ProcessRuntime())
        lab = Lab(runtime, image="", daemon=None)
        try:
            await lab.runtime.check()
        except RuntimeUnavailable as error:
            pytest.skip(f"PROCESS SANDBOX TESTS DO NOT RUN: {error}")
    yield lab
    await lab.runtime.close()
    assert lab.all_ids() == set()
    assert groups() == []


@pytest.fixture(scope="session")
async def shared(lab: Lab) -> Sandbox:
    """One sandbox for all tests that leave it as good as they found it."""
    return await lab.start(env={"FROM_SPEC": "spec", "BOTH": "spec"})


@pytest.fixture
async def fresh(lab: Lab) -> AsyncIterator[Sandbox]:
    """A sandbox of a test's own."""
    sandbox = await lab.start()
    yield sandbox
    await sandbox.close()
