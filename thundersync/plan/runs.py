"""A run's folder -> its configuration and the traces of its steps."""

import contextlib
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from thundersync.config import Config
from thundersync.errors import ThundersyncError
from thundersync.forecast.recorded import RunTraces, read_traces
from thundersync.forecast.trace import StepTrace
from thundersync.monitor.events import AnyEvent, from_line
from thundersync.plan.model import find_model
from thundersync.plan.site import recorded_dtype
from thundersync.recipe import objective_of

EVENTS, CONFIG = "events.jsonl", "config.toml"


class NothingToPlan(ThundersyncError):
    """There is no configuration and no usable step where one was named."""


class RecordedRun(Struct, frozen=True, kw_only=True):
    """What a folder tells of a run."""

    folder: Path
    config: Config
    traces: RunTraces
    warmup: int
    """Leading steps that `steps` leaves out."""

    @property
    def steps(self) -> list[StepTrace]:
        """To forecast from: the first tenth is warm-up, at least one, unless there are only one or two."""
        return self.traces.steps[self.warmup :]


def read_run(folder: Path) -> RecordedRun:
    """Raises: NothingToPlan, saying why and what to do."""
    config = _config(folder)
    traces = read_traces(_events(folder / EVENTS), rules(config))
    if not traces.steps:
        why = f": {'; '.join(traces.left_out[:3])}" if traces.left_out else ", it committed none"
        raise NothingToPlan(
            f"{folder} has no step to forecast from{why}",
            remedy="Let a run commit a step or more in which a group's rewards differ (stream.verify_every = 0), then "
            "plan again; a configuration alone, `plan CONFIG`, tells the memory it needs.",
        )
    if (model := find_model(config)) is not None:
        started = traces.started
        allowed = model.parts_allowed(
            config,
            dtype=recorded_dtype(config, started),
            workers=max(1, started.trainer_workers) if started is not None else 1,
            on_gpus=started is not None and started.on_gpus,
        )
        steps = [structs.replace(step, room=allowed.room) for step in traces.steps]
        traces = structs.replace(traces, steps=steps)
    count = len(traces.steps)
    return RecordedRun(
        folder=folder, config=config, traces=traces, warmup=max(1, round(count / 10)) if count > 2 else 0
    )


def earlier_run(config: Config) -> RecordedRun | None:
    """The newest run of this configuration's name that has a usable step; without a name, of its model."""
    output = Path(config.output_dir)
    folders = [output / config.name] if config.name else sorted(output.glob("*/"), key=_age)
    for folder in folders:
        with contextlib.suppress(NothingToPlan):
            found = read_run(folder)
            if config.name or found.config.model.name == config.model.name:
                return found
    return None


def rules(config: Config) -> StepTrace:
    """What holds for every step of the configuration, as a trace without rollouts."""
    algo = config.algo
    return StepTrace(
        rollouts=[],
        commit_s=0.0,
        publish_s=0.0,
        turns_stream=config.stream.turns != "deferred",
        max_tokens=config.trainer.micro_batch_tokens,
        longest=config.model.max_model_len,
        objective=objective_of(config),
        min_group_size=algo.group_size if algo.on_failure == "drop" else algo.min_group_size,
        skip_flat=algo.zero_variance == "skip",
        holds=config.stream.release == "content",
    )


def _config(folder: Path) -> Config:
    """Read without the checks of a run that is to start: an old run may break a newer rule and still be told of."""
    try:
        return msgspec.convert(tomllib.loads((folder / CONFIG).read_text(encoding="utf-8")), Config)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise NothingToPlan(
            f"{folder} holds no run that can be read: {CONFIG}: {error}",
            remedy=f"Name the folder of a run, one with {CONFIG} and {EVENTS} in it (ls {shlex.quote(str(folder))}), "
            "or a configuration file.",
        ) from error


def _events(path: Path) -> Iterator[AnyEvent]:
    """Torn lines, as a killed run leaves them, and unknown kinds are left out."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            with contextlib.suppress(msgspec.DecodeError):
                event = from_line(line)
                if event is not None:
                    yield event


def _age(folder: Path) -> float:
    file = folder / EVENTS
    return -file.stat().st_mtime if file.is_file() else 0.0
