"""The run's end of its trackers: a process for each, told of commits and evaluations, never waited for.

A tracker that fails, hangs or falls behind is warned about once, and the run goes on without it. Knows how processes
are started and ended, not what they do with what they are told.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import math
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from thundersync.config import Config, MonitorConfig
from thundersync.config_file import to_toml
from thundersync.errors import ConfigError, ThundersyncError
from thundersync.generate.child import child_environment, log_tail
from thundersync.monitor.events import EvalFinished, Event, StepCommitted
from thundersync.tracking.base import Evaluation, Finish, Metrics, Start, Told

FINISH_LIMIT_S = 20.0
"""For a tracker to write, or send, what it has left when the run ends."""
BACKLOG_BYTES = 1 << 20
"""Told and not yet read; beyond it a tracker misses rows."""


def refuse_missing(monitor: MonitorConfig) -> None:
    """Raises: ConfigError for a tracker whose package is not installed."""
    for name in _wanted(monitor):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"monitor.{name} is set, but the package {name} is not installed",
                remedy=f"pip install {name}, or leave monitor.{name} away.",
            )


class Tracker:
    """All trackers of one run. `start` starts their processes; `close` ends them, started or not."""

    def __init__(
        self, config: Config, *, name: str, folder: Path, first_step: int, warn: Callable[[str], None]
    ) -> None:
        """`warn` is told, at most once per tracker, what is wrong with it. `folder` is the run's."""
        self._made = first_step
        self._starts = {
            sink: _start(config, sink, name=name, folder=folder, first_step=first_step)
            for sink in _wanted(config.monitor)
        }
        self._lines = [
            TrackerProcess(
                sink,
                command=[sys.executable, "-m", "thundersync.tracking.child", sink],
                environment=child_environment({}),
                log=folder / "logs" / f"tracking-{sink}.log",
                warn=warn,
            )
            for sink in self._starts
        ]

    async def start(self) -> None:
        """Start the processes; what they then do is not waited for."""
        for line, start in zip(self._lines, self._starts.values(), strict=True):
            await line.start()
            line.tell(start)

    def see(self, event: Event) -> None:
        """Pass on what trackers want to know of the run's events; takes microseconds, and never raises."""
        match event:
            case StepCommitted(step=step, at_s=at_s):
                self._made = step + 1
                self._tell(Metrics(step=self._made, at_s=at_s, row=_finite(event.metrics)))
            case EvalFinished(at_s=at_s):
                row = {
                    "reward_mean": event.reward_mean,
                    "pass_at_1": event.pass_at_1,
                    "scored": float(event.scored),
                    "failed": float(event.failed),
                    "seconds": event.seconds,
                }
                self._tell(Evaluation(step=self._made, at_s=at_s, row=_finite(row)))
            case _:
                pass

    async def close(self, *, limit_s: float = FINISH_LIMIT_S) -> None:
        """Let every tracker finish, at most `limit_s`; one that does not is ended."""
        await asyncio.gather(*(line.close(limit_s) for line in self._lines))

    def _tell(self, told: Told) -> None:
        for line in self._lines:
            line.tell(told)


class TrackerProcess:
    """One tracker's process, and the pipe to it."""

    def __init__(
        self,
        name: str,
        *,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        warn: Callable[[str], None],
    ) -> None:
        self._name = name
        self._command = list(command)
        self._environment = environment
        self._log = log
        self._warn = warn
        self._warned = False
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._closing = False

    async def start(self) -> None:
        """Start the process; what it then does is not waited for."""
        try:
            with self._log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=dict(self._environment),
                    start_new_session=True,  # Ctrl-C is the run's to handle: this ends when the run says so
                )
        except OSError as error:
            self._say(f"could not be started: {error}")
            return
        self._watch = asyncio.create_task(self._watching(self._process), name=f"tracking-{self._name}")

    def tell(self, told: Told) -> None:
        """Never waits: what a tracker that is behind would not read in time is not told to it."""
        process = self._process
        if process is None or process.stdin is None or process.returncode is not None or process.stdin.is_closing():
            return
        if process.stdin.transport.get_write_buffer_size() > BACKLOG_BYTES:
            self._say("does not read what it is told; it will miss rows of this run")
            return
        process.stdin.write(msgspec.json.encode(told) + b"\n")

    async def ended(self) -> None:
        """Until its process is gone, and that was told."""
        if self._watch is not None:
            await asyncio.wait({self._watch})

    async def close(self, limit_s: float) -> None:
        """Say goodbye and wait, at most `limit_s`; then end it. Idempotent."""
        process, self._closing = self._process, True
        if process is None or self._watch is None:
            return
        self.tell(Finish())
        assert process.stdin is not None
        process.stdin.close()
        done, _ = await asyncio.wait({self._watch}, timeout=limit_s)
        if not done:
            self._say(f"did not finish within {limit_s:g} s and was ended")
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await self._watch

    async def _watching(self, process: asyncio.subprocess.Process) -> None:
        """Until the process is gone, however that comes."""
        code = await process.wait()
        if code and not (self._closing and self._warned):
            self._say(f"ended with code {code}; the end of {self._log}:\n{log_tail(self._log, lines=6)}")
        elif not code and not self._closing:
            self._say("ended by itself")

    def _say(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            with contextlib.suppress(ThundersyncError):  # a disk that is full: the next event says so
                self._warn(f"tracking by {self._name} {text}; the run goes on without it")


def _wanted(monitor: MonitorConfig) -> list[str]:
    return [name for name, wanted in (("tensorboard", monitor.tensorboard), ("wandb", bool(monitor.wandb))) if wanted]


def _finite(row: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in row.items()}


def _start(config: Config, sink: str, *, name: str, folder: Path, first_step: int) -> Start:
    return Start(
        name=name,
        folder=str(folder.absolute()),
        project=config.monitor.wandb if sink == "wandb" else "",
        config=tomllib.loads(to_toml(config)),  # as in config.toml: without what is not set
        first_step=first_step,
    )
