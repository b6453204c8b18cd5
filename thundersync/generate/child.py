"""What both engines' processes have in common: a log whose end can be told, and an end that is certain.

Knows process ids and files; nothing of models.
"""

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

POLL_S = 0.2


def log_tail(path: Path, lines: int = 12) -> str:
    """The last lines of an engine's log, indented for an error message; a word if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16384))
            last = file.read().decode(errors="replace").strip().splitlines()[-lines:]
    except OSError:
        last = []
    return "\n".join(f"    {line}" for line in last) if last else "    (its log is empty)"


def end_with_parent(parent_pid: int, *, remove: Path) -> None:
    """From now on this process removes the folder `remove` and ends at once when `parent_pid` is not its parent.

    Polled from a thread: the kernel's parent-death signal follows the *thread* that forked, and a pool's thread may
    end before its process does.
    """

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(POLL_S)
        shutil.rmtree(remove, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def pin(cpus: Sequence[int]) -> None:
    """Restrict this process and its future threads to the cores `cpus`; no restriction when empty or unsupported."""
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)


async def end_processes(processes: Sequence[psutil.Process], *, limit_s: float) -> None:
    """Kill `processes` and wait until the kernel has let them go, at most `limit_s` seconds.

    Raises: TimeoutError with their ids when some remain.
    """
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, limit_s)
    if alive:
        raise TimeoutError(f"processes {[process.pid for process in alive]} did not end within {limit_s:.0f} s")


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment plus `extra`, with this package importable wherever it was imported from."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), **extra}
