"""The protocol of a bench: warm-up steps, then the arms in turns, each repeat on the same work.

Takes a running engine's parts, gives `Results`. What an arm is, is `arms`' business; nothing is trained that anyone
keeps.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack

import msgspec
from msgspec import Struct

from thundersync.assembly import Parts
from thundersync.bench.arms import ArmDriver, Measured
from thundersync.bench.crew import Crew, colocated_crew, own_crew
from thundersync.bench.processes import Processes
from thundersync.bench.replay import Script
from thundersync.bench.statistics import turns_taken
from thundersync.bench.workload import Workload
from thundersync.config import BenchArm, BenchConfig, Config
from thundersync.generate.manifest import read_manifest
from thundersync.models import base_of
from thundersync.placement import Placement


class Measurements(Struct, frozen=True, kw_only=True):
    """What a bench measured."""

    steps: dict[BenchArm, list[Measured]]
    """In order of replay."""
    lag_s: dict[BenchArm, float]
    """The event loop's worst moment in any measured step."""
    peak_gib: dict[BenchArm, float]
    """Of a trainer worker, in the last warm-up step."""


class Bench:
    """Measures the arms of one configuration, on one workload, with one set of processes."""

    def __init__(
        self, config: Config, parts: Parts, placement: Placement, workload: Workload, *, say: Callable[[str], None]
    ) -> None:
        self._config = config
        self._bench = config.bench or BenchConfig()
        self._parts = parts
        self._placement = placement
        self._workload = workload
        self._say = say
        self._drivers: dict[BenchArm, ArmDriver] = {}
        self._crew: Crew | None = None
        """Whose weights the engines have."""
        self._version = parts.driver.policy_version

    async def run(self) -> Measurements:
        """Raises what breaks a step of a run."""
        async with AsyncExitStack() as stack:
            await self._hire(stack)
            arms = list(self._bench.arms)
            peak_gib = await self._warm_up(arms)
            for driver in self._drivers.values():
                await driver.forget_parts()
            return await self._measure(arms, peak_gib)

    async def _warm_up(self, arms: list[BenchArm]) -> dict[BenchArm, float]:
        """The peak memory of each arm, in its last warm-up step.

        No worker's first commit is in it: Adam's moments exist from that commit on, and the arm that happened to make
        them would pass through its step without what all later ones hold.
        """
        last = self._bench.warmup - 1
        for number in range(last):
            for arm in arms:
                self._say(f"warming up: {arm}")
                await self._step(arm, number)
        peak_gib: dict[BenchArm, float] = {}
        for arm in arms:
            self._say(f"warming up: {arm}")
            if not self._drivers[arm].crew.committed:
                await self._step(arm, last)
            peak_gib[arm] = (await self._step(arm, last, memory=True)).peak_gib
        return peak_gib

    async def _measure(self, arms: list[BenchArm], peak_gib: dict[BenchArm, float]) -> Measurements:
        steps: dict[BenchArm, list[Measured]] = defaultdict(list)
        lag_s: dict[BenchArm, float] = defaultdict(float)
        for repeat, order in enumerate(turns_taken(arms, self._bench.repeats)):
            for arm in order:
                self._parts.gauges.take_lag()
                step = await self._step(arm, self._bench.warmup + repeat)
                lag_s[arm] = max(lag_s[arm], self._parts.gauges.take_lag())
                steps[arm].append(step)
                self._say(f"repeat {repeat + 1} of {self._bench.repeats}: {arm} {step.step_s:.2f} s")
        return Measurements(steps={arm: steps[arm] for arm in arms}, lag_s=dict(lag_s), peak_gib=peak_gib)

    async def _step(self, arm: BenchArm, number: int, *, memory: bool = False) -> Measured:
        driver = self._drivers[arm]
        await driver.take_over(self._version, self._crew)
        self._crew = driver.crew
        step = await driver.step(number, memory=memory)
        self._version = driver.policy_version
        return step

    async def _hire(self, stack: AsyncExitStack) -> None:
        """A driver for each arm, on the crew that it needs."""
        emit = self._parts.feed.emit
        own = self._crew = own_crew(self._parts)
        crews: dict[BenchArm, Crew] = {}
        if "colocated" in self._bench.arms:
            crews["colocated"] = await colocated_crew(
                self._config, self._parts, self._placement, emit=emit, say=self._say, stack=stack
            )
        trainers = [worker.pid for crew in (own, *crews.values()) for worker in crew.workers]
        shapes = (await asyncio.to_thread(read_manifest, base_of(self._parts.model_path))).shapes
        script = Script(self._workload, vocabulary=_vocabulary(shapes), seed=self._config.seed)
        self._drivers = {
            arm: ArmDriver(
                arm,
                self._config,
                crew=crews.get(arm, own),
                run=self._parts.driver,
                script=script,
                emit=emit,
                keep=self._parts.folder.write_rollouts,
                processes=Processes(trainers),
                on_gpus=self._placement.on_gpus,
            )
            for arm in self._bench.arms
        }


def fitted(config: Config, workload: Workload) -> Config:
    """The configuration with the workload's numbers of groups and rollouts, without evaluation and sandboxes."""
    algo = msgspec.structs.replace(
        config.algo,
        prompts_per_step=workload.prompts_per_step,
        group_size=workload.group_size,
        min_group_size=min(config.algo.min_group_size, workload.group_size),
    )
    sandbox = msgspec.structs.replace(config.sandbox, runtime="none")
    return msgspec.structs.replace(config, algo=algo, eval=None, sandbox=sandbox)


def _vocabulary(shapes: Mapping[str, Sequence[int]]) -> int:
    """Rows of the token embedding; of a model that calls it otherwise, of its tallest matrix."""
    tall = {name: shape[0] for name, shape in shapes.items() if len(shape) == 2}
    return next((rows for name, rows in tall.items() if "embed_tokens" in name), max(tall.values()))
