"""Real processes for tests of several trainer workers: started once, each given one function after another."""

from __future__ import annotations

import multiprocessing as mp
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from thundersync.learn.collective import Ranks

LIMIT_S = 120.0
"""For one function on all ranks: ends a hang, decides no test."""


class RankProcesses:
    """Up to `most` ranks. `run` calls `work(ranks, *arguments)` on each of `world`, in a group of their own."""

    def __init__(self, most: int, folder: Path) -> None:
        # Forked from a server that has imported everything and has one thread.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["thundersync.learn.checkpoint", "thundersync.learn.policy"])
        self._folder = folder
        self._meetings = 0
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(most):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, world: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What each rank returned. An exception in one of them is raised here, as text."""
        self._meetings += 1
        meeting = str(self._folder / f"meeting-{self._meetings}")
        for rank, pipe in enumerate(self._pipes[:world]):
            pipe.send((rank, world, meeting, work, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes[:world]):
            assert pipe.poll(LIMIT_S), f"rank {rank} of {world} did not answer"
            answers.append(pipe.recv())
        failed = [answer for ok, answer in answers if not ok]
        assert not failed, "\n".join(failed)
        return [answer for _, answer in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # each process ends when its pipe does
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join(10)


def _serve(pipe: Connection) -> None:
    while True:
        try:
            rank, world, meeting, work, arguments = pipe.recv()
        except EOFError:
            return
        try:
            ranks = Ranks.join(rank, world, meeting, "cpu", timeout_s=60.0)
            try:
                pipe.send((True, work(ranks, *arguments)))
            finally:
                ranks.close()
        except BaseException:
            pipe.send((False, traceback.format_exc()))
