"""A run from a terminal: the event loop, the panel beside it, and what Ctrl-C does.

The first Ctrl-C (or SIGTERM, or a closed terminal) ends the run in order; a second one stops waiting: every child
process dies with this one. Knows nothing of what happens inside a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import uvloop
from rich.console import Console

from thundersync import config_checks
from thundersync.config import Config, ServeConfig
from thundersync.engine import Engine
from thundersync.errors import ThundersyncError
from thundersync.evaluate.report import RESULTS
from thundersync.evaluate.tables import suite_table, task_table
from thundersync.evaluation import AgentKind, Evaluation
from thundersync.generate.child import pin
from thundersync.monitor.view import show
from thundersync.placement import place_here
from thundersync.tasks.rows import USUAL_SPLIT
from thundersync.verify import report
from thundersync.verify.proof import prove

INTERRUPTED = 130
FORCED = 137


def train(config: Config, *, resume: bool, plain: bool, console: Console) -> int:
    """Run to the end with a panel; returns the exit code."""

    placement = place_here(config)
    # This process and its sandboxes stay on the engines' cores: the trainer's are its own.
    pin(placement.engine_cpus)

    voice = Voice(console)

    async def work() -> None:
        engine = Engine(config, resume=resume, placement=placement, say=voice.say)
        async with engine:
            panel = Panel(str(engine.run_dir), plain=plain, console=console)
            panel.start()
            engine.on_close(panel.join)
            async for _ in engine.steps():
                pass

    return run_to_the_end(work(), console, voice=voice)


def with_endpoint(config: Config) -> Config:
    """The configuration with an endpoint, the default one if it has none. Raises: ConfigError."""
    served = msgspec.structs.replace(config, serve=config.serve or ServeConfig())
    config_checks.check(served)
    return served


def evaluate_once(
    config: Config,
    *,
    suites: Sequence[str] = (),
    split: str = USUAL_SPLIT,
    samples: int = 0,
    agent: AgentKind = "policy",
    resume: bool = False,
    plain: bool,
    console: Console,
) -> int:
    """One evaluation in a folder of its own (`eval-...`), with the same panel; prints tables, returns the exit code."""
    voice = Voice(console)

    async def work() -> None:
        evaluation = Evaluation(
            config, suites=suites, split=split, samples=samples, agent=agent, resume=resume, say=voice.say
        )
        async with evaluation:
            panel = Panel(str(evaluation.run_dir), plain=plain, console=console)
            panel.start()
            evaluation.on_close(panel.join)
            found = await evaluation.run()
        voice.close()  # its last sentence comes before the tables
        console.print(task_table(found))
        console.print(suite_table(found))
        console.print(f"{evaluation.run_dir}/{RESULTS}", markup=False, highlight=False, soft_wrap=True)

    farewell = "ending the evaluation in order; --resume goes on with it; again to force"
    return run_to_the_end(work(), console, voice=voice, farewell=farewell)


def verify_once(config: Config, *, groups: int, size: int, json: Path | None, console: Console) -> int:
    """A proof of exactness in a folder of its own (`verify-...`): prints a table, and fails if a way is not exact.

    At most `groups` x `size` rollouts are taken, whatever a step of the configuration has.
    """
    algo = config.algo
    size = min(size, algo.group_size)
    small = msgspec.structs.replace(
        algo,
        prompts_per_step=min(groups, algo.prompts_per_step),
        group_size=size,
        min_group_size=min(size, algo.min_group_size),
    )
    own = msgspec.structs.replace(
        config, name=f"verify-{config.name or 'model'}-{time.strftime('%Y%m%d-%H%M%S')}", algo=small, eval=None
    )
    voice = Voice(console)

    async def work() -> None:
        placement = place_here(own)
        async with Engine(own, placement=placement, say=voice.say) as engine:
            proof = await prove(own, engine.parts, placement, say=voice.say)
        voice.close()  # its last sentence comes before the table
        console.print(report.table(proof))
        if json is not None:
            report.write_json(proof, json)
        report.refuse_inexact(proof)

    return run_to_the_end(work(), console, voice=voice)


class Voice:
    """Lines to the terminal from a thread of their own: one that is closed or stopped delays nothing."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._speak, name="voice", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        self._lines.put(text)

    def close(self) -> None:
        """Let it finish its sentences, for a moment. Idempotent."""
        self._lines.put(None)
        self._thread.join(2.0)

    def _speak(self) -> None:
        while (text := self._lines.get()) is not None:
            with contextlib.suppress(OSError, SystemExit):
                self._console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


class Panel:
    """The monitor's own client in a thread with its own loop: what it draws cannot delay the run."""

    def __init__(self, target: str, *, plain: bool, console: Console) -> None:
        self._target, self._plain, self._console = target, plain, console
        self._thread = threading.Thread(target=self._show, name="panel", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def join(self) -> None:
        """Until it has shown the end of the run; it is given a few seconds for that."""
        await asyncio.to_thread(self._thread.join, 10.0)

    def _show(self) -> None:
        asyncio.run(show(self._target, plain=self._plain, console=self._console))


def run_to_the_end(
    work: Coroutine[Any, Any, None],
    console: Console,
    *,
    voice: Voice | None = None,
    farewell: str = "ending the run in order; again to force",
) -> int:
    """Run `work` on a uvloop, with the signals handled; returns the exit code and prints errors with their remedies."""
    voice = voice or Voice(console)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_guarded(work, console, voice, farewell))
    finally:
        voice.close()


async def _guarded(work: Coroutine[Any, Any, None], console: Console, voice: Voice, farewell: str) -> int:
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(work, name="run")
    stopping = False

    def stop(name: str) -> None:
        nonlocal stopping
        if stopping:
            os._exit(FORCED)  # children watch their parent and end with it
        stopping = True
        task.cancel()  # first: the terminal may be gone
        voice.say(f"{name}: {farewell}")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop, number.name)
    try:
        await task
    except asyncio.CancelledError:
        return INTERRUPTED
    except BaseException as error:
        voice.close()
        with contextlib.suppress(OSError):  # a terminal that is gone
            return _tell(error, console)
        return 1
    return 0


def _tell(error: BaseException, console: Console) -> int:
    """Every distinct cause once, in plain words; anything unexpected with its traceback."""
    causes = [_named(cause) for cause in _leaves(error)]
    known = [cause for cause in causes if isinstance(cause, ThundersyncError) or hasattr(cause, "remedy")]
    for text in dict.fromkeys(str(cause) for cause in known):
        console.print("[bold red]error:[/] ", end="")
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    if len(known) < len(causes):
        sys.excepthook(type(error), error, error.__traceback__)
    return 1


def _named(error: BaseException) -> BaseException:
    """A full disk is met wherever something is written."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ThundersyncError(str(error), remedy="Free space on that disk, then continue with --resume.")
    return error


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def check(work: Callable[[], int], console: Console) -> int:
    """Run plain code; known errors become a line with a remedy."""
    try:
        return work()
    except ThundersyncError as error:
        return _tell(error, console)
