"""The arms of a bench: one step each, through the step driver, runner, workers and publish of a run.

An arm is a run's `StepDriver` under another `stream.mode`, or with another crew. Knows nothing of repeats and
statistics.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, structs

from thundersync.bench.crew import Crew
from thundersync.bench.processes import Cpu, PeakMemory, Processes
from thundersync.bench.replay import ReplayAgent, Script
from thundersync.bench.watch import Timeline, Watch
from thundersync.config import BenchArm, Config
from thundersync.core.types import FinalContent, Rollout, SampledTurn, StreamMode, TaskId
from thundersync.learn import messages as m
from thundersync.monitor.events import AnyEvent
from thundersync.rollout.runner import GroupPlan, OnRollout, RolloutRunner
from thundersync.step import StepDriver

MODES: dict[BenchArm, StreamMode] = {
    "stream": "stream",
    "group": "group",
    "lazy": "lazy",
    "colocated": "lazy",
    "async": "lazy",
}
LIMITS = m.Limits(resident_parts=None, block_tokens=None)
"""As a worker was set up; it lets go of the parts that it keeps for the next step."""


class Measured(Struct, frozen=True, kw_only=True):
    """One step of one arm."""

    arm: BenchArm
    number: int
    """Which replay: the same in all arms means the same work."""
    timeline: Timeline
    metrics: dict[str, float]
    """The step's, as a run tells them."""
    cpu: Cpu
    sampled_tokens: int
    prompt_tokens: int
    """That engines were given, those in their cache included."""
    cached_tokens: int
    peak_gib: float
    """Of a trainer worker; 0 where it was not measured."""
    events: list[AnyEvent]

    @property
    def step_s(self) -> float:
        return self.timeline.step_s

    @property
    def restart_s(self) -> float:
        """From the last backward's end to the first prompt of a next step, if that began at once."""
        return self.metrics["between_s"] + self.timeline.first_prompt_s

    @property
    def engine_busy(self) -> float:
        """Share of the step with a turn in an engine."""
        return min(1.0, self.timeline.generating_s / self.step_s)


