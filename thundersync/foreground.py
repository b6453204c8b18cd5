"""A command in a terminal: its event loop, what Ctrl-C does, and how errors are told.

The first Ctrl-C (or SIGTERM, or a closed terminal) ends the command in order; a second one stops waiting: every child
process dies with this one. Knows nothing of what commands do, and imports little: a monitor starts on the run's cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from queue import SimpleQueue
from typing import Any

import uvloop
from rich.console import Console

from thundersync.errors import ThundersyncError

INTERRUPTED = 130
FORCED = 137


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


def check(work: Callable[[], int], console: Console) -> int:
    """Run plain code; known errors become a line with a remedy."""
    try:
        return work()
    except ThundersyncError as error:
        return _tell(error, console)


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
