"""A tracker that fails, hangs or is missing: told once, in words, and the run does not notice."""

import asyncio
import importlib.util
import sys
from pathlib import Path

import msgspec
import pytest

from thundersync.config import MonitorConfig
from thundersync.config_file import config_from
from thundersync.errors import ConfigError
from thundersync.tracking.base import Evaluation, Finish, Metrics, Start
from thundersync.tracking.child import serve
from thundersync.tracking.tracker import BACKLOG_BYTES, TrackerProcess, refuse_missing

ROW = Metrics(step=0, at_s=0.0, row={"reward_mean": 0.5, "grad_norm": None})


def process(script: str, log: Path, warned: list[str]) -> TrackerProcess:
    """A tracker whose process runs `script`: no package is loaded, so it costs nothing to start."""
    command = [sys.executable, "-S", "-E", "-c", script]
    return TrackerProcess("made", command=command, environment={}, log=log, warn=warned.append)


async def test_a_tracker_that_breaks_is_told_once_with_the_end_of_its_log(tmp_path: Path) -> None:
    warned: list[str] = []
    tracker = process("import sys; sys.stdin.readline(); raise SystemExit('no account')", tmp_path / "log", warned)
    await tracker.start()
    tracker.tell(ROW)
    await tracker.ended()
    tracker.tell(ROW)
    await tracker.close(30.0)
    assert len(warned) == 1 and "no account" in warned[0] and "the run goes on without it" in warned[0]


async def test_a_tracker_that_hangs_at_the_end_is_ended(tmp_path: Path) -> None:
    warned: list[str] = []
    tracker = process("import time; time.sleep(1000)", tmp_path / "log", warned)
    await tracker.start()
    tracker.tell(ROW)
    await tracker.close(0.1)
    assert warned == ["tracking by made did not finish within 0.1 s and was ended; the run goes on without it"]


async def test_a_tracker_that_does_not_read_misses_rows_and_holds_nothing_up(tmp_path: Path) -> None:
    warned: list[str] = []
    tracker = process("import time; time.sleep(1000)", tmp_path / "log", warned)
    await tracker.start()
    row = Metrics(step=0, at_s=0.0, row={f"metric_{i}": 0.5 for i in range(1000)})
    for _ in range(3 * BACKLOG_BYTES // len(msgspec.json.encode(row))):
        tracker.tell(row)
    assert len(warned) == 1 and "miss rows" in warned[0]
    await tracker.close(0.0)
    assert len(warned) == 1


async def test_a_tracker_whose_program_is_missing_is_told_and_closing_is_still_fine(tmp_path: Path) -> None:
    warned: list[str] = []
    tracker = TrackerProcess(
        "made", command=["/no/such/program"], environment={}, log=tmp_path / "log", warn=warned.append
    )
    await tracker.start()
    tracker.tell(ROW)
    await asyncio.gather(tracker.close(1.0), tracker.close(1.0))
    assert len(warned) == 1 and "could not be started" in warned[0]


class Sink:
    """A tracker that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def start(self, config: dict[str, object], run: Start) -> None:
        self.told.append((config, run.first_step))

    def metrics(self, step: int, row: dict[str, float], at_s: float) -> None:
        self.told.append((step, row))

    def evaluation(self, step: int, row: dict[str, float], at_s: float) -> None:
        self.told.append(("eval", step, row))

    def finish(self) -> None:
        self.told.append("finish")


def test_the_process_passes_on_finite_numbers_and_finishes_even_without_a_goodbye() -> None:
    start = Start(name="run", folder="/f", project="", config={"max_steps": 3}, first_step=2)
    lines = [start, ROW, Evaluation(step=1, at_s=0.0, row={"reward_mean": 0.4})]
    expected = [({"max_steps": 3}, 2), (0, {"reward_mean": 0.5}), ("eval", 1, {"reward_mean": 0.4}), "finish"]
    for goodbye in ([], [Finish(), ROW]):
        sink = Sink()
        serve(sink, map(msgspec.json.encode, [*lines, *goodbye]))
        assert sink.told == expected


@pytest.mark.parametrize(("key", "value", "package"), [("tensorboard", True, "tensorboard"), ("wandb", "p", "wandb")])
def test_a_missing_package_is_refused_with_how_to_get_it(
    key: str, value: object, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = config_from({"model": {"name": "m"}, "env": {"path": "p"}, "monitor": {key: value}}).monitor
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"pip install {package}"):
        refuse_missing(monitor)
    refuse_missing(MonitorConfig())
