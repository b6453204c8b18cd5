"""The command itself: a run's folder or a configuration file in; sentences, a table, a JSON file and a picture out."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct, structs
from rich.console import Console

from thundersync.config import Config
from thundersync.config_file import load_config
from thundersync.placement import Placement, cpu_flags, place, usable_cores, visible_gpus
from thundersync.plan.model import Memory, Model, find_model, memory_of
from thundersync.plan.outlook import Outlook, look
from thundersync.plan.picture import draw
from thundersync.plan.report import show_memory, show_outlook
from thundersync.plan.runs import NothingToPlan, RecordedRun, earlier_run, read_run
from thundersync.plan.site import Site, need_gib, room_gib, site_here, site_of_run
from thundersync.plan.words import recommended, sentences, split_memory
from thundersync.rundir import write_whole


class Plan(Struct, frozen=True, kw_only=True):
    """What `--json` writes."""

    target: str
    outlook: Outlook | None
    sentences: list[str]
    memory: Memory | None
    model: Model | None
    split_memory: Memory | None = None
    """Under the split that is recommended; None: there is none, or the model is not known."""
    split_need_gib: float = 0.0
    """Of its fullest GPU; on a CPU of all processes together."""
    split_room_gib: float = 0.0
    """What the run's machine has for that; 0: not written down."""


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
    of_run = site_of_run(config, run.traces.started) if run is not None and target.is_dir() else None
    site = of_run or site_here(placement_of(config, variables))
    memory = None
    if model is not None:
        memory = memory_of(config, model, dtype=site.dtype, workers=site.workers, on_gpus=site.on_gpus)
    found = Plan(
        target=str(target),
        outlook=outlook,
        sentences=sentences(outlook) if outlook is not None else [],
        memory=memory,
        model=model,
    )
    if run is not None and outlook is not None and model is not None:
        found = _with_split(found, run, outlook, model, site)
    _show(config, found, site, console)
    if json is not None:
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


def _with_split(found: Plan, run: RecordedRun, outlook: Outlook, model: Model, site: Site) -> Plan:
    """The memory of the split that is recommended for the run's devices, and what there is for it."""
    best = recommended(outlook)
    if best is None:
        return found
    at = site_of_run(run.config, run.traces.started) or site
    memory = memory_of(run.config, model, dtype=at.dtype, workers=best.trainers, on_gpus=at.on_gpus)
    return structs.replace(
        found,
        split_memory=memory,
        split_need_gib=need_gib(run.config, memory, trainers=best.trainers, on_gpus=at.on_gpus),
        split_room_gib=room_gib(run.folder, on_gpus=at.on_gpus),
    )


def _show(config: Config, found: Plan, site: Site, console: Console) -> None:
    if found.outlook is not None:
        show_outlook(found.outlook, console)
    else:
        console.print(
            "Step time: not known before a run of this name has committed a step.", markup=False, highlight=False
        )
    console.print(f"Placement: {site.sentence}.", markup=False, highlight=False)
    if found.memory is None or found.model is None:
        text = f"Memory: not known, the files of {config.model.name} are not on this machine or do not say."
        console.print(text, markup=False, highlight=False)
    else:
        show_memory(found.memory, found.model, console, on_gpus=site.on_gpus)
    if found.split_memory is not None and found.outlook is not None:
        text = split_memory(
            found.outlook, found.split_memory, need_gib=found.split_need_gib, room_gib=found.split_room_gib
        )
        console.print(text, markup=False, highlight=False)


def _write(path: Path, data: bytes) -> None:
    try:
        write_whole(path, data)
    except OSError as error:
        raise NothingToPlan(f"{path} cannot be written: {error}", remedy="Choose another path.") from error
