"""What the filter refuses, run through a small machine of its own for each architecture, and then by the kernel."""

import errno
import platform
import struct
from collections.abc import AsyncIterator

import pytest

from sandboxes import Command, ProcessRuntime, Sandbox, SandboxSpec
from sandboxes.seccomp import _CLONE, _CLONE3, _DENIED, _MACHINES, _SOCKETS, NEW_NAMESPACES, X32, filter_program
from tests.boxes import process_runtime

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM = ERRNO | errno.EPERM


def verdict(machine: str, number: int, argument: int = 0, *, arch: int = 0) -> int:
    """What the filter for `machine` answers to one system call: classic BPF, as the kernel runs it."""
    data = struct.pack("<IIQ6Q", number, arch or _MACHINES[machine][1], 0, argument, *[0] * 5)
    code = list(struct.iter_unpack("<HBBI", filter_program(machine)))
    at = accumulator = 0
    while True:
        kind, if_true, if_false, value = code[at]
        at += 1
        if kind == 0x06:
            return int(value)
        if kind == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        else:
            holds = {
                0x15: accumulator == value,
                0x35: accumulator >= value,
                0x45: accumulator & value != 0,
            }[kind]
            at += if_true if holds else if_false


@pytest.mark.parametrize("machine", _MACHINES)
def test_exactly_what_the_tables_name_is_refused(machine: str) -> None:
    column, _ = _MACHINES[machine]
    denied = {numbers[column] for numbers in _DENIED.values()} - {None}
    special = {_CLONE[column], _CLONE3[column], *(numbers[column] for numbers in _SOCKETS.values())}
    assert not denied & special
    for number in range(600):
        if number not in special:
            assert verdict(machine, number) == (EPERM if number in denied else ALLOW), number


@pytest.mark.parametrize("machine", _MACHINES)
def test_clone_makes_threads_and_children_but_no_namespace(machine: str) -> None:
    column, _ = _MACHINES[machine]
    threads, vfork = 0x3D0F00, 0x4111
    assert verdict(machine, _CLONE[column], threads) == verdict(machine, _CLONE[column], vfork) == ALLOW
    flags = [1 << bit for bit in range(64) if NEW_NAMESPACES >> bit & 1]
    assert len(flags) == 7
    assert {verdict(machine, _CLONE[column], vfork | flag) for flag in flags} == {EPERM}
    assert verdict(machine, _CLONE3[column]) == ERRNO | errno.ENOSYS


@pytest.mark.parametrize("machine", _MACHINES)
def test_sockets_are_of_the_usual_families_only(machine: str) -> None:
    column, _ = _MACHINES[machine]
    for numbers in _SOCKETS.values():
        allowed = [family for family in range(64) if verdict(machine, numbers[column], family) == ALLOW]
        assert allowed == [1, 2, 10, 16]
        assert verdict(machine, numbers[column], 40) == ERRNO | errno.EAFNOSUPPORT


def test_other_architectures_and_x32_get_nothing_done() -> None:
    assert verdict("x86_64", 1, arch=0x40000003) == verdict("aarch64", 1, arch=0x40000028) == KILL
    assert verdict("x86_64", X32 + 1) == verdict("x86_64", 0xFFFFFFFF) == EPERM


def test_a_machine_without_numbers_has_no_filter_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert filter_program("riscv64") == b""
    monkeypatch.setattr("sandboxes.process.filter_program", lambda: b"")
    assert "system calls are not filtered" in ProcessRuntime().isolation


@pytest.fixture
async def box() -> AsyncIterator[Sandbox]:
    runtime = await process_runtime()
    if not filter_program():
        pytest.skip(f"SECCOMP TESTS DO NOT RUN: no filter for {platform.machine()}")
    yield await runtime.start(SandboxSpec())
    await runtime.close()


async def test_the_kernel_refuses_the_ways_out(box: Sandbox) -> None:
    column, _ = _MACHINES[platform.machine()]
    names = ("ptrace", "mount", "unshare", "setns", "keyctl", "bpf", "perf_event_open", "userfaultfd")
    numbers = {name: _DENIED[name][column] for name in (*names, "io_uring_setup", "open_by_handle_at")}
    # With these arguments most succeed or fail otherwise where no filter stands before them.
    script = f"""
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for name, number in {numbers}.items():
    ctypes.set_errno(0)
    libc.syscall(number, 0, 0, 0, 0, 0)
    print(name, errno.errorcode.get(ctypes.get_errno(), "done"))
"""
    result = await box.run(Command(script="exec python3 -", stdin=script.encode()))
    assert result.stdout.decode().splitlines() == [f"{name} EPERM" for name in numbers], result.stderr
    tools = "unshare --user true; unshare --mount true; mount -t tmpfs none /tmp; echo $?"
    result = await box.run(Command(script=tools))
    assert result.stdout.split()[-1] != b"0" and result.stderr.count(b"not permitted") >= 2, result
    filters = await box.run(Command(script="grep ^Seccomp: /proc/self/status"))
    assert filters.stdout.split() == [b"Seccomp:", b"2"]


async def test_what_programs_do_every_day_works_behind_the_filter(box: Sandbox) -> None:
    script = """
import asyncio, multiprocessing, socket, subprocess, threading, concurrent.futures, tempfile, os, mmap
if __name__ == "__main__":
    seen = []
    threads = [threading.Thread(target=seen.append, args=(n,)) for n in range(8)]
    [t.start() for t in threads]; [t.join() for t in threads]
    assert sorted(seen) == list(range(8))
    assert subprocess.run("cat | tr a b", shell=True, input=b"aaa", capture_output=True).stdout == b"bbb"
    with concurrent.futures.ProcessPoolExecutor(2) as pool:
        assert list(pool.map(abs, [-1, -2])) == [1, 2]
    left, right = socket.socketpair(); left.send(b"x"); assert right.recv(1) == b"x"
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()
    async def child():
        process = await asyncio.create_subprocess_exec("echo", "hi", stdout=asyncio.subprocess.PIPE)
        return await process.stdout.read()
    assert asyncio.run(child()) == b"hi\\n"
    with tempfile.TemporaryFile() as file:
        file.truncate(4096); mmap.mmap(file.fileno(), 4096)[:1]
    os.wait4(os.posix_spawn("/bin/true", ["true"], {}), 0)
    print("fine")
"""
    await box.write("/workspace/day.py", script.encode())
    result = await box.run(
        Command(script="python3 day.py; ls -l / | sort | head -1 >/dev/null; date >/dev/null && echo ok")
    )
    assert result.stdout == b"fine\nok\n", result.stderr
