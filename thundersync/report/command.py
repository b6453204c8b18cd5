"""`report`: the folders of runs into a page, or into a trace; and the page a run writes of itself at its end.

Reads and writes files, in whatever thread it is called; starts nothing and knows nothing of a live run's objects.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from thundersync.errors import ConfigError, ThundersyncError
from thundersync.report.page import render
from thundersync.report.record import NoRun, read_run, step_events
from thundersync.report.timeline import step_timeline
from thundersync.report.trace import write_trace
from thundersync.rundir import write_whole

NAME = "report.html"


def report_or_trace(folders: Sequence[Path], *, out: Path | None, trace: Path | None, steps: Sequence[int]) -> str:
    """The command, with `steps` as people count them, from 1; returns a sentence that says where the file is.

    Raises: NoRun, ConfigError.
    """
    steps = [step - 1 for step in steps]
    if trace is None:
        path = write_report(folders, out, steps=steps)
        return f"{path}: {path.stat().st_size / 2**20:.1f} MiB; open it in any browser"
    if len(folders) > 1 or out is not None:
        raise ConfigError("--trace takes one run, and no --out", remedy="Give one run folder and --trace FILE.")
    count = write_run_trace(folders[0], trace, steps=steps)
    return f"{trace}: {count} events; open it at ui.perfetto.dev or chrome://tracing"


def write_report(folders: Sequence[Path], out: Path | None = None, *, steps: Sequence[int] = ()) -> Path:
    """Write the page of these runs; returns where: `out`, or a file in the first run's folder. Raises: NoRun."""
    records = [read_run(folder) for folder in folders]
    twice = {name for name, count in Counter(record.name for record in records).items() if count > 1}
    for record in records:
        if record.name in twice:
            record.name = f"{record.folder.absolute().parent.name}/{record.name}"
    page = render(records, steps=steps)
    path = out or folders[0] / (NAME if len(folders) == 1 else "comparison.html")
    _write(path, page.encode())
    return path


def write_own_report(folder: Path, say: Callable[[str], None], *, limit_s: float) -> None:
    """The page that a run writes of itself at its end, if anything was learned or evaluated in it.

    Never raises: what keeps it from being written, or takes longer than `limit_s` to read, is said, and nothing else.
    """
    try:
        deadline_s = time.monotonic() + limit_s
        record = read_run(folder, deadline_s=deadline_s)
        if record.commits or record.evals:
            _write(folder / NAME, render([record], deadline_s=deadline_s).encode())
    except ThundersyncError as error:
        say(f"no {NAME} was written: {error}")
    except Exception as error:  # a page is no reason for a run to end in an error
        again = f"python -m thundersync report {folder} tries again"
        say(f"no {NAME} was written ({type(error).__name__}: {error}); {again}")


def write_run_trace(folder: Path, out: Path, *, steps: Sequence[int] = ()) -> int:
    """Write the trace of these steps, or of all of them, to `out`; returns its number of events. Raises: NoRun."""
    record = read_run(folder)
    wanted = steps or sorted(record.steps)
    if not wanted:
        raise NoRun(f"{folder} has no step to trace", remedy="A trace shows training steps; this run made none.")
    timelines = (step_timeline(step_events(record, step)) for step in wanted)
    try:
        return write_trace((timeline for timeline in timelines if timeline is not None), out)
    except OSError as error:
        raise NoRun(f"{out} cannot be written: {error}", remedy="Choose another --trace file.") from error


def _write(path: Path, data: bytes) -> None:
    try:
        write_whole(path, data)
    except OSError as error:
        raise NoRun(f"{path} cannot be written: {error}", remedy="Choose another place with --out FILE.") from error