class ArmDriver:
    """Runs steps of one arm."""

    def __init__(
        self,
        arm: BenchArm,
        config: Config,
        *,
        crew: Crew,
        run: StepDriver,
        script: Script,
        emit: Callable[[AnyEvent], None],
        keep: Callable[[int, Sequence[Rollout]], Awaitable[Path]],
        processes: Processes,
        on_gpus: bool = False,
    ) -> None:
        """`run`: the run's own driver, of which all is taken that the arm does not change; `keep` as there."""
        self.arm = arm
        self.crew = crew
        self._on_gpus = on_gpus
        self._config = structs.replace(config, stream=structs.replace(config.stream, mode=MODES[arm]))
        self._script = script
        self._outside = emit
        self._processes = processes
        self._watch = Watch()
        self._memory = PeakMemory([worker.pid for worker in crew.workers])
        runner = RolloutRunner(
            agent=ReplayAgent(
                script,
                temperature=config.rollout.temperature,
                emit=self._emit,
                on_turn=self._sampled if run.scorer is not None else None,
                # The other arms wait for rewards whatever the configuration says.
                on_content=self._content if arm == "stream" and config.stream.release == "content" else None,
            ),
            generators=crew.seats,
            on_failure=config.algo.on_failure,
            max_attempts=config.algo.max_attempts,
            emit=self._emit,
            concurrency=min(
                config.rollout.concurrency or sum(each.max_concurrency for each in crew.generators),
                config.sandbox.max_containers,
            ),
        )
        self._one_step_off = OneStepOff(runner) if arm == "async" else None
        self._driver = StepDriver(
            self._config,
            runner=self._one_step_off or runner,
            generators=crew.generators,
            workers=crew.workers,
            shares_prompts=run.shares_prompts,
            prompt_ids=script.prompt_ids,
            room=run.room,
            policy_version=0,
            emit=self._emit,
            keep=keep,
            scorer=run.scorer,
        )

    async def take_over(self, policy_version: int, before: Crew | None) -> None:
        """Bring the crew to this policy version; its engines get its own workers' weights if another had them."""
        self._driver.policy_version = policy_version
        if before is not self.crew:
            await self._driver.publish(self.crew.arena)

    @property
    def policy_version(self) -> int:
        return self._driver.policy_version

    async def forget_parts(self) -> None:
        """Let the workers free the memory that earlier steps left for later ones."""
        for worker in self.crew.workers:
            await worker.call(LIMITS, m.Done, limit_s=self._config.stall_timeout_s)

    async def step(self, number: int, *, memory: bool = False) -> Measured:
        """One step, committed and published. `memory`: measure its peak, from workers that keep nothing.

        Raises what breaks a step of a run.
        """
        tasks = self._script.tasks(number)
        if self._one_step_off is not None:
            await self._one_step_off.fill(self._driver.plans(number, tasks), policy_version=self.policy_version)
            # The engines now have these prompts in their caches, and would begin the step with what it is to pay for.
            await self._driver.publish(self.crew.arena)
        if memory:
            await self.forget_parts()
            self._memory.reset()
        cpu, engines = self._processes.cpu(), self.crew.stats()
        began_s = time.time()
        result = await self._driver.run(number, tasks)
        self.crew.arena = self._driver.arena or self.crew.arena
        self.crew.committed |= not result.empty
        now = self.crew.stats()
        return Measured(
            arm=self.arm,
            number=number,
            timeline=self._watch.timeline(
                began_s=began_s, step_s=result.metrics["step_s"], workers=len(self.crew.workers)
            ),
            metrics=result.metrics,
            cpu=self._processes.cpu().since(cpu),
            sampled_tokens=now.sampled_tokens - engines.sampled_tokens,
            prompt_tokens=now.prompt_tokens - engines.prompt_tokens,
            cached_tokens=now.cached_tokens - engines.cached_tokens,
            peak_gib=self._peak_gib(result.metrics) if memory else 0.0,
            events=list(self._watch.events),
        )

    def _peak_gib(self, metrics: Mapping[str, float]) -> float:
        """Of a GPU where workers have one: they count what they allocate."""
        return metrics["trainer_memory_peak_gib"] if self._on_gpus else self._memory.gib()

    def _emit(self, event: AnyEvent) -> None:
        self._watch.see(event)
        if self._driver.stream is not None:
            self._driver.stream.heartbeat()
        self._outside(event)

    def _sampled(self, turn: SampledTurn) -> None:
        self._driver.sampled(turn)

    def _content(self, content: FinalContent) -> None:
        self._driver.content(content)


class OneStepOff:
    """In the place of the step's runner: what it hands over was generated before, and while that is learned from, it
    generates as much again, for the step after.

    What an asynchronous trainer does, and what its speed is. Nothing stale is learned here: what is handed over was
    generated under the step's own policy, off the clock, and what is generated on the clock is thrown away.
    """

    def __init__(self, runner: RolloutRunner) -> None:
        self._runner = runner
        self._held: list[Rollout] = []

    async def fill(self, groups: Sequence[GroupPlan], *, policy_version: int) -> None:
        """Generate what the next `run` hands over."""
        self._held = []
        await self._runner.run(groups, policy_version=policy_version, on_rollout=self._hold)

    async def run(
        self,
        groups: Sequence[GroupPlan],
        *,
        policy_version: int,
        on_rollout: OnRollout,
        on_retry: Callable[[Rollout], None] = lambda rollout: None,
        expected_s: Mapping[TaskId, float] | None = None,
    ) -> None:
        """As `RolloutRunner.run`."""
        held, self._held = self._held, []
        async with asyncio.TaskGroup() as both:
            for rollout in held:
                both.create_task(_land(rollout, on_rollout))
            both.create_task(self._runner.run(groups, policy_version=policy_version, on_rollout=_forget))

    async def _hold(self, rollout: Rollout) -> None:
        self._held.append(rollout)


async def _land(rollout: Rollout, on_rollout: OnRollout) -> None:
    await on_rollout(rollout)


async def _forget(rollout: Rollout) -> None:
    """For the step after, which is not run."""
