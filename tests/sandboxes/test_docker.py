"""What only Docker can show: limits as the daemon sees them, leftovers of dead owners, daemons that are not there."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

from sandboxes import Command, DiskFull, DockerRuntime, RuntimeUnavailable, SandboxGone, SandboxSpec, choose
from sandboxes.owner import Owner
from tests.docker_daemon import BARE_IMAGE, BASE_IMAGE, DockerDaemon
from tests.sandboxes.conftest import until


def dead_owner() -> Owner:
    """This machine and boot, but a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return structs.replace(Owner.current(), pid=child.pid, started="1")


@pytest.mark.docker
async def test_the_daemon_was_given_every_limit(docker_daemon: DockerDaemon) -> None:
    runtime = DockerRuntime(docker_daemon.host, labels={"run": "r1"})
    spec = SandboxSpec(image=BASE_IMAGE, cpus=0.5, memory_mib=300, pids=99, labels={"task": "t1"})
    sandbox = await runtime.start(spec)
    form = (
        "{{.HostConfig.NanoCpus}} {{.HostConfig.Memory}} {{.HostConfig.MemorySwap}} {{.HostConfig.PidsLimit}} "
        "{{.HostConfig.NetworkMode}} {{.HostConfig.AutoRemove}} {{.HostConfig.CapDrop}} {{.HostConfig.SecurityOpt}} "
        '{{index .Config.Labels "run"}} {{index .Config.Labels "task"}}'
    )
    told = docker_daemon.docker("inspect", "-f", form, sandbox.sandbox_id).split()
    bytes_ = str(300 << 20)
    assert told == ["500000000", bytes_, bytes_, "99", "none", "true", "[ALL]", "[no-new-privileges]", "r1", "t1"]
    await runtime.close()


@pytest.mark.docker
@pytest.mark.parametrize("image", [BASE_IMAGE, BARE_IMAGE])
async def test_a_read_only_root_has_its_work_areas_and_they_begin_as_the_image(
    docker_daemon: DockerDaemon, tmp_path: Path, image: str
) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {image}\nRUN mkdir -p /app && echo there > /app/file\n")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "check").write_text("checked\n")
    runtime = DockerRuntime(docker_daemon.host)
    spec = SandboxSpec(context=str(tmp_path), workdir="/app", read_only_root=True, disk_mib=8)
    sandbox = await runtime.start(spec)
    script = "cat file && echo new > file && touch /tmp/x /var/tmp/x ~/x /workspace/x && touch /opt/x || echo refused"
    result = await sandbox.run(Command(script=script))
    assert result.stdout == b"there\nrefused\n", result.stderr
    root = await sandbox.run(Command(script="touch /usr/x || echo refused", user="root"))
    assert root.stdout == b"refused\n"
    await sandbox.put_tree(tmp_path / "tree", "/tests")
    assert await sandbox.read("/tests/check") == b"checked\n"
    with pytest.raises(DiskFull):
        await sandbox.write("/tests/large", b"x" * (9 << 20))
    await runtime.close()
    assert docker_daemon.docker("volume", "ls", "-q") == ""


@pytest.mark.docker
async def test_a_disk_limit_holds_for_each_file_where_the_daemon_has_no_quotas_which_is_told_once(
    docker_host: str,
) -> None:
    said: list[str] = []
    runtime = DockerRuntime(docker_host, say=said.append)
    await runtime.start(SandboxSpec(image=BASE_IMAGE))
    assert said == []  # nobody asked for one
    await asyncio.gather(*(runtime.start(SandboxSpec(image=BASE_IMAGE, disk_mib=4)) for _ in range(3)))
    sandbox = await runtime.start(SandboxSpec(image=BASE_IMAGE, disk_mib=4))
    result = await sandbox.run(Command(script="head -c 9M /dev/zero > /workspace/large"))
    assert result.exit_code != 0
    assert int((await sandbox.run(Command(script="stat -c %s /workspace/large"))).stdout) <= 4 << 20
    assert (await sandbox.run(Command(script="echo alive"))).stdout == b"alive\n"
    assert len(said) == 1 and "has no quotas" in said[0] and "each file" in said[0]
    await runtime.close()


@pytest.mark.docker
async def test_a_closing_runtime_waits_for_a_start_and_takes_it_along(docker_daemon: DockerDaemon) -> None:
    runtime = DockerRuntime(docker_daemon.host, labels={"test": "closing"})
    starts = [asyncio.create_task(runtime.start(SandboxSpec(image=BASE_IMAGE))) for _ in range(6)]
    await until(lambda: "closing" in docker_daemon.docker("ps", "-a", "--format", "{{.Labels}}"))
    await runtime.close()
    await asyncio.gather(*starts, return_exceptions=True)
    assert docker_daemon.docker("ps", "-aq", "--filter", "label=test=closing") == ""


