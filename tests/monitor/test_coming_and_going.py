"""A real run is the same whoever watches it: monitors come and go, are killed, and stop, as processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from tests.monitor import watched_run
from tests.monitor.viewer import view_of
from tests.tiny import tiny_model
from thundersync.monitor import events as e
from thundersync.monitor.client import events
from thundersync.monitor.feed import LIVE
from thundersync.rundir import read_rollouts

pytestmark = pytest.mark.slow

GLANCE_S = 0.05
"""Between two looks at files and processes."""
KINDS = ("plain", "json", "screen")
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
HELD_MIB = watched_run.FULL * watched_run.EVENT_BYTES * 1.5 / 2**20
"""The least that the second flood, three times a queue, would take where nothing bounds a queue; twice as much as one
queue takes."""


class Process:
    """One that is killed if the test leaves it behind."""

    def __init__(self, *arguments: str, output: Path | int, stdin: int = subprocess.DEVNULL) -> None:
        with contextlib.ExitStack() as files:
            stdout: Any = output
            stderr: Any = output
            if isinstance(output, Path):
                stdout = files.enter_context(output.open("wb"))
                stderr = files.enter_context(output.with_suffix(".err").open("wb"))
            environment = {**os.environ, "TERM": "xterm-256color"}
            command = [sys.executable, "-m", *arguments]
            self.popen = subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, env=environment)

    async def end(self, number: signal.Signals | None = None) -> int:
        """Its exit code."""
        if number is not None:
            self.popen.send_signal(number)
        return await asyncio.to_thread(self.popen.wait, 120)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()


class Monitor(Process):
    """`python -m thundersync monitor`, as a pipe of lines or on a terminal of its own."""

    def __init__(self, run: Path, kind: str, output: Path) -> None:
        self.output, self.kind = output, kind
        self._terminal = -1
        if kind == "screen":
            self._terminal, inner = pty.openpty()
            super().__init__("thundersync", "monitor", str(run), output=inner, stdin=inner)
            os.close(inner)
            output.touch()
            asyncio.get_running_loop().add_reader(self._terminal, self._read)
        else:
            super().__init__("thundersync", "monitor", str(run), f"--{kind}", output=output)

    async def attached(self) -> None:
        """It has told something of the run."""
        await until(lambda: b"run" in self.output.read_bytes() or self.popen.poll() is not None)
        assert self.popen.poll() is None, errors(self.output)
        if self.kind == "screen":
            os.write(self._terminal, b"4")  # a rollout, word for word: asked of the run while it lives

    async def end(self, number: signal.Signals | None = None) -> int:
        code = await super().end(number)
        self._hang_up()
        return code

    def kill(self) -> None:
        super().kill()
        self._hang_up()

    def _read(self) -> None:
        with self.output.open("ab") as output, contextlib.suppress(OSError):  # it has ended: the terminal is gone
            output.write(os.read(self._terminal, 1 << 16))

    def _hang_up(self) -> None:
        if self._terminal >= 0:
            asyncio.get_running_loop().remove_reader(self._terminal)
            os.close(self._terminal)
            self._terminal = -1


class Watched(Process):
    """The run."""

    def __init__(self, folder: Path, model: Path) -> None:
        folder.mkdir()
        self.run, self._output = folder / "run", folder / "output.txt"
        super().__init__(
            "tests.monitor.watched_run", str(folder), str(model), output=self._output, stdin=subprocess.PIPE
        )

    def told(self) -> list[dict[str, Any]]:
        file = self.run / "events.jsonl"
        return [json.loads(line) for line in file.read_bytes().split(b"\n")[:-1]] if file.is_file() else []

    async def until(self, condition: Callable[[list[dict[str, Any]]], bool]) -> None:
        await until(lambda: self.popen.poll() is not None or condition(self.told()))
        assert self.popen.poll() is None, errors(self._output)

    @property
    def waits(self) -> bool:
        """For `go_on`, with its last rollout."""
        return sum(each["kind"] == "rollout_started" for each in self.told()) == watched_run.ROLLOUTS

    def go_on(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.close()

    async def result(self) -> tuple[list[object], list[bytes], list[float]]:
        """Tokens and rewards, weights and optimizer, and what the flood did to its memory."""
        assert await self.end() == 0, errors(self._output)
        rollouts: list[object] = [
            (rollout.rollout_id, rollout.sequences, rollout.outcome)
            for file in sorted((self.run / "rollouts").glob("step-*"))
            for rollout in sorted(read_rollouts(file), key=lambda each: each.rollout_id)
        ]
        weights = [file.read_bytes() for file in sorted((self.run / "checkpoints").rglob("*.safetensors"))]
        return rollouts, weights, json.loads(self._output.read_text().splitlines()[-1])


def errors(output: Path) -> str:
    return output.with_suffix(".err").read_text()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - of other processes and their files
        await asyncio.sleep(GLANCE_S)


@pytest.fixture
async def started() -> AsyncIterator[list[Process]]:
    processes: list[Process] = []
    yield processes
    for each in processes:
        if each.popen.poll() is None:
            each.kill()


async def come_and_go(watched: Watched, name: str, started: list[Process]) -> list[tuple[str, int | None]]:
    """One viewer after another until the run waits, each kind at least once: which they were, and how they ended.

    None of those that were ended before they were there: Python itself may not have been.
    """
    draw = random.Random(name)
    kinds = draw.sample(KINDS, len(KINDS))
    gone: list[tuple[str, int | None]] = []

    async def some_events() -> None:
        count = len(watched.told()) + draw.randrange(40)
        await until(lambda: watched.waits or len(watched.told()) >= count)

    while not watched.waits or len(gone) < len(KINDS):
        await some_events()
        kind = kinds[len(gone) % len(KINDS)]
        viewer = Monitor(watched.run, kind, watched.run.parent / f"{name}{len(gone)}")
        started.append(viewer)
        attaches = draw.random() < 0.75
        if attaches:
            await viewer.attached()
        await some_events()
        code = await viewer.end(draw.choice(ENDS))
        gone.append((viewer.kind, code if attaches else None))
    return gone


async def test_monitors_that_come_and_go_and_stop_change_no_result_and_hold_nothing_up(
    tmp_path: Path, started: list[Process]
) -> None:
    model = tiny_model(tmp_path / "model")
    alone, watched = (Watched(tmp_path / name, model) for name in ("alone", "watched"))
    started += [alone, watched]
    alone.go_on()
    await watched.until(lambda told: bool(told))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with contextlib.ExitStack() as sockets:
        sockets.callback(context.destroy, linger=0)
        reads_nothing = context.socket(zmq.SUB)
        reads_nothing.setsockopt(zmq.RCVHWM, 1)
        reads_nothing.connect(json.loads((watched.run / "feed.json").read_bytes())["endpoint"])
        reads_nothing.subscribe(LIVE)
        steady, stopped = (Monitor(watched.run, "json", tmp_path / name) for name in ("steady", "stopped"))
        started += [steady, stopped]
        for each in (steady, stopped):
            await each.attached()
        stopped.popen.send_signal(signal.SIGSTOP)
        assert await asyncio.to_thread(reads_nothing.poll, 60_000)
        first, second = await asyncio.gather(*(come_and_go(watched, name, started) for name in "ab"))
        gone = first + second
        children = psutil.Process(watched.popen.pid).children(recursive=True)
        watched.go_on()
        rollouts, weights, (full_mib, flooded_mib) = await watched.result()
    assert {kind for kind, _ in gone} == set(KINDS)
    assert {code for kind, code in gone if kind != "screen"} <= {None, 0, 130, -signal.SIGKILL}, gone
    assert len(rollouts) == watched_run.ROLLOUTS and len(weights) == 2
    assert (rollouts, weights) == (await alone.result())[:2]
    assert flooded_mib - full_mib < HELD_MIB
    # It has ended, with the stopped ones still there, and left nothing.
    assert not [each for each in children if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    assert not list(watched.run.glob("feed.*"))
    stopped.popen.send_signal(signal.SIGCONT)
    whole = view_of([event async for event in events(str(watched.run))])
    for viewer in (steady, stopped):
        assert await viewer.end() == 0
        told = [e.from_line(line) for line in viewer.output.read_bytes().splitlines()]
        assert view_of(each for each in told if each is not None) == whole
