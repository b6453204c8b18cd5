"""What every sandbox promises: boxes (bubblewrap), containers (Docker), and containers without an agent."""

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import pytest

from sandboxes import (
    Command,
    DiskFull,
    DockerRuntime,
    FileMissing,
    FileRefused,
    FileTooLarge,
    ImageMissing,
    ProcessRuntime,
    Sandbox,
    SandboxGone,
    StartFailed,
)
from tests.sandboxes.conftest import Lab, groups, until

MARK = "marker-7f3a"


async def test_exit_code_and_both_streams_come_back(shared: Sandbox) -> None:
    result = await shared.run(Command(script="echo out; echo err >&2; exit 7"))
    assert (result.exit_code, result.stdout, result.stderr) == (7, b"out\n", b"err\n")
    assert not result.timed_out and not result.oom_killed and result.stdout_cut_bytes == 0


async def test_a_killed_command_reports_128_plus_its_signal(shared: Sandbox) -> None:
    assert (await shared.run(Command(script="kill -TERM $$"))).exit_code == 128 + 15


async def test_output_is_binary_safe(shared: Sandbox) -> None:
    result = await shared.run(Command(script=r"printf '\000\377\n'; printf '\376' >&2"))
    assert (result.stdout, result.stderr) == (b"\x00\xff\n", b"\xfe")


async def test_each_command_has_a_fresh_shell_in_one_file_tree(shared: Sandbox) -> None:
    await shared.run(Command(script="cd /tmp; export SEEN=1; echo kept > /tmp/kept"))
    result = await shared.run(Command(script="pwd; echo [$SEEN]; cat /tmp/kept"))
    assert result.stdout == b"/workspace\n[]\nkept\n"


async def test_the_workdir_is_the_users_to_write(lab: Lab) -> None:
    sandbox = await lab.start(workdir="/app/deep")
    result = await sandbox.run(Command(script="pwd; touch here && ls; touch /workspace/too /tmp/too"))
    assert (result.exit_code, result.stdout) == (0, b"/app/deep\nhere\n")
    await sandbox.close()


async def test_an_agent_may_leave_files_where_terminal_tasks_look_for_them(shared: Sandbox) -> None:
    result = await shared.run(Command(script="echo a > /logs/agent/notes && echo b > /logs/artifacts/made"))
    assert result.exit_code == 0, result.stderr


async def test_stdin_env_and_cwd_reach_the_command(shared: Sandbox) -> None:
    command = Command(script="pwd; cat; echo $FROM_SPEC $BOTH", stdin=b"fed\n", env={"BOTH": "command"}, cwd="/tmp")
    assert (await shared.run(command)).stdout == b"/tmp\nfed\nspec command\n"


async def test_stdin_of_megabytes_passes_and_may_be_ignored(shared: Sandbox) -> None:
    data = os.urandom(3 << 20)
    counted = await shared.run(Command(script="wc -c", stdin=data))
    assert counted.stdout.split() == [b"3145728"]
    assert (await shared.run(Command(script="true", stdin=data))).exit_code == 0


async def test_a_missing_cwd_is_a_result_not_an_error(shared: Sandbox) -> None:
    result = await shared.run(Command(script="true", cwd="/nowhere"))
    assert result.exit_code == 126 and b"/nowhere" in result.stderr


@pytest.mark.parametrize("script", ["echo a\0b", "x" * 200_000, "echo \ud83d"])
async def test_scripts_no_shell_could_take_are_results_too(shared: Sandbox, script: str) -> None:
    await shared.run(Command(script=script))
    assert (await shared.run(Command(script="echo alive"))).stdout == b"alive\n"


async def test_long_output_keeps_head_and_tail_and_counts_the_cut_exactly(shared: Sandbox) -> None:
    script = "seq 1 200000; seq 1 100 >&2"
    result = await shared.run(Command(script=script, output_limit_bytes=1000))
    whole = b"".join(b"%d\n" % n for n in range(1, 200001))
    assert result.stdout == whole[:500] + whole[-500:]
    assert result.stdout_cut_bytes == len(whole) - 1000
    assert result.stderr_cut_bytes == 0 and result.stderr.endswith(b"100\n")


async def test_endless_output_stops_at_the_deadline_in_little_memory(shared: Sandbox) -> None:
    result = await shared.run(Command(script="yes", timeout_s=0.5, output_limit_bytes=64))
    assert result.timed_out and len(result.stdout) == 64 and result.stdout_cut_bytes > 1 << 20