@pytest.mark.docker
async def test_reap_removes_what_dead_owners_left_and_only_that(docker_daemon: DockerDaemon) -> None:
    def leftover(name: str, owner: Owner, label: str) -> None:
        labels = {**owner.labels(), "thundersync.sandbox": name, "run": label}
        flags = [flag for key, value in labels.items() for flag in ("--label", f"{key}={value}")]
        docker_daemon.docker("create", "--name", name, *flags, BASE_IMAGE, "true")

    elsewhere = structs.replace(dead_owner(), boot="b", host="another-machine")
    beside = structs.replace(dead_owner(), namespace="1")
    for name, owner, label in (
        ("dead", dead_owner(), "mine"),
        ("dead-of-another-run", dead_owner(), "other"),
        ("alive", Owner.current(), "mine"),
        ("elsewhere", elsewhere, "mine"),
        ("in-another-namespace", beside, "mine"),
    ):
        leftover(name, owner, label)
    docker_daemon.docker("create", "--name", "foreign", "--label", "run=mine", BASE_IMAGE, "true")
    runtime = DockerRuntime(docker_daemon.host)
    assert await runtime.reap({"run": "mine"}) == 1
    assert await runtime.reap({"run": "mine"}) == 0
    names = set(docker_daemon.docker("ps", "-a", "--format", "{{.Names}}").split())
    assert {"dead-of-another-run", "alive", "elsewhere", "in-another-namespace", "foreign"} <= names
    assert "dead" not in names
    assert await runtime.reap({}) == 1
    docker_daemon.docker("rm", "alive", "elsewhere", "in-another-namespace", "foreign")
    await runtime.close()


@pytest.mark.docker
async def test_a_container_that_is_removed_from_outside_is_gone_and_closes(docker_daemon: DockerDaemon) -> None:
    runtime = DockerRuntime(docker_daemon.host)
    sandbox = await runtime.start(SandboxSpec(image=BASE_IMAGE))
    docker_daemon.docker("rm", "-f", sandbox.sandbox_id)
    with pytest.raises(SandboxGone):
        await sandbox.run(Command(script="true"))
    await sandbox.close()
    await runtime.close()


@pytest.mark.docker
async def test_auto_prefers_docker_where_it_answers(docker_host: str) -> None:
    runtime = await choose("auto", docker_host=docker_host)
    assert runtime.name == "docker" and "containers" in runtime.isolation
    await runtime.close()


@pytest.mark.parametrize("host", ["unix:///nowhere/docker.sock", "tcp://127.0.0.1:1", "ftp://x", "nonsense"])
async def test_an_absent_daemon_is_one_error_with_a_remedy(host: str) -> None:
    with pytest.raises(RuntimeUnavailable) as caught:
        await choose("docker", docker_host=host)
    assert caught.value.remedy and host in str(caught.value)


async def test_a_stranger_behind_the_socket_is_told_too(tmp_path: Path) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: text/plain\r\n\r\nhi")
        writer.close()

    server = await asyncio.start_unix_server(babble, tmp_path / "s")
    with pytest.raises(RuntimeUnavailable):
        await choose("docker", docker_host=f"unix://{tmp_path}/s")
    server.close()


async def test_auto_falls_back_to_boxes_and_docker_alone_never_does() -> None:
    try:
        runtime = await choose("auto", docker_host="unix:///nowhere/docker.sock")
    except RuntimeUnavailable as error:
        assert "bubblewrap" in str(error) or "process sandboxes" in str(error)
    else:
        assert runtime.name == "process" and "bubblewrap" in runtime.isolation
        await runtime.close()


@pytest.mark.docker
async def test_long_commands_without_python3_keep_no_other_waiting(
    docker_host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # four execs start at once
    runtime = DockerRuntime(docker_host)
    *sleepers, other = await asyncio.gather(*(runtime.start(SandboxSpec(image=BARE_IMAGE)) for _ in range(5)))
    sleeping = [asyncio.create_task(one.run(Command(script="sleep 1000", timeout_s=60.0))) for one in sleepers]
    for _ in range(3):  # none of which waits for the sleepers
        assert (await other.run(Command(script="echo works"))).stdout == b"works\n"
    assert not any(task.done() for task in sleeping)
    for task in sleeping:
        task.cancel()
    await asyncio.gather(*sleeping, return_exceptions=True)
    await runtime.close()


OLD_PYTHON = r"""#!/bin/sh
# Python 3.6 as far as the agent can tell: "$4" is the text that it is to run.
case "$4" in *"from __future__ import annotations"*) echo "SyntaxError: not defined" >&2; exit 1;; esac
code=$4; shift 4
exec python3.new -I -S -c 'import sys; sys.version_info = (3, 6, 15); exec(sys.argv.pop(1))' "$code" "$@"
"""


@pytest.mark.docker
async def test_a_python3_too_old_for_the_agent_is_like_none(docker_daemon: DockerDaemon, tmp_path: Path) -> None:
    (tmp_path / "python3").write_text(OLD_PYTHON)
    (tmp_path / "python3").chmod(0o755)
    (tmp_path / "Dockerfile").write_text(
        f"FROM {BASE_IMAGE}\nRUN mv $(readlink -f /usr/bin/python3) /usr/bin/python3.new && rm /usr/bin/python3\n"
        "COPY python3 /usr/bin/python3\n"
    )
    runtime = DockerRuntime(docker_daemon.host, labels={"test": "old"})
    for _ in range(2):
        sandbox = await runtime.start(SandboxSpec(context=str(tmp_path)))
        assert (await sandbox.run(Command(script="echo works"))).stdout == b"works\n"
        first = docker_daemon.docker("inspect", "-f", "{{.Path}}", sandbox.sandbox_id).strip()
        assert first == "sh"  # no agent
    await runtime.close()
    assert docker_daemon.docker("ps", "-aq", "--filter", "label=test=old") == ""
