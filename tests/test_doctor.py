"""The doctor: real sockets, real child processes, and files in place of /proc."""

import io
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from sandboxes import DockerRuntime, ProcessRuntime, Runtime
from sandboxes.base import isolation_of
from sandboxes.cgroups import Cgroups
from sandboxes.controllers import CONTROLLERS
from thundersync.doctor import Check, State, checks, guarded, render, with_any_sandbox, with_isolation, worst
from thundersync.doctor.isolation import (
    check_bubblewrap,
    check_docker,
    check_user_namespaces,
    ping_docker,
    self_test,
)
from thundersync.doctor.machine import check_disk, check_shared_memory
from thundersync.doctor.packages import check_starter_model

PING = b"HTTP/1.1 200 OK\r\nApi-Version: 1.41\r\nContent-Length: 2\r\n\r\nOK"


@contextmanager
def daemon(path: Path, answer: bytes) -> Iterator[str]:
    """One connection's worth of a daemon on a unix socket; an empty answer is a daemon that hangs."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(1)

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                if answer:
                    connection.sendall(answer)
                else:
                    connection.recv(4096)  # until the client gives up

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"unix://{path}"
        finally:
            thread.join(timeout=10)


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_docker_daemon_that_answers_is_named_with_its_api_version(tmp_path: Path) -> None:
    with daemon(tmp_path / "d.sock", PING) as address:
        check = check_docker(address, [])
    assert check.state == "ok"
    assert "1.41" in check.found


def test_a_silent_docker_daemon_costs_no_more_than_the_deadline(tmp_path: Path) -> None:
    with daemon(tmp_path / "d.sock", b"") as address, pytest.raises(TimeoutError):
        ping_docker(address, deadline_s=0.05)


def test_another_server_behind_the_docker_socket_is_not_taken_for_docker(tmp_path: Path) -> None:
    with daemon(tmp_path / "d.sock", b"220 mail ready\r\n\r\n") as address:
        check = check_docker(address, [])
    assert check.state == "warn"
    assert "no Docker daemon" in check.found
    assert check.remedy


def test_a_rootless_daemon_elsewhere_is_hinted_at(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as rootless:
        rootless.bind(str(tmp_path / "rootless.sock"))
        check = check_docker(f"unix://{tmp_path}/none.sock", [tmp_path / "rootless.sock"])
    assert check.state == "warn"
    assert f"DOCKER_HOST=unix://{tmp_path}/rootless.sock" in check.remedy


@pytest.mark.parametrize("address", ["ssh://host", "tcp://127.0.0.1:notaport", "nonsense"])
def test_an_address_that_cannot_be_asked_is_a_finding_with_a_remedy(address: str) -> None:
    check = check_docker(address, [])
    assert check.state == "warn"
    assert check.remedy


def test_a_sandbox_that_is_forbidden_to_start_is_reported_with_its_own_words(tmp_path: Path) -> None:
    program = script(tmp_path / "bwrap", "echo 'bwrap: No permissions to create new namespace' >&2; exit 1")
    check = self_test([program])
    assert check.state == "warn"
    assert "No permissions to create new namespace" in check.found
    assert check.remedy


def test_a_missing_bubblewrap_comes_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *args, **kwargs: None)
    check = check_bubblewrap()
    assert check.state == "warn"
    assert "apt install bubblewrap" in check.remedy


@pytest.mark.parametrize(
    ("file", "value", "status"),
    [
        ("user/max_user_namespaces", "0", "warn"),
        ("user/max_user_namespaces", "15000", "ok"),
        ("kernel/unprivileged_userns_clone", "0", "warn"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "warn"),
        ("kernel/apparmor_restrict_unprivileged_userns", "0", "ok"),
    ],
)
def test_each_switch_that_forbids_user_namespaces_is_found(tmp_path: Path, file: str, value: str, status: str) -> None:
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(f"{value}\n")
    check = check_user_namespaces(tmp_path)
    assert check.state == status
    assert bool(check.remedy) == (status != "ok")


def test_docker_or_bubblewrap_is_enough_and_neither_fails() -> None:
    docker = Check(name="Docker", state="warn", found="no socket", remedy="start it")
    bubblewrap = Check(name="bubblewrap", state="ok", found="0.8.0")
    assert worst(with_any_sandbox([docker, bubblewrap])) == "warn"
    broken = Check(name="bubblewrap", state="warn", found="not installed", remedy="install it")
    assert [check.state for check in with_any_sandbox([docker, broken])] == ["fail", "fail"]


@pytest.mark.parametrize(("docker", "kind"), [("ok", DockerRuntime), ("warn", ProcessRuntime)])
def test_the_isolation_of_a_run_is_told_in_the_runs_own_words(docker: State, kind: Callable[[], Runtime]) -> None:
    found = [
        Check(name="Docker", state=docker, found="x", remedy="y"),
        Check(name="bubblewrap", state="ok", found="a process sandbox starts and ends"),
        Check(name="user namespaces", state="ok", found="allowed"),
        Check(name="cores", state="ok", found="2"),
    ]
    told = with_isolation(found)
    assert [check.name for check in told] == ["Docker", "bubblewrap", "user namespaces", "isolation", "cores"]
    assert told[3].found == isolation_of(kind()) and told[3].state == "ok"
    assert with_isolation([]) == []  # without any there is none to tell of


def test_boxes_without_limits_as_a_whole_come_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = [Check(name="bubblewrap", state="ok", found="a process sandbox starts and ends")]
    monkeypatch.setattr(Cgroups, "find", classmethod(lambda cls: cls(dict.fromkeys(CONTROLLERS))))
    assert with_isolation(boxes)[1].remedy == ""
    monkeypatch.setattr(Cgroups, "find", classmethod(lambda cls: cls({})))
    told = with_isolation(boxes)[1]
    assert "memory is limited per process only" in told.found and "systemd-run" in told.remedy


def test_disk_is_measured_where_a_run_folder_does_not_exist_yet(tmp_path: Path) -> None:
    check = check_disk(tmp_path / "not" / "there" / "yet")
    assert "GiB free" in check.found


def test_missing_shared_memory_is_a_finding(tmp_path: Path) -> None:
    assert check_shared_memory(tmp_path / "shm").state == "warn"


def test_an_unpacked_starter_model_is_found_and_a_half_unpacked_one_is_not(tmp_path: Path) -> None:
    half = tmp_path / "half"
    half.mkdir()
    (half / "config.json").write_text("{}")
    assert "unpacked in" not in check_starter_model(tmp_path).found
    (half / "model.safetensors").write_bytes(b"")
    assert "unpacked in" in check_starter_model(tmp_path).found


def test_a_probe_that_breaks_does_not_hide_the_other_checks() -> None:
    def broken() -> Check:
        raise RuntimeError("odd kernel")

    check = guarded("cores", broken)
    assert check.state == "warn"
    assert "odd kernel" in check.found


def test_all_checks_run_and_neither_torch_nor_vllm_is_imported() -> None:
    code = (
        "import sys; from thundersync.doctor import checks\n"
        "names = [c.name for c in checks(docker_host='unix:///nowhere.sock')]\n"
        "print(*names, sep='|'); print(any(m in sys.modules for m in ('torch', 'vllm', 'transformers')))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    names, imported = answer.splitlines()
    assert {"Python", "torch", "vLLM", "GPU", "Docker", "bubblewrap", "disk", "memory"} <= set(names.split("|"))
    assert imported == "False"


def test_every_finding_that_is_not_ok_on_this_machine_has_a_remedy(tmp_path: Path) -> None:
    for check in checks(output_dir=tmp_path, docker_host=f"unix://{tmp_path}/none.sock"):
        assert check.state == "ok" or check.remedy, check


def test_the_table_shows_remedies_and_takes_brackets_literally() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(render([Check(name="Docker", state="warn", found="[odd] text", remedy="start [it]")]))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "[odd] text" in shown
    assert "-> start [it]" in shown
