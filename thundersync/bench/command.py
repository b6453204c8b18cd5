"""`python -m thundersync bench`: a run's processes, the arms measured, tables, a JSON file and a picture."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
from rich.console import Console

from thundersync.bench import chart, report
from thundersync.bench.pairs import engine_devices, pairs_of
from thundersync.bench.processes import machine
from thundersync.bench.protocol import Bench, fitted
from thundersync.bench.replay import replayed_task
from thundersync.bench.results import results_of
from thundersync.bench.workload import workload_of, write
from thundersync.config import DISTILLING, Config
from thundersync.engine import Engine
from thundersync.errors import ConfigError
from thundersync.foreground import Voice, run_to_the_end
from thundersync.generate.child import pin
from thundersync.generate.manifest import read_manifest
from thundersync.models import base_of
from thundersync.placement import place_here
from thundersync.plan.runs import rules
from thundersync.sizes import parameters


def bench_once(
    config: Config, *, json: Path | None, picture: Path | None, record: Path | None, console: Console
) -> int:
    """Measure the arms of `config` in a folder of its own (`bench-...`); returns the exit code.

    `json`, `picture` and `record` are files for the results, the chart and the workload. Raises: ConfigError.
    """
    if config.algo.type == "opsd":
        raise ConfigError(
            'algo.type = "opsd" cannot be replayed: its teacher is shown solutions, and made-up tokens have none',
            remedy='Measure algo.type = "opd" with a teacher of the same size.',
        )
    if config.algo.type in DISTILLING and config.bench is not None and "colocated" in config.bench.arms:
        raise ConfigError(
            f'the colocated arm learns from rewards; algo.type = "{config.algo.type}" has a teacher beside the engines',
            remedy="Leave it out of bench.arms.",
        )
    workload = workload_of(config)
    if record is not None:
        write(workload, record)
    name = f"bench-{config.name or 'model'}-{time.strftime('%Y%m%d-%H%M%S')}"
    own = msgspec.structs.replace(fitted(config, workload), name=name)
    placement, here = place_here(own), machine()
    pin(placement.engine_cpus)
    voice = Voice(console)

    async def work() -> None:
        voice.say(f"work: {workload.sentence()}; {workload.source}")
        tasks = [replayed_task(f"bench-{index}") for index in range(workload.prompts_per_step)]
        async with Engine(own, tasks=tasks, agent=_nobody, placement=placement, say=voice.say) as engine:
            parts = engine.parts
            measured = await Bench(own, parts, placement, workload, say=voice.say).run()
            shapes = read_manifest(base_of(parts.model_path)).shapes
            limits = msgspec.structs.replace(
                rules(own),
                workers=len(parts.workers),
                engines=engine_devices(placement, len(parts.generators)),
                room=parts.driver.room,
            )
        results = results_of(
            measured,
            pairs_of(measured.steps, limits),
            workload,
            name=name,
            model=own.model.name,
            parameters=parameters(shapes),
            machine=here,
            placement=placement.sentence(),
            distils=own.algo.type in DISTILLING,
        )
        voice.close()
        console.print(report.tables(results))
        if json is not None:
            report.write_json(results, json)
        if picture is not None:
            report.write(picture, chart.draw(results, measured.steps).encode(), "--chart")

    return run_to_the_end(work(), console, voice=voice)


async def _nobody(task: object, policy: object, sandbox: object) -> None:
    """In the place of the run's agent: a bench has its own for each arm, and no sandboxes."""
