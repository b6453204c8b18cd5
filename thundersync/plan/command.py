"""The command itself: a run's folder or a configuration file in; sentences, a table, a JSON file and a picture out."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.console import Console

from thundersync.config import Config
from thundersync.config_file import load_config
from thundersync.placement import Placement, cpu_flags, place, usable_cores, visible_gpus
from thundersync.plan.model import Memory, Model, find_model, memory_of
from thundersync.plan.outlook import Outlook, look
from thundersync.plan.picture import draw
from thundersync.plan.report import show_memory, show_outlook
from thundersync.plan.runs import NothingToPlan, RecordedRun, earlier_run, read_run
from thundersync.plan.words import sentences
from thundersync.rundir import write_whole


class Plan(Struct, frozen=True, kw_only=True):
    """What `--json` writes."""

    target: str
    outlook: Outlook | None
    sentences: list[str]
    memory: Memory | None
    model: Model | None


def plan(
    target: Path, *, json: Path | None, picture: Path | None, variables: Mapping[str, str], console: Console
) -> int:
    """Returns the exit code. `variables`: the environment. Raises: NothingToPlan, ConfigError."""
    run: RecordedRun | None
    if target.is_dir():
        run = read_run(target)
        config = run.config
    elif target.is_file():
        config = load_config(target)
        run = earlier_run(config)
    else:
        raise NothingToPlan(
            f"there is neither a configuration file nor a run's folder {target}",
            remedy="Give a file such as configs/quickstart.toml, or a folder such as runs/NAME.",
        )
    outlook = look(run) if run is not None else None
    model = find_model(config)
    placement = placement_of(config, variables)
    memory = None
    if model is not None:
        memory = memory_of(
            config, model, dtype=placement.dtype, workers=len(placement.trainers), on_gpus=placement.on_gpus
        )
    _show(config, outlook, memory, model, placement, console)
    if json is not None:
        told = sentences(outlook) if outlook is not None else []
        found = Plan(target=str(target), outlook=outlook, sentences=told, memory=memory, model=model)
        _write(json, msgspec.json.format(msgspec.json.encode(found)) + b"\n")
        console.print(f"written: {json}", markup=False, highlight=False)
    if picture is not None:
        if run is None or outlook is None:
            raise NothingToPlan(
                f"{target} has no steps to draw", remedy="Draw a run's folder once it has committed a step."
            )
        _write(picture, draw(run.steps, outlook).encode())
        console.print(f"drawn: {picture}", markup=False, highlight=False)
    return 0


def placement_of(config: Config, variables: Mapping[str, str]) -> Placement:
    """As it would be here; GPUs and cores that the configuration names are taken as given, since a plan may be made on
    another machine than the run. Raises: ConfigError when they contradict each other."""
    teachers = config.teacher
    gpus = {*config.engine.gpus, *config.trainer.gpus, *(gpu for teacher in teachers for gpu in teacher.gpus)}
    cpus = {*config.engine.cpus, *config.trainer.cpus, *(cpu for teacher in teachers for cpu in teacher.cpus)}
    return place(
        config,
        cores=sorted({*usable_cores(), *cpus}),
        gpus=sorted({*visible_gpus(variables), *gpus}),
        cpu_flags=cpu_flags(),
    )


def _show(
    config: Config,
    outlook: Outlook | None,
    memory: Memory | None,
    model: Model | None,
    placement: Placement,
    console: Console,
) -> None:
    if outlook is not None:
        show_outlook(outlook, console)
    else:
        console.print(
            "Step time: not known before a run of this name has committed a step.", markup=False, highlight=False
        )
    console.print(f"Placement: {placement.sentence()}.", markup=False, highlight=False)
    if memory is None or model is None:
        text = f"Memory: not known, the files of {config.model.name} are not on this machine or do not say."
        console.print(text, markup=False, highlight=False)
    else:
        show_memory(memory, model, console, on_gpus=placement.on_gpus)


def _write(path: Path, data: bytes) -> None:
    try:
        write_whole(path, data)
    except OSError as error:
        raise NothingToPlan(f"{path} cannot be written: {error}", remedy="Choose another path.") from error
