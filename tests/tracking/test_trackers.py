"""The real trackers, each in its process: what they have on disk afterwards is what they were told."""

import asyncio
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from thundersync.config import Config, EnvConfig, ModelConfig, MonitorConfig
from thundersync.monitor import events as e
from thundersync.tracking.tracker import Tracker


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def config(**monitor: object) -> Config:
    return Config(
        model=ModelConfig(name="made/model"),
        env=EnvConfig(path="starter/train"),
        monitor=MonitorConfig(**monitor),  # type: ignore[arg-type]
    )


def commit(step: int, reward: float) -> e.StepCommitted:
    metrics = {"reward_mean": reward, "grad_norm": float("nan")}
    return e.StepCommitted(at_s=1.7e9 + step, step=step, policy_version=step + 1, empty=False, metrics=metrics)


def evaluated(reward: float) -> e.EvalFinished:
    return e.EvalFinished(
        at_s=1.7e9, policy_version=0, reward_mean=reward, scored=6, failed=1, seconds=4.0, pass_at_1=reward / 2
    )


async def track(tracker: Tracker, events: list[e.Event]) -> None:
    await tracker.start()
    for event in events:
        tracker.see(event)
    await tracker.close(limit_s=120.0)


async def test_tensorboard_holds_every_finite_number_and_a_resume_replaces_what_is_made_again(run_dir: Path) -> None:
    pytest.importorskip("tensorboard")
    warned: list[str] = []
    whole = config(tensorboard=True)
    first = Tracker(whole, name="run", folder=run_dir, first_step=0, warn=warned.append)
    await track(first, [evaluated(0.2), commit(0, 0.1), commit(1, 0.3), evaluated(0.4), commit(2, 0.9)])
    resumed = Tracker(whole, name="run", folder=run_dir, first_step=2, warn=warned.append)
    await track(resumed, [commit(2, 0.5), commit(3, 0.6), evaluated(0.7)])
    assert warned == []

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = await asyncio.to_thread(lambda: EventAccumulator(str(run_dir / "tensorboard")).Reload())
    scalars = {
        tag: [(each.step, round(each.value, 4)) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]
    }
    assert scalars["train/reward_mean"] == [(1, 0.1), (2, 0.3), (3, 0.5), (4, 0.6)]
    assert scalars["eval/reward_mean"] == [(0, 0.2), (2, 0.4), (4, 0.7)]
    assert scalars["eval/pass_at_1"] == [(0, 0.1), (2, 0.2), (4, 0.35)]
    assert "train/grad_norm" not in scalars
    assert found.Tags()["tensors"] == ["config"]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in [name for name in os.environ if name.startswith("WANDB_") and name != "WANDB_MODE"]:
        monkeypatch.delenv(name)
    yield


async def test_wandb_offline_keeps_the_run_in_its_folder_under_an_id_that_a_resume_finds(
    run_dir: Path, offline: None
) -> None:
    pytest.importorskip("wandb")
    warned: list[str] = []
    tracker = Tracker(config(wandb="shell agents"), name="run", folder=run_dir, first_step=0, warn=warned.append)
    await track(tracker, [evaluated(0.2), commit(0, 0.1), commit(1, 0.3)])
    assert warned == []
    (stored,) = (run_dir / "wandb").glob("offline-run-*/run-*.wandb")
    assert (run_dir / "wandb" / "run-id.txt").read_text() == stored.stem.removeprefix("run-")

    records = await asyncio.to_thread(stored_records, stored)
    history = [
        {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    told = [{key: value for key, value in row.items() if not key.startswith("_")} for row in history]
    assert told[0]["eval/reward_mean"] == "0.2" and told[0]["step"] == "0"
    assert told[0]["eval/pass_at_1"] == "0.1"
    assert told[1:] == [{"step": "1", "train/reward_mean": "0.1"}, {"step": "2", "train/reward_mean": "0.3"}]
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name) == ("shell agents", "run")
    assert any(update.key == "max_steps" for update in run.config.update)


def stored_records(path: Path) -> list[Any]:
    """The records of wandb's file: LevelDB's log (blocks of 32 KiB, records in parts) after 7 bytes of its own."""
    from wandb.proto import wandb_internal_pb2

    data, at, records, part = path.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # no header fits: padding
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(wandb_internal_pb2.Record.FromString(part))
            part = b""
    return records
