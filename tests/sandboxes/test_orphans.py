"""A half-made box whose owner is gone is ended; a living owner's, or a stranger's, is not."""

import os
import subprocess
import sys

from sandboxes.orphans import WORD, end_orphans, owner_word


def waiter(word: str) -> subprocess.Popen[bytes]:
    """A process that waits for ever, as a box's half-made child does, with `word` on its command line."""
    ready = [sys.executable, "-S", "-c", "import time; print(1, flush=True); time.sleep(600)", "box-test", word]
    process = subprocess.Popen(ready, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_only_what_a_dead_owner_left_is_ended() -> None:
    namespace, pid, started = owner_word().removeprefix(WORD).split(":")
    assert int(pid) == os.getpid()
    dead = waiter(f"{WORD}{namespace}:{pid}:{int(started) - 1}")  # the same number, but another process had it
    mine = waiter(owner_word())
    elsewhere = waiter(f"{WORD}1:{pid}:{int(started) - 1}")
    nonsense = waiter(f"{WORD}{namespace}:x")
    try:
        end_orphans()
        assert dead.wait(10) == -9
        assert [process.poll() for process in (mine, elsewhere, nonsense)] == [None, None, None]
    finally:
        for process in (dead, mine, elsewhere, nonsense):
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
