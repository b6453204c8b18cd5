"""Who is gone, and who only looks like it."""

import ast
import os
import subprocess
import sys

import pytest
from msgspec import structs

from sandboxes.owner import Owner


def test_an_owner_survives_its_labels_and_is_alive() -> None:
    owner = Owner.current()
    assert Owner.from_labels(owner.labels()) == owner
    assert owner.pid == os.getpid() and owner.started and not owner.is_gone()


def test_an_ended_process_is_gone_even_if_its_number_is_used_again() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert structs.replace(Owner.current(), pid=child.pid, started="12345").is_gone()
    assert structs.replace(Owner.current(), started="12345").is_gone()


def test_a_zombie_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.read()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, but not yet collected
    assert structs.replace(Owner.current(), pid=child.pid, started="1").is_gone()
    child.wait()
    child.stdout.close()


def test_another_machine_is_never_judged_and_another_boot_always_is() -> None:
    assert not structs.replace(Owner.current(), boot="b", host="another").is_gone()
    assert structs.replace(Owner.current(), boot="an earlier one").is_gone()


def test_an_owner_of_another_pid_namespace_is_never_judged_by_its_number() -> None:
    ask = "import sys; from sandboxes.owner import Owner; print(Owner.current().labels(), flush=True); sys.stdin.read()"
    flags = ["--fork", "--pid", "--mount-proc", "--kill-child", *(["--map-root-user"] if os.geteuid() else [])]
    child = subprocess.Popen(
        ["unshare", *flags, sys.executable, "-c", ask], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    said = child.stdout.readline()
    if not said:
        pytest.skip("PID namespaces cannot be made here")
    stranger = Owner.from_labels(ast.literal_eval(said))
    assert stranger is not None and stranger.pid == 1  # a number that somebody else has here
    assert (stranger.boot, stranger.host) == (Owner.current().boot, Owner.current().host)
    assert not stranger.is_gone()
    unnamed = {key: value for key, value in stranger.labels().items() if not key.endswith("namespace")}
    told = Owner.from_labels(unnamed)
    assert told is not None and not told.is_gone()
    child.communicate("")


def test_foreign_labels_are_nobodys() -> None:
    assert Owner.from_labels({}) is None
    assert Owner.from_labels({**Owner.current().labels(), "thundersync.owner.pid": "x"}) is None
