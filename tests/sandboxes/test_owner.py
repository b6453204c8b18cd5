"""Who is gone, and who only looks like it."""

import os
import subprocess
import sys

from sandboxes.owner import Owner


def test_an_owner_survives_its_labels_and_is_alive() -> None:
    owner = Owner.current()
    assert Owner.from_labels(owner.labels()) == owner
    assert owner.pid == os.getpid() and owner.started and not owner.is_gone()


def test_an_ended_process_is_gone_even_if_its_number_is_used_again() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    here = Owner.current()
    assert Owner(pid=child.pid, started="12345", boot=here.boot, host=here.host).is_gone()
    assert Owner(pid=here.pid, started="12345", boot=here.boot, host=here.host).is_gone()


def test_a_zombie_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.read()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, but not yet collected
    here = Owner.current()
    assert Owner(pid=child.pid, started="1", boot=here.boot, host=here.host).is_gone()
    child.wait()
    child.stdout.close()


def test_another_machine_is_never_judged_and_another_boot_always_is() -> None:
    here = Owner.current()
    assert not Owner(pid=1, started="1", boot="b", host="another").is_gone()
    assert Owner(pid=here.pid, started=here.started, boot="an earlier one", host=here.host).is_gone()


def test_foreign_labels_are_nobodys() -> None:
    assert Owner.from_labels({}) is None
    assert Owner.from_labels({**Owner.current().labels(), "thundersync.owner.pid": "x"}) is None
