"""What goes wrong in real runs, done to real containers on purpose: it ends typed, others go on, nothing stays.

An owner that is killed, links that lead out of a folder and a full box are in the contract's tests.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from sandboxes import (
    Command,
    DaemonGone,
    DiskFull,
    DockerRuntime,
    ImageMissing,
    Pool,
    Result,
    Sandbox,
    SandboxError,
    SandboxGone,
    SandboxSpec,
)
from tests.docker_daemon import BARE_IMAGE, BASE_IMAGE, DockerDaemon, base_image_tar, missing
from tests.sandboxes.conftest import until

pytestmark = pytest.mark.docker


@pytest.fixture
async def runtime(docker_daemon: DockerDaemon) -> AsyncIterator[DockerRuntime]:
    """A runtime that leaves nothing, whatever was done to it."""
    runtime = DockerRuntime(docker_daemon.host, labels={"test": "chaos"})
    yield runtime
    await runtime.close()
    assert docker_daemon.docker("ps", "-aq", "--filter", "label=test=chaos") == ""


@pytest.fixture
def own_daemon() -> AsyncIterator[DockerDaemon]:
    """A daemon with a small disk, to be broken."""
    if reason := missing():
        pytest.skip(f"DOCKER TESTS DO NOT RUN: {reason}")
    daemon = DockerDaemon(data_mib=3 * base_image_tar().stat().st_size >> 20)
    try:
        daemon.await_ready()
        daemon.import_base()
        yield daemon
    finally:
        daemon.close()


async def beside(victim: Sandbox, neighbour: Sandbox, command: Command) -> Result:
    """Run `command` in one sandbox while another works; the other must not notice."""
    ended = asyncio.create_task(victim.run(command))
    worked = 0
    while not ended.done() or worked < 3:
        assert (await neighbour.run(Command(script="echo works"))).stdout == b"works\n"
        worked += 1
    return await ended


BOMBS = {
    "fork bomb": Command(script=":(){ :|:& }; :; sleep 1000", timeout_s=2.0),
    "memory bomb": Command(script="tail < <(head -c 1G /dev/zero)", timeout_s=60.0),
    "ignores SIGTERM": Command(script="trap '' TERM INT HUP; while :; do sleep 1; done", timeout_s=1.0),
    "hung checker": Command(script="bash /tests/test.sh", user="root", timeout_s=1.0),
    "stops itself": Command(script="kill -STOP $$", timeout_s=1.0),
}


@pytest.mark.parametrize("image", [BASE_IMAGE, BARE_IMAGE])
@pytest.mark.parametrize("bomb", BOMBS)
async def test_a_bomb_ends_within_its_own_sandbox(
    runtime: DockerRuntime, tmp_path: Path, image: str, bomb: str
) -> None:
    spec = SandboxSpec(image=image, memory_mib=128, pids=64)
    victim, neighbour = await asyncio.gather(runtime.start(spec), runtime.start(spec))
    (tmp_path / "test.sh").write_text("trap '' TERM; sleep 1000 & sleep 1000\n")
    await victim.put_tree(tmp_path, "/tests")
    result = await beside(victim, neighbour, BOMBS[bomb])
    assert result.exit_code != 0
    assert result.timed_out == (bomb != "memory bomb") or bomb == "fork bomb"
    assert result.oom_killed == (bomb == "memory bomb")
    after = await victim.run(Command(script="echo alive"))
    assert (after.exit_code, after.stdout, after.oom_killed) == (0, b"alive\n", False)


@pytest.mark.parametrize(("image", "mib"), [(BASE_IMAGE, 1024), (BARE_IMAGE, 128)])
async def test_a_gigabyte_of_output_is_counted_exactly_in_little_memory(
    runtime: DockerRuntime, image: str, mib: int
) -> None:
    sandbox = await runtime.start(SandboxSpec(image=image))
    before = psutil.Process().memory_info().rss
    script = f"echo head; head -c {mib}M /dev/zero; echo tail"
    result = await sandbox.run(Command(script=script, timeout_s=120.0, output_limit_bytes=1000))
    assert result.stdout.startswith(b"head\n") and result.stdout.endswith(b"tail\n") and len(result.stdout) == 1000
    assert result.stdout_cut_bytes == (mib << 20) + 10 - 1000
    assert psutil.Process().memory_info().rss - before < 64 << 20


async def test_an_image_removed_meanwhile_is_told_or_built_again(
    docker_daemon: DockerDaemon, runtime: DockerRuntime, tmp_path: Path
) -> None:
    docker_daemon.docker("create", "--name", "chaos", BASE_IMAGE, "true")
    docker_daemon.docker("commit", "chaos", "localhost:1/chaos:image")
    docker_daemon.docker("rm", "chaos")
    (tmp_path / "Dockerfile").write_text(f"FROM {BASE_IMAGE}\nRUN echo chaos > /made\n")
    named, built = SandboxSpec(image="localhost:1/chaos:image"), SandboxSpec(context=str(tmp_path))
    neighbour = await runtime.start(named)
    await runtime.prepare(built)
    tag = docker_daemon.docker("images", "--format", "{{.Repository}}:{{.Tag}}", "thundersync/context").split()[0]
    docker_daemon.docker("rmi", "-f", "localhost:1/chaos:image", tag)
    await (await runtime.start(named)).close()  # its name is gone; a container keeps the image itself, and so do we
    await neighbour.close()
    neighbour = await runtime.start(SandboxSpec(image=BASE_IMAGE))
    docker_daemon.docker("image", "prune", "-f")
    with pytest.raises(ImageMissing, match="localhost:1/chaos:image"):
        await runtime.start(named)
    again = await runtime.start(built)
    assert await again.read("/made") == b"chaos\n"
    assert (await neighbour.run(Command(script="echo works"))).stdout == b"works\n"


async def test_a_daemon_that_restarts_loses_its_sandboxes_and_serves_new_ones(own_daemon: DockerDaemon) -> None:
    runtime = DockerRuntime(own_daemon.host)
    spec = SandboxSpec(image=BASE_IMAGE)
    first, second = await asyncio.gather(runtime.start(spec), runtime.start(spec))
    running = asyncio.create_task(first.run(Command(script="sleep 1000", timeout_s=1000.0)))
    await second.run(Command(script="true"))
    await asyncio.to_thread(own_daemon.stop)
    with pytest.raises(SandboxGone):
        await running
    with pytest.raises(SandboxGone):
        await second.run(Command(script="true"))
    with pytest.raises(DaemonGone):
        await runtime.start(spec)
    own_daemon.start()
    await asyncio.to_thread(own_daemon.await_ready)
    third = await runtime.start(spec)
    assert (await third.run(Command(script="echo works"))).stdout == b"works\n"
    await runtime.close()
    assert own_daemon.docker("ps", "-aq") == ""


async def test_a_pool_pauses_while_the_daemon_is_away_and_goes_on_when_it_is_back(own_daemon: DockerDaemon) -> None:
    said: list[str] = []
    pool = Pool(DockerRuntime(own_daemon.host), look_again_s=0.1, say=said.append)
    spec = SandboxSpec(image=BASE_IMAGE)
    await (await pool.start(spec)).close()
    await asyncio.to_thread(own_daemon.stop)
    waiting = [asyncio.create_task(pool.start(spec)) for _ in range(3)]
    await until(lambda: bool(said))
    assert "sandboxes wait" in said[0] and not any(task.done() for task in waiting)
    own_daemon.start()
    for sandbox in await asyncio.gather(*waiting):
        assert (await sandbox.run(Command(script="echo works"))).stdout == b"works\n"
    assert len(said) == 2 and "answers again" in said[1]
    await pool.close()
    assert own_daemon.docker("ps", "-aq") == ""


async def test_a_full_disk_of_the_daemon_is_told_and_ends_when_there_is_room(own_daemon: DockerDaemon) -> None:
    runtime = DockerRuntime(own_daemon.host)
    spec = SandboxSpec(image=BASE_IMAGE)
    glutton = await runtime.start(spec)
    filled = await glutton.run(Command(script="head -c 10G /dev/zero > fill; echo x > more", timeout_s=60.0))
    assert b"No space left" in filled.stderr
    with pytest.raises(DiskFull):
        await glutton.write("/workspace/file", b"x" * 100_000)
    with pytest.raises(SandboxError, match="disk is full"):
        await runtime.start(spec)
    await glutton.close()
    sandbox = await runtime.start(spec)
    assert (await sandbox.run(Command(script="echo works"))).stdout == b"works\n"
    await runtime.close()
    assert own_daemon.docker("ps", "-aq") == ""
