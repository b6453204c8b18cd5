"""A run, an evaluation or a proof from a terminal, with the panel beside it. Knows nothing of what happens inside."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from thundersync import config_checks
from thundersync.config import Config, ServeConfig
from thundersync.engine import Engine
from thundersync.evaluate.report import RESULTS
from thundersync.evaluate.tables import suite_table, task_table
from thundersync.evaluation import AgentKind, Evaluation
from thundersync.foreground import Voice, run_to_the_end
from thundersync.generate.child import pin
from thundersync.monitor.view import show
from thundersync.placement import place_here
from thundersync.tasks.rows import USUAL_SPLIT
from thundersync.verify import report
from thundersync.verify.proof import prove


def train(config: Config, *, resume: bool, plain: bool, console: Console) -> int:
    """Run to the end with a panel; returns the exit code."""

    placement = place_here(config)
    # This process and its sandboxes stay on the engines' cores: the trainer's are its own.
    pin(placement.engine_cpus)

    voice = Voice(console)

    async def work() -> None:
        engine = Engine(config, resume=resume, placement=placement, say=voice.say)
        async with engine:
            panel = Panel(str(engine.run_dir), plain=plain, console=console)
            panel.start()
            engine.on_close(panel.join)
            async for _ in engine.steps():
                pass

    return run_to_the_end(work(), console, voice=voice)


def with_endpoint(config: Config) -> Config:
    """The configuration with an endpoint, the default one if it has none. Raises: ConfigError."""
    served = msgspec.structs.replace(config, serve=config.serve or ServeConfig())
    config_checks.check(served)
    return served


def evaluate_once(
    config: Config,
    *,
    suites: Sequence[str] = (),
    split: str = USUAL_SPLIT,
    samples: int = 0,
    agent: AgentKind = "policy",
    resume: bool = False,
    plain: bool,
    console: Console,
) -> int:
    """One evaluation in a folder of its own (`eval-...`), with the same panel; prints tables, returns the exit code."""
    voice = Voice(console)

    async def work() -> None:
        evaluation = Evaluation(
            config, suites=suites, split=split, samples=samples, agent=agent, resume=resume, say=voice.say
        )
        async with evaluation:
            panel = Panel(str(evaluation.run_dir), plain=plain, console=console)
            panel.start()
            evaluation.on_close(panel.join)
            found = await evaluation.run()
        voice.close()  # its last sentence comes before the tables
        console.print(task_table(found))
        console.print(suite_table(found))
        console.print(f"{evaluation.run_dir}/{RESULTS}", markup=False, highlight=False, soft_wrap=True)

    farewell = "ending the evaluation in order; --resume goes on with it; again to force"
    return run_to_the_end(work(), console, voice=voice, farewell=farewell)


def verify_once(config: Config, *, groups: int, size: int, json: Path | None, console: Console) -> int:
    """A proof of exactness in a folder of its own (`verify-...`): prints a table, and fails if a way is not exact.

    At most `groups` x `size` rollouts are taken, whatever a step of the configuration has.
    """
    algo = config.algo
    size = min(size, algo.group_size)
    small = msgspec.structs.replace(
        algo,
        prompts_per_step=min(groups, algo.prompts_per_step),
        group_size=size,
        min_group_size=min(size, algo.min_group_size),
    )
    own = msgspec.structs.replace(
        config, name=f"verify-{config.name or 'model'}-{time.strftime('%Y%m%d-%H%M%S')}", algo=small, eval=None
    )
    voice = Voice(console)

    async def work() -> None:
        placement = place_here(own)
        async with Engine(own, placement=placement, say=voice.say) as engine:
            proof = await prove(own, engine.parts, placement, say=voice.say)
        voice.close()  # its last sentence comes before the table
        console.print(report.table(proof))
        if json is not None:
            report.write_json(proof, json)
        report.refuse_inexact(proof)

    return run_to_the_end(work(), console, voice=voice)


class Panel:
    """The monitor's own client in a thread with its own loop: what it draws cannot delay the run."""

    def __init__(self, target: str, *, plain: bool, console: Console) -> None:
        self._target, self._plain, self._console = target, plain, console
        self._thread = threading.Thread(target=self._show, name="panel", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def join(self) -> None:
        """Until it has shown the end of the run; it is given a few seconds for that."""
        await asyncio.to_thread(self._thread.join, 10.0)

    def _show(self) -> None:
        asyncio.run(show(self._target, plain=self._plain, console=self._console))
