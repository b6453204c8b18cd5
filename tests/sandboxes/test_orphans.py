"""A half-made box whose owner is gone is ended; a living owner's, or a stranger's, is not."""

import os
import subprocess
import sys

import pytest

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


@pytest.mark.parametrize("number", ["\N{SUPERSCRIPT TWO}", "9" * 300, "9" * 5000], ids=["no digit", "long", "longer"])
def test_no_word_that_a_box_makes_up_stops_the_search(number: str) -> None:
    namespace, _, started = owner_word().removeprefix(WORD).split(":")
    alone = [f"{WORD}{namespace}:{os.getpid()}:1"]
    made_up = [f"{WORD}{namespace}:{number}:{started}"]
    processes = [
        subprocess.Popen(words, executable="/bin/cat", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for words in (alone, made_up)
    ]
    for process in processes:  # it is there once it answers
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"x\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"x\n"
    try:
        assert end_orphans() >= set(alone)
        assert processes[0].wait(10) == -9
        assert processes[1].poll() is None
    finally:
        for process in processes:
            process.kill()
            process.communicate()