async def test_the_deadline_kills_what_hides_and_the_sandbox_lives_on(lab: Lab, shared: Sandbox) -> None:
    script = (
        "trap '' TERM HUP INT; (setsid sleep 1000 &) ; nohup sleep 1000 >/dev/null 2>&1 & "
        "(sleep 1000 & disown; exec sleep 1000) & echo started; sleep 1000"
    )
    result = await shared.run(Command(script=script, timeout_s=1.0))
    assert (result.timed_out, result.exit_code, result.stdout) == (True, 137, b"started\n")
    assert len(await processes(shared)) == own_processes(lab)


async def test_what_a_finished_command_left_running_is_killed(lab: Lab, shared: Sandbox) -> None:
    result = await shared.run(Command(script="setsid sleep 1000 & sleep 1000 & echo done"))
    assert (result.exit_code, result.stdout, result.timed_out) == (0, b"done\n", False)
    assert len(await processes(shared)) == own_processes(lab)


async def processes(sandbox: Sandbox) -> list[bytes]:
    """Names of all processes but the shell that looks."""
    script = "cd /proc; for p in [0-9]*; do [ $p = $$ ] || cat $p/comm 2>/dev/null; done"
    looked = await sandbox.run(Command(script=script))
    return [name for name in looked.stdout.splitlines() if name != b"cat"]


def own_processes(lab: Lab) -> int:
    """Process 1, and without python3 the two that end the sandbox in time."""
    return 1 if lab.has_agent else 3


async def test_kill_all_leaves_only_the_agent(lab: Lab, shared: Sandbox) -> None:
    await shared.kill_all()
    assert len(await processes(shared)) == own_processes(lab)


async def test_files_go_in_and_come_out(shared: Sandbox) -> None:
    data = os.urandom(1 << 20)
    await shared.write("/workspace/deep/er/data.bin", data, mode=0o750)
    assert await shared.read("/workspace/deep/er/data.bin") == data
    listed = await shared.run(
        Command(
            script="stat -c '%a %U' /workspace/deep/er/data.bin /workspace/deep; echo x >> /workspace/deep/er/data.bin"
        )
    )
    assert listed.exit_code == 0 and listed.stdout.split()[0] == b"750"


async def test_a_written_file_replaces_a_link_instead_of_following_it(shared: Sandbox) -> None:
    await shared.run(
        Command(script="echo kept > /workspace/target; ln -sf target /workspace/link; mkfifo /workspace/pipe")
    )
    await shared.write("/workspace/link", b"new")
    await shared.write("/workspace/pipe", b"new")
    assert await shared.read("/workspace/target") == b"kept\n"
    assert await shared.read("/workspace/pipe") == b"new"


async def test_files_that_are_missing_large_or_odd_are_told_apart(shared: Sandbox) -> None:
    await shared.run(Command(script="mkfifo /tmp/fifo; mkdir -p /tmp/folder; head -c 100 /dev/zero > /tmp/hundred"))
    with pytest.raises(FileMissing):
        await shared.read("/workspace/none")
    with pytest.raises(FileTooLarge):
        await shared.read("/tmp/hundred", limit_bytes=99)
    assert len(await shared.read("/tmp/hundred", limit_bytes=100)) == 100
    for odd in ("/tmp/fifo", "/tmp/folder", "/dev/zero"):
        with pytest.raises(FileRefused):
            await shared.read(odd)
    with pytest.raises(FileRefused):
        await shared.write("/tmp/folder", b"")


@pytest.mark.parametrize("path", ["work/a", "", "/workspace/../etc/passwd", "/workspace/a\0b", ".."])
async def test_paths_that_are_not_plain_and_absolute_are_refused(shared: Sandbox, tmp_path: Path, path: str) -> None:
    with pytest.raises(FileRefused):
        await shared.write(path, b"")
    with pytest.raises(FileRefused):
        await shared.read(path)
    with pytest.raises(FileRefused):
        await shared.put_tree(tmp_path, path)


async def test_links_planted_where_a_file_is_half_written_lead_nowhere(lab: Lab) -> None:
    sandbox = await lab.start()
    # Each link made here takes a process number: the next ones are among those that the names end in.
    plant = "for n in $(seq 400 900); do ln -s ../target .partial.$n; done; ln -s ../target .new.partial"
    await sandbox.run(Command(script=f"mkdir in; cd in; echo kept > ../target; {plant}"))
    await sandbox.write("/workspace/in/new", b"new")
    assert await sandbox.read("/workspace/target") == b"kept\n"
    assert await sandbox.read("/workspace/in/new") == b"new"
    await sandbox.close()


