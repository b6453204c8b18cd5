"""What the coordinator says of trainer workers that end, with stand-ins for the workers."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from thundersync.errors import WorkerLost
from thundersync.learn import messages as m
from thundersync.learn.link import WorkerLink

HELLO = """
import os, signal, sys, msgspec, zmq
from thundersync.learn import messages as m
socket = zmq.Context.instance().socket(zmq.DEALER)
socket.connect(sys.argv[1].partition("=")[2])
socket.send(b"hello")
number, _ = socket.recv_multipart()
ready = m.Ready(parameters=1, shares_prompts=True, arena=None, device="cpu")
socket.send_multipart((number, msgspec.msgpack.encode(ready)))
number, _ = socket.recv_multipart()
"""
KILLED = HELLO + "os.kill(os.getpid(), signal.SIGKILL)"
LEFT_ALONE = (
    HELLO
    + """
gone = m.Broken(error="RanksLost: a peer closed the connection", traceback="", by_another=True)
socket.send_multipart((number, msgspec.msgpack.encode(gone)))
sys.exit(1)
"""
)


async def test_the_worker_that_was_killed_is_named_and_not_the_one_that_missed_it(tmp_path: Path) -> None:
    workers = stand_ins(tmp_path, LEFT_ALONE, KILLED, LEFT_ALONE)
    try:
        await asyncio.gather(*(worker.start(m.Stop()) for worker in workers))  # type: ignore[arg-type]
        told = await asyncio.gather(
            *(worker.call(m.Stop(), m.Done, limit_s=30.0) for worker in workers), return_exceptions=True
        )
    finally:
        await asyncio.gather(*(worker.close() for worker in workers))
    for error in told:
        assert isinstance(error, WorkerLost)
        assert "trainer worker 1" in str(error)
        assert "killed by SIGKILL" in str(error)


async def test_a_worker_that_missed_one_that_nobody_killed_tells_its_own_error(tmp_path: Path) -> None:
    workers = stand_ins(tmp_path, LEFT_ALONE, LEFT_ALONE)
    try:
        await asyncio.gather(*(worker.start(m.Stop()) for worker in workers))  # type: ignore[arg-type]
        with pytest.raises(WorkerLost, match=r"trainer worker 0 .* RanksLost: a peer closed"):
            await workers[0].call(m.Stop(), m.Done, limit_s=30.0)
    finally:
        await asyncio.gather(*(worker.close() for worker in workers))


def stand_ins(folder: Path, *programs: str) -> list[WorkerLink]:
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    workers = [WorkerLink(r, log_path=folder / f"{r}.log", environment=environment) for r in range(len(programs))]
    for worker, program in zip(workers, programs, strict=True):
        worker.program, worker.fellows = ("-c", program), workers
    return workers
