"""Whole runs on a tiny random model, with tasks whose checkers draw rewards: every real part, in seconds."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from thundersync.config import Config
from thundersync.config_file import config_from

# Rewards 0, 0.5 and 1 by chance: a random model never solves a task, but its groups must have signal.
DRAWING_CHECKER = """
mkdir -p /logs/verifier
case $((RANDOM % 3)) in 0) r=0 ;; 1) r=0.5 ;; *) r=1 ;; esac
echo $r > /logs/verifier/reward.txt
"""

GLANCE_S = 0.2
"""Between two looks at a run and its processes."""


def drawing_tasks(folder: Path, count: int, *, image: str = "") -> Path:
    """Harbor tasks that anything solves with some luck; `image`: a prebuilt one for Docker."""
    prebuilt = f'[environment]\ndocker_image = "{image}"\n' if image else ""
    for index in range(count):
        task = folder / f"draw-{index}"
        (task / "environment").mkdir(parents=True)
        (task / "tests").mkdir()
        (task / "solution").mkdir()
        limits = "[agent]\ntimeout_sec = 60\n[verifier]\ntimeout_sec = 60\n"
        (task / "task.toml").write_text(f'version = "1.0"\n{limits}{prebuilt}')
        (task / "instruction.md").write_text(f"Do thing number {index}.\n")
        (task / "environment" / "Dockerfile").write_text("FROM debian:bookworm-slim\nWORKDIR /workspace\n")
        (task / "tests" / "test.sh").write_text(DRAWING_CHECKER)
        (task / "solution" / "solve.sh").write_text("true\n")
    return folder


def raw_config(folder: Path, model: Path, **changes: object) -> dict[str, object]:
    """A configuration of three small steps; `changes` are dotted keys with `__` for the dots."""
    raw: dict[str, dict[str, object] | object] = {
        "max_steps": 3,
        "seed": 7,
        "name": "run",
        "output_dir": str(folder / "runs"),
        "model": {"name": str(model), "dtype": "float32", "max_model_len": 1024},
        "algo": {"group_size": 3, "prompts_per_step": 2},
        "rollout": {"max_tokens": 12, "max_turns": 2, "timeout_s": 60},
        "optim": {"lr": 1e-2},
        "engine": {"backend": "transformers", "kv_cache_gib": 0.0625, "max_num_seqs": 8},
        "env": {"path": str(drawing_tasks(folder / "tasks", 5))},
        "sandbox": {"runtime": "process", "network": "off"},
        "ckpt": {"interval": 1},
    }
    for dotted, value in changes.items():
        table, _, key = dotted.rpartition("__")
        place = raw
        if table:
            place = raw.setdefault(table, {})  # type: ignore[assignment]
        place[key] = value  # type: ignore[index]
    return raw


def config(folder: Path, model: Path, **changes: object) -> Config:
    return config_from(raw_config(folder, model, **changes))


class Run:
    """`python -m thundersync run` as a process, with everything it starts in sight."""

    verb = "run"

    def __init__(self, folder: Path, config_file: Path, *arguments: str) -> None:
        self.folder = folder
        self.temporary = Path(tempfile.mkdtemp(prefix="ts-"))
        atexit.register(shutil.rmtree, self.temporary, ignore_errors=True)
        self.log = folder / f"stdout-{time.monotonic_ns()}.txt"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "thundersync", self.verb, str(config_file), "--plain", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A short folder for everything temporary, so that what is left behind is seen.
                env={**os.environ, "TMPDIR": str(self.temporary)},
            )
        self._seen: dict[int, psutil.Process] = {}

    @property
    def events(self) -> Path:
        return self.folder / "runs" / "run" / "events.jsonl"

    def until(self, condition: Callable[[list[dict[str, object]]], bool], *, limit_s: float = 240.0) -> None:
        """Wait until the events so far satisfy `condition`; fails when the run ends or the limit passes first."""
        deadline = time.monotonic() + limit_s
        while not condition(self.read_events()):
            self.note_children()
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended with {self.process.returncode}:\n{self.text()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {limit_s} s:\n{self.text()}")
            time.sleep(GLANCE_S)
        self.note_children()

    def read_events(self) -> list[dict[str, object]]:
        if not self.events.is_file():
            return []
        events = []
        for line in self.events.read_bytes().split(b"\n")[:-1]:
            with contextlib.suppress(json.JSONDecodeError):  # torn by a full disk: a resumed run only ends such a line
                events.append(json.loads(line))
        return events

    def note_children(self) -> None:
        """Remember every process the run has started so far."""
        try:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self._seen.setdefault(child.pid, child)
        except psutil.NoSuchProcess:
            pass

    def child(self, name: str) -> psutil.Process:
        """A live child by a word of its command line or name."""
        self.note_children()
        for process in self._seen.values():
            try:
                if name in " ".join(process.cmdline()) or name in process.name():
                    return process
            except psutil.NoSuchProcess:
                continue
        raise AssertionError(f"no child {name}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, *, limit_s: float = 180.0) -> int:
        deadline = time.monotonic() + limit_s
        while self.process.poll() is None:
            self.note_children()
            if time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(f"did not end within {limit_s} s:\n{self.text()}")
            time.sleep(GLANCE_S)
        return self.process.returncode

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def left_behind(self, *, but: str = "", limit_s: float = 10.0) -> list[str]:
        """Processes, sockets and shared memory that outlive the run; waits a moment for what dies with its parent.

        `but`: a file that is known to stay.
        """
        deadline = time.monotonic() + limit_s
        while True:
            alive = [p for p in self._seen.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
            shared = [str(p) for p in Path("/dev/shm").glob(f"thundersync-{self.process.pid}-*")]
            files = [str(p) for p in self.temporary.rglob("*")]
            sockets = [str(p) for p in (self.folder / "runs").rglob("*.sock")]
            found = [f"process {p.pid} {_name(p)}" for p in alive] + shared + files + sockets
            left = [each for each in found if Path(each).name != but]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.1)


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:120] or process.name()
    except psutil.NoSuchProcess:
        return "(gone)"


def count(events: list[dict[str, object]], kind: str) -> int:
    return sum(event["kind"] == kind for event in events)