async def test_a_folder_arrives_with_modes_links_and_nothing_of_what_links_point_to(
    fresh: Sandbox, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text(MARK)
    tree = tmp_path / "tree"
    (tree / "sub" / "empty").mkdir(parents=True)
    (tree / "run.sh").write_text("#!/bin/bash\necho ran\n")
    (tree / "run.sh").chmod(0o755)
    (tree / "sub" / "data").write_bytes(b"\x00" * 70_000)
    (tree / "sub" / "link").symlink_to("../run.sh")
    (tree / "sub" / "out").symlink_to(tmp_path / "secret")
    await fresh.put_tree(tree, "/tests")
    result = await fresh.run(
        Command(script="/tests/run.sh; /tests/sub/link; ls /tests/sub; cat /tests/sub/out", user="root")
    )
    assert result.stdout == b"ran\nran\ndata\nempty\nlink\nout\n" and MARK.encode() not in result.stdout
    assert await fresh.read("/tests/sub/data") == b"\x00" * 70_000


async def test_a_link_planted_where_a_folder_arrives_leads_nowhere(fresh: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_text("new")
    await fresh.run(Command(script="mkdir -p /workspace/t /workspace/other; ln -s /workspace/other /workspace/t/sub"))
    await fresh.put_tree(tmp_path, "/workspace/t")
    assert (await fresh.run(Command(script="ls /workspace/other; cat /workspace/t/sub/file"))).stdout == b"new"


async def test_a_folder_comes_out_with_its_modes_and_inner_links(fresh: Sandbox, tmp_path: Path) -> None:
    script = "mkdir -p out/sub; echo one > out/one; chmod 750 out/one; ln -s ../one out/sub/link; ln -s none out/dead"
    await fresh.run(Command(script=script))
    await fresh.get_tree("/workspace/out", tmp_path / "got")
    assert (tmp_path / "got/sub/link").read_text() == "one\n" and (tmp_path / "got/one").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "got/dead").is_symlink()
    with pytest.raises(FileRefused, match="exists"):
        await fresh.get_tree("/workspace/out", tmp_path / "got")
    with pytest.raises(FileMissing):
        await fresh.get_tree("/workspace/none", tmp_path / "none")


@pytest.mark.parametrize("link", ["/etc/passwd", "../../etc", "a/../../..", "hop/../../x"])
async def test_a_link_that_leads_out_of_a_folder_is_refused_and_nothing_is_left(
    fresh: Sandbox, tmp_path: Path, link: str
) -> None:
    await fresh.run(Command(script=f"mkdir -p out/a/b out/t; ln -s ../t out/a/hop; ln -s '{link}' out/a/evil"))
    with pytest.raises(FileRefused, match="out of its folder"):
        await fresh.get_tree("/workspace/out", tmp_path / "got")
    assert list(tmp_path.iterdir()) == []


async def test_a_folder_too_large_to_come_out_is_told(fresh: Sandbox, tmp_path: Path) -> None:
    await fresh.run(Command(script="mkdir out; head -c 2M /dev/zero > out/two"))
    with pytest.raises(FileTooLarge):
        await fresh.get_tree("/workspace/out", tmp_path / "got", limit_bytes=1 << 20)
    assert list(tmp_path.iterdir()) == []


async def test_a_folder_with_a_socket_or_a_missing_folder_is_refused(shared: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(FileMissing):
        await shared.put_tree(tmp_path / "none", "/workspace/x")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FileRefused):
        await shared.put_tree(tmp_path, "/workspace/x")


async def test_there_is_no_network(shared: Sandbox) -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    script = f"cat /proc/net/dev; exec 3<>/dev/tcp/127.0.0.1/{port} && echo connected"
    result = await shared.run(Command(script=script))
    server.close()
    assert result.exit_code != 0 and b"connected" not in result.stdout
    interfaces = [line.split(b":")[0].strip() for line in result.stdout.splitlines() if b":" in line]
    assert interfaces == [b"lo"]


async def test_the_hosts_files_and_variables_are_out_of_sight(
    shared: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOST_SECRET", MARK)
    (tmp_path / "secret").write_text(MARK)
    script = f"cat {tmp_path}/secret; cat /etc/shadow; ls /root; env; cat /proc/*/environ; ls /run/docker.sock /var/run"
    result = await shared.run(Command(script=script))
    assert MARK.encode() not in result.stdout and b"root:" not in result.stdout and b".sock" not in result.stdout


async def test_the_hosts_programs_cannot_be_changed(lab: Lab, shared: Sandbox) -> None:
    result = await shared.run(Command(script="touch /usr/bin/planted || echo refused"))
    assert result.stdout == b"refused\n"
    assert not await asyncio.to_thread(Path("/usr/bin/planted").exists)


async def test_sandboxes_do_not_see_each_other(lab: Lab, shared: Sandbox, fresh: Sandbox) -> None:
    script = f"echo {MARK} > /tmp/mine; sleep 1000; : {MARK}"
    busy = asyncio.create_task(fresh.run(Command(script=script, timeout_s=1000)))
    looking = f"ls /tmp/mine; cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep '{MARK.replace('-', '[-]')}'; true"
    for _ in range(3):
        assert (await shared.run(Command(script=looking))).stdout == b""
    busy.cancel()
    with pytest.raises(asyncio.CancelledError):
        await busy


@pytest.mark.parametrize("user", ["agent", "root"])
async def test_no_command_can_kill_stop_trace_or_read_the_agent(lab: Lab, shared: Sandbox, user: str) -> None:
    if not lab.has_agent and user == "root":
        pytest.skip("without python3, root (the checker) is trusted")
    script = (
        "for s in KILL INT TERM STOP SEGV CHLD HUP USR1 ALRM; do kill -$s 1; done; kill -9 -1; "
        "cat /proc/1/environ /proc/1/mem; for n in $(seq 0 20); do echo forged > /proc/1/fd/$n && echo wrote; done; "
    )
    if lab.has_agent:
        script += "python3 -c 'import ctypes; print(\"ptrace\", ctypes.CDLL(None).ptrace(16, 1, 0, 0))'"
    result = await shared.run(Command(script=script, user=user))  # type: ignore[arg-type]
    assert result.stdout == (b"ptrace -1\n" if lab.has_agent else b"")
    assert (await shared.run(Command(script="echo alive"))).stdout == b"alive\n"


@pytest.mark.docker
async def test_in_a_container_agent_and_root_are_two_users(lab: Lab, shared: Sandbox) -> None:
    if lab.runtime.name != "docker":
        pytest.skip("a box has one user")
    agent = await shared.run(Command(script="id -u; touch /tests/x /logs/x; grep CapEff /proc/self/status"))
    root = await shared.run(Command(script="id -u; touch /tests/x /logs/x && echo wrote", user="root"))
    assert agent.stdout == b"1000\nCapEff:\t0000000000000000\n" and root.stdout == b"0\nwrote\n"


async def test_a_memory_bomb_ends_alone(lab: Lab) -> None:
    sandbox = await lab.start(memory_mib=200)
    bomb = await sandbox.run(Command(script="tail < <(head -c 400M /dev/zero)", timeout_s=60))
    assert bomb.exit_code != 0 and bomb.stdout == b"" and not bomb.timed_out
    assert bomb.oom_killed == lab.limits_memory
    after = await sandbox.run(Command(script="echo alive"))
    assert after.stdout == b"alive\n" and not after.oom_killed
    await sandbox.close()


async def test_a_fork_bomb_ends_with_its_command(lab: Lab) -> None:
    sandbox = await lab.start(pids=48)
    bomb = await sandbox.run(Command(script=":(){ :|:& }; :; sleep 1000", timeout_s=1.0, output_limit_bytes=100))
    assert bomb.timed_out or bomb.exit_code != 0
    assert len(await processes(sandbox)) == own_processes(lab)
    await sandbox.close()


async def test_a_full_disk_is_refused_by_name(lab: Lab) -> None:
    if lab.runtime.name == "docker":
        pytest.skip("the storage of the tests' Docker daemon has no quotas")
    sandbox = await lab.start()
    await sandbox.run(Command(script="head -c 2G /dev/zero > /workspace/fill; true", timeout_s=60))
    assert int((await sandbox.run(Command(script="stat -c %s /workspace/fill"))).stdout) <= 512 << 20
    await sandbox.run(Command(script="head -c 2G /dev/zero > /workspace/more; true", timeout_s=60))
    with pytest.raises(DiskFull, match="disk is full"):
        await sandbox.write("/workspace/file", b"x" * 100_000)
    await sandbox.close()


async def test_commands_of_one_sandbox_wait_for_each_other(shared: Sandbox) -> None:
    script = "[ -e /tmp/busy ] && echo overlap; touch /tmp/busy; for i in 1 2 3; do /bin/true; done; rm /tmp/busy"
    results = await asyncio.gather(*(shared.run(Command(script=script)) for _ in range(5)))
    assert [result.stdout for result in results] == [b""] * 5


async def test_closing_leaves_nothing_and_may_be_repeated(lab: Lab) -> None:
    sandbox = await lab.start()
    await sandbox.run(Command(script="echo x > /workspace/x"))
    assert lab.exists(sandbox.sandbox_id)
    await asyncio.gather(sandbox.close(), sandbox.close())
    await sandbox.close()
    assert not lab.exists(sandbox.sandbox_id)
    with pytest.raises(SandboxGone):
        await sandbox.run(Command(script="true"))


async def test_closing_is_finished_even_if_cancelled_twice(lab: Lab) -> None:
    sandbox = await lab.start()
    closing = asyncio.create_task(sandbox.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not lab.exists(sandbox.sandbox_id)


async def test_closing_ends_a_command_under_way(lab: Lab) -> None:
    sandbox = await lab.start()
    running = asyncio.create_task(sandbox.run(Command(script="sleep 1000", timeout_s=1000)))
    await asyncio.sleep(0)
    await sandbox.close()
    with pytest.raises(SandboxGone):
        await running
    assert not lab.exists(sandbox.sandbox_id)


async def test_a_cancelled_command_makes_the_sandbox_unusable_but_not_unclosable(lab: Lab) -> None:
    sandbox = await lab.start()
    running = asyncio.create_task(sandbox.run(Command(script="sleep 1000", timeout_s=1000)))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(SandboxGone, match="out of step"):
        await sandbox.run(Command(script="true"))
    await sandbox.close()
    assert not lab.exists(sandbox.sandbox_id)


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.1])
async def test_a_cancelled_start_leaves_nothing(lab: Lab, after_s: float) -> None:
    before = lab.all_ids()
    starting = asyncio.create_task(lab.start())
    await asyncio.sleep(after_s)
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await (await starting).close()
    await until(lambda: lab.all_ids() == before)


async def test_a_sandbox_ends_by_itself_when_its_time_is_up(lab: Lab) -> None:
    sandbox = await lab.start(ttl_s=1.0)
    with pytest.raises(SandboxGone):
        await sandbox.run(Command(script="sleep 1000", timeout_s=1000))
    await sandbox.close()
    assert not lab.exists(sandbox.sandbox_id)


async def test_an_owner_that_is_killed_leaves_nothing(lab: Lab) -> None:
    host = lab.daemon.host if lab.daemon else ""
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.sandboxes.owner_script", lab.runtime.name, host, lab.image),
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert owner.stdout is not None
    sandbox_id = (await owner.stdout.readline()).decode().strip()
    assert sandbox_id and lab.exists(sandbox_id)
    owner.kill()
    await owner.wait()
    await until(lambda: not lab.exists(sandbox_id))
    left = bool(groups(sandbox_id))  # empty, for the next run to remove
    assert await lab.runtime.reap({}) == left
    assert groups(sandbox_id) == []


async def test_a_prepared_sandbox_is_forked_and_its_forks_are_strangers(lab: Lab) -> None:
    spec = lab.spec(env={"SET": "there"})
    prepared = await lab.runtime.start(spec)
    await prepared.run(Command(script="mkdir -p a; echo made > a/file; chmod 750 a/file; ln -s a/file link"))
    fork = await lab.runtime.snapshot(prepared, spec)
    await prepared.run(Command(script="echo later > a/file"))
    await prepared.close()
    one, other = await asyncio.gather(lab.runtime.start(fork), lab.runtime.start(fork))
    assert one.origin == prepared.origin
    first = await one.run(Command(script="cat link; stat -c '%a %u' a/file; echo mine >> a/file; echo $SET"))
    assert first.stdout == b"made\n750 1000\nthere\n"
    assert (await other.run(Command(script="cat a/file"))).stdout == b"made\n"
    await asyncio.gather(one.close(), other.close())
    await lab.runtime.forget(fork)
    with pytest.raises(ImageMissing):
        await lab.runtime.start(fork)


async def test_many_start_at_once(lab: Lab) -> None:
    count = 8 if lab.runtime.name == "docker" else 32
    sandboxes = await asyncio.gather(*(lab.start() for _ in range(count)))
    results = await asyncio.gather(*(one.run(Command(script="echo $$")) for one in sandboxes))
    assert all(result.exit_code == 0 for result in results)
    await asyncio.gather(*(one.close() for one in sandboxes))
    assert not {one.sandbox_id for one in sandboxes} & lab.all_ids()


async def test_a_closed_runtime_starts_nothing(lab: Lab) -> None:
    runtime = DockerRuntime(lab.daemon.host) if lab.daemon else ProcessRuntime()
    sandbox = await runtime.start(lab.spec())
    await runtime.close()
    assert not lab.exists(sandbox.sandbox_id)
    with pytest.raises(StartFailed):
        await runtime.start(lab.spec())
    await runtime.close()
