"""Limits of a box as a whole: they hold, what they end is told as in Docker, and nothing of them stays."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from sandboxes import Command, DiskFull, ProcessRuntime, RuntimeUnavailable, Sandbox, SandboxSpec, StartFailed
from sandboxes.cgroups import PREFIX, Cgroups
from sandboxes.controllers import CONTROLLERS, Place, find_places
from sandboxes.owner import Owner
from tests.boxes import process_runtime
from tests.sandboxes.conftest import groups, until

SPEC = SandboxSpec(memory_mib=192, pids=40, cpus=0.5)


@pytest.fixture
async def runtime() -> AsyncIterator[ProcessRuntime]:
    """A runtime whose boxes are limited in every way, and that leaves nothing."""
    runtime = await process_runtime()
    if missing := set(CONTROLLERS) - Cgroups.find().limited:
        pytest.skip(f"CONTROL GROUP TESTS DO NOT RUN: this process may not limit {', '.join(sorted(missing))}")
    yield runtime
    await runtime.close()
    assert groups() == []


async def alive(boxes: Sequence[Sandbox]) -> None:
    for box in boxes:
        after = await box.run(Command(script="echo alive"))
        assert (after.exit_code, after.stdout, after.oom_killed) == (0, b"alive\n", False)


HOARD = "python3 -c \"import sys, time; hoard = b'x' * (80 << 20); print('full'); time.sleep(int(sys.argv[1]))\""


async def test_processes_that_take_too_much_only_together_are_ended_and_told(runtime: ProcessRuntime) -> None:
    victim, neighbour = await runtime.start(SPEC), await runtime.start(SPEC)
    one = await victim.run(Command(script=f"{HOARD} 0"))
    assert (one.exit_code, one.stdout, one.oom_killed) == (0, b"full\n", False)
    together = Command(script=f"for n in 1 2 3 4; do {HOARD} 1000 & done; wait -n; exit $?", timeout_s=60.0)
    result = await victim.run(together)
    assert (result.exit_code, result.oom_killed, result.timed_out) == (137, True, False)
    await alive([victim, neighbour])


async def test_files_are_memory_and_leave_some_for_commands(runtime: ProcessRuntime) -> None:
    box = await runtime.start(SPEC)
    await box.run(Command(script="head -c 1G /dev/zero > fill; head -c 1G /dev/zero > /dev/shm/fill", timeout_s=60.0))
    with pytest.raises(DiskFull):
        await box.write("/workspace/file", b"x" * 100_000)
    result = await box.run(Command(script=f"{HOARD} 0; echo $?"))
    assert result.oom_killed and result.stdout == b"137\n"
    await alive([box])


async def test_a_fork_bomb_meets_the_boxs_own_limit_and_no_other_box_does(runtime: ProcessRuntime) -> None:
    victim, neighbour = await runtime.start(SPEC), await runtime.start(SPEC)
    bomb = asyncio.create_task(victim.run(Command(script=":(){ :|:& }; :; sleep 1000", timeout_s=2.0)))
    (folder,) = [folder for folder in groups(victim.sandbox_id) if (folder / "pids.max").exists()]
    events = folder / "pids.events"
    await until(lambda: int(events.read_text().split()[1]) > 0)
    many = await neighbour.run(Command(script="for n in $(seq 30); do sleep 1000 & done; jobs -p | wc -l"))
    assert many.stdout == b"30\n"
    assert (await bomb).exit_code != 0
    await alive([victim, neighbour])


async def test_the_limits_are_the_specs(runtime: ProcessRuntime) -> None:
    box = await runtime.start(SPEC)
    names = {"memory.limit_in_bytes", "memory.max", "pids.max", "cpu.cfs_quota_us", "cpu.max"}
    files = [folder / name for folder in groups(box.sandbox_id) for name in names if (folder / name).exists()]
    found = {file.name: file.read_text().split()[0] for file in files}
    memory = found.get("memory.limit_in_bytes") or found["memory.max"]
    quota = found.get("cpu.cfs_quota_us") or found["cpu.max"]
    assert (int(memory), int(found["pids.max"]), int(quota)) == (192 << 20, 41, 50_000)
    processes = [folder / "cgroup.procs" for folder in groups(box.sandbox_id)]
    assert {len(file.read_text().split()) for file in processes} == {2}  # the launcher and the agent


async def test_a_box_sees_its_count_of_kills_and_nothing_more(runtime: ProcessRuntime) -> None:
    box = await runtime.start(SPEC)
    script = "find /sys/fs/cgroup -type f; find /sys/fs/cgroup -type f -exec sh -c 'echo 0 > {} && echo wrote' ';'"
    seen = (await box.run(Command(script=script))).stdout.decode().split()
    assert len(seen) == 1 and seen[0].endswith(("memory.oom_control", "memory.events"))


async def test_closing_takes_the_group_away(runtime: ProcessRuntime) -> None:
    box = await runtime.start(SPEC)
    assert groups(box.sandbox_id)
    await box.run(Command(script="setsid sleep 1000 & echo x > file", keeps_running=True))
    await box.close()
    assert groups(box.sandbox_id) == []


async def test_a_killed_owners_groups_are_reaped_and_a_living_ones_are_not(runtime: ProcessRuntime) -> None:
    mine = await runtime.start(SPEC)
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.sandboxes.owner_script", "process", "", ""),
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert owner.stdout is not None
    sandbox_id = (await owner.stdout.readline()).decode().strip()
    await runtime.reap({})
    assert groups(sandbox_id)
    owner.kill()
    await owner.wait()
    await until(lambda: not any((folder / "cgroup.procs").read_text() for folder in groups(sandbox_id)))
    await ProcessRuntime().reap({})  # of whatever runtime: the next run's
    assert groups(sandbox_id) == [] and groups(mine.sandbox_id)
    await alive([mine])


async def test_without_groups_boxes_are_limited_as_far_as_processes_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cgroups, "find", classmethod(lambda cls: cls({})))
    runtime = ProcessRuntime()
    assert "memory is limited per process only; processor time is not limited" in runtime.isolation
    try:
        box = await runtime.start(SPEC)
    except RuntimeUnavailable as error:
        pytest.skip(f"PROCESS SANDBOX TESTS DO NOT RUN: {error}")
    bomb = await box.run(Command(script="tail < <(head -c 400M /dev/zero)", timeout_s=60.0))
    assert bomb.exit_code != 0 and not bomb.oom_killed
    await alive([box])
    assert groups() == []
    await runtime.close()


async def test_groups_are_tried_out_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def find(cls: type[Cgroups]) -> Cgroups:
        threads.append(threading.current_thread())
        return cls({})

    monkeypatch.setattr(Cgroups, "find", classmethod(find))
    reaping, starting = ProcessRuntime(), ProcessRuntime()
    await reaping.reap({})
    try:
        await starting.start(SPEC)
    except RuntimeUnavailable as error:
        pytest.skip(f"PROCESS SANDBOX TESTS DO NOT RUN: {error}")
    finally:
        await starting.close()
    assert len(threads) == 2 and threading.main_thread() not in threads


def test_what_is_limited_is_said() -> None:
    limited = Cgroups.find().limited
    if limited != set(CONTROLLERS):
        pytest.skip("CONTROL GROUP TESTS DO NOT RUN: this process may not make any")
    assert "limited per box: files, memory, processes, processor time; agent and" in ProcessRuntime().isolation


V1 = """\
25 23 0:22 / /proc rw,nosuid - proc proc rw
33 31 0:30 / {top}/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
36 31 0:33 /docker/ab {top}/memory rw,relatime - cgroup cgroup rw,memory
37 31 0:34 /other {top}/pids rw,relatime shared:9 - cgroup cgroup rw,pids
41 31 0:38 / {top}/unified rw,relatime - cgroup2 cgroup2 rw,nsdelegate
"""
V1_OWN = "9:name=systemd:/\n8:pids:/docker/ab\n4:memory:/docker/ab/job\n1:cpu,cpuacct:/docker/ab\n0::/\n"


def test_version_1_groups_are_made_below_our_own(tmp_path: Path) -> None:
    places = find_places(V1.format(top=tmp_path), V1_OWN)
    memory, cpu = tmp_path / "memory", tmp_path / "cpu,cpuacct"
    assert places == {
        "memory": Place(folder=memory / "job", top=memory, version=1),
        "cpu": Place(folder=cpu / "docker/ab", top=cpu, version=1),
    }  # not pids: that mount shows another part of the tree


@pytest.fixture
def delegated(tmp_path: Path) -> Cgroups:
    """A tree of version 2 as systemd hands it to a user, in plain files."""
    app = tmp_path / "user.slice" / "app.slice"
    (app / "our.scope").mkdir(parents=True)
    (app / "our.scope" / "cgroup.subtree_control").write_text("\n")
    (app / "cgroup.subtree_control").write_text("memory pids\n")
    (tmp_path / "cgroup.subtree_control").write_text("cpu io memory pids\n")
    mounts = f"30 23 0:26 / {tmp_path} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
    places = find_places(mounts, "0::/user.slice/app.slice/our.scope\n")
    assert places == dict.fromkeys(["memory", "pids"], Place(folder=app, top=tmp_path, version=2))
    assert find_places(mounts, "0::/elsewhere/our.scope\n")["cpu"].folder == tmp_path
    return Cgroups(places)


async def test_version_2_groups_are_made_where_memory_is_handed_on(delegated: Cgroups, tmp_path: Path) -> None:
    assert delegated.limited == {"memory", "pids"}
    group = delegated.make("box-1", SPEC)
    (door,) = group.doors
    folder = door.parent
    assert folder.parent == tmp_path / "user.slice" / "app.slice" and folder.name.endswith(":box-1")
    assert (folder / "memory.max").read_text() == str(192 << 20)
    assert (folder / "pids.max").read_text() == "41" and not (folder / "cpu.max").exists()
    assert group.shown == {"/sys/fs/cgroup/memory.events": str(folder / "memory.events")}
    entered = await asyncio.create_subprocess_exec(*group.entering(["true"]))
    assert await entered.wait() == 0 and (folder / "cgroup.procs").read_text() == "0\n"
    for file in folder.iterdir():  # the kernel's own go with their folder
        file.unlink()
    await group.remove()
    assert not folder.exists()


def test_only_groups_of_owners_that_are_certainly_gone_are_reaped(delegated: Cgroups, tmp_path: Path) -> None:
    me = Owner.current()
    names = {
        "dead": f"{PREFIX}{me.namespace}:{me.pid}:1:box-dead",
        "mine": f"{PREFIX}{me.word}:box-mine",
        "elsewhere": f"{PREFIX}1:{me.pid}:1:box-elsewhere",
        "nonsense": f"{PREFIX}what:is:this",
        "foreign": "docker",
    }
    for name in names.values():
        (tmp_path / "user.slice" / "left.scope" / name).mkdir(parents=True)
    assert delegated.reap() == {"box-dead"}
    left = {folder.name for folder in (tmp_path / "user.slice" / "left.scope").iterdir()}
    assert left == set(names.values()) - {names["dead"]}
    assert delegated.reap() == set()


async def test_a_group_that_cannot_be_made_fails_the_start_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    places = {
        "memory": Place(folder=tmp_path / "memory", top=tmp_path, version=1),
        "pids": Place(folder=tmp_path / "missing", top=tmp_path, version=1),
    }
    with pytest.raises(StartFailed, match="control group"):
        Cgroups(places).make("box-1", SPEC)
    assert list((tmp_path / "memory").iterdir()) == []
