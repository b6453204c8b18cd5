"""Builds a run: every part is made here and handed to those that need it, cheap checks first.

The only module that imports every room. It knows how parts fit together and in which order they end; what they then do
is theirs, and what the whole is good for is `engine`'s.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import msgspec

import sandboxes
from sandboxes import Runtime
from thundersync import trainers
from thundersync.checkpoints import Checkpoints, CheckpointState
from thundersync.config import Config, EnvConfig, RolloutConfig
from thundersync.core.ready_queue import PARTS_PER_COHORT
from thundersync.core.types import FinalContent, Message, SampledTurn, Task
from thundersync.evaluation import Evaluator
from thundersync.generate.base import Generator
from thundersync.generate.shorter_context import ShorterContext
from thundersync.generate.supervised import SupervisedGenerator
from thundersync.learn.link import WorkerLink
from thundersync.learn.turn_stream import Scorer
from thundersync.machines import make_machines, start_machines
from thundersync.models import resolve_model
from thundersync.monitor.events import (
    AnyEvent,
    RolloutFailed,
    RolloutStarted,
    RunStarted,
    ScoringStarted,
    ToolFinished,
    ToolStarted,
    Warned,
)
from thundersync.monitor.feed import Feed
from thundersync.monitor.gauges import GaugeReader
from thundersync.opening import open_run
from thundersync.placement import Placement
from thundersync.refusals import refuse_long_prompts, refuse_network, refuse_overlap
from thundersync.rollout.agent import OnContent, ShellAgent
from thundersync.rollout.dialogue import Renderer
from thundersync.rollout.prompts import load_prompt
from thundersync.rollout.protocol import BASH_TOOL
from thundersync.rollout.runner import RolloutRunner
from thundersync.rollout.turns import OnTurn
from thundersync.rundir import RunFolder
from thundersync.score.reward import RewardChecker
from thundersync.score.teacher import SelfTeacher
from thundersync.score.turns import TurnScorer, held_teacher
from thundersync.step import StepDriver
from thundersync.tasks.load import load_env
from thundersync.tasks.source import TaskSource
from thundersync.teaching import longer_by, refuse_untold, teacher_paths, told_prompts
from thundersync.verify.audit import Auditor


class Parts(msgspec.Struct, kw_only=True):
    """Everything a running engine holds."""

    folder: RunFolder
    feed: Feed
    checkpoints: Checkpoints
    model_path: Path
    renderer: Renderer
    agent: ShellAgent
    generators: list[SupervisedGenerator]
    seats: Sequence[Generator]
    """The same engines as rollouts see them."""
    workers: list[WorkerLink]
    source: TaskSource
    driver: StepDriver
    gauges: GaugeReader
    evaluator: Evaluator | None
    start_step: int
    seconds: dict[str, float]

    def count(self, metrics: dict[str, float]) -> None:
        """Add a step to where the time went."""
        self.seconds["generation"] += metrics["engine_busy"] * metrics["step_s"]
        self.seconds["learning"] += metrics["trainer_busy"] * metrics["step_s"] - metrics["commit_s"]
        self.seconds["commit"] += metrics["commit_s"]
        self.seconds["publish"] += metrics["publish_s"]

    def shares(self, total_s: float) -> dict[str, float]:
        return {name: seconds / max(total_s, 1e-9) for name, seconds in self.seconds.items()}


async def build(
    config: Config,
    placement: Placement,
    resume: bool,
    say: Callable[[str], None],
    stack: AsyncExitStack,
    failed: ExitStack,
) -> Parts:
    """Cheap checks first, then what takes time; each part's end is registered before the next begins.

    `failed` is for what has to be undone only if this does not succeed.
    """
    tasks = await _tasks(config, config.env)
    source = TaskSource(tasks, prompts_per_step=config.algo.prompts_per_step, seed=config.seed)
    eval_tasks = await _tasks(config, config.eval.env) if config.eval is not None else []
    refuse_overlap(tasks, eval_tasks)
    prompt = load_prompt(config.rollout.system_prompt)
    model_path = await asyncio.to_thread(resolve_model, config.model.name, say=say)
    teachers_at = await teacher_paths(config, model_path, say=say)
    if any(teacher.privileged for teacher in config.teacher):
        await asyncio.to_thread(refuse_untold, tasks)
    docker_host = config.sandbox.docker_host or os.environ.get("DOCKER_HOST", "")
    runtime = await sandboxes.choose(config.sandbox.runtime, docker_host=docker_host)
    stack.push_async_callback(runtime.close)
    refuse_network(runtime.name, [*tasks, *eval_tasks])
    if left := await runtime.reap({}):
        say(f"removed {left} sandboxes that a dead run had left")
    opened = await open_run(config, source, resume=resume, say=say, stack=stack, failed=failed)
    folder, feed, state = opened.folder, opened.feed, opened.state
    say(f"{placement.sentence()}; {runtime.name} sandboxes: {runtime.isolation}")
    tools = _ToolCounter()

    def emit(event: AnyEvent) -> None:
        tools.see(event)
        if driver is not None and driver.stream is not None:
            driver.stream.heartbeat()
        feed.emit(event)

    driver: StepDriver | None = None
    # Before the engines: they may be forked, and a fork in the middle of another thread's import can hang.
    renderer = await asyncio.to_thread(Renderer.load, model_path, tools=[BASH_TOOL])

    def ids_of(instruction: str) -> list[int]:
        return renderer.encode(renderer.text([*prompt, Message(role="user", content=instruction)]))

    def prompt_ids(task: Task) -> list[int]:
        return ids_of(task.instruction)

    await asyncio.to_thread(refuse_long_prompts, [*tasks, *eval_tasks], prompt_ids, config.model.max_model_len)
    context_tokens, told = config.model.max_model_len, None
    if config.algo.type == "opsd":
        told = await asyncio.to_thread(told_prompts, tasks, ids_of)
        context_tokens += await asyncio.to_thread(longer_by, told, tasks, ids_of)
    machines = await make_machines(
        config,
        placement,
        model_path=model_path,
        teachers_at=teachers_at,
        context_tokens=context_tokens,
        environment=os.environ,
        logs=folder.logs,
        start_step=state.step,
        emit=emit,
        stack=stack,
    )
    generators, workers = machines.generators, machines.workers
    if machines.teachers is not None:
        machines.teachers.refuse_tasks_without_teacher(task.task_id for task in tasks)
    ready, notes = await start_machines(
        machines,
        config,
        placement,
        model_path=model_path,
        teachers_at=teachers_at,
        checkpoint=opened.checkpoint,
        say=say,
    )
    for note in notes:
        emit(Warned(at_s=time.time(), text=note))
    checker = RewardChecker(runtime=runtime)
    seats: Sequence[Generator] = generators
    if told is not None:
        seats = [ShorterContext(each, context_tokens=config.model.max_model_len) for each in generators]

    def sampled(turn: SampledTurn) -> None:
        assert driver is not None
        if machines.teachers is not None and isinstance(
            itself := machines.teachers.for_task(turn.task_id), SelfTeacher
        ):
            itself.bind(turn.policy_version)
        driver.sampled(turn)

    def content(final: FinalContent) -> None:
        assert driver is not None
        driver.content(final)

    def agent(rollout: RolloutConfig, on_turn: OnTurn | None = None, on_content: OnContent | None = None) -> ShellAgent:
        return ShellAgent(
            renderer=renderer,
            runtime=runtime,
            checker=checker,
            config=rollout,
            prompt=prompt,
            emit=emit,
            stop=rollout.stop,
            pids=config.sandbox.pids,
            labels={"thundersync.run": folder.name},
            on_turn=on_turn,
            on_content=on_content,
        )

    def runner(which: ShellAgent) -> RolloutRunner:
        return RolloutRunner(
            agent=which,
            generators=seats,
            on_failure=config.algo.on_failure,
            max_attempts=config.algo.max_attempts,
            emit=emit,
            concurrency=min(
                config.rollout.concurrency or sum(each.max_concurrency for each in generators),
                config.sandbox.max_containers,
            ),
        )

    scorer: Scorer | None = None
    if machines.teachers is not None:
        scorer = TurnScorer(
            machines.teachers,
            topk=config.teacher[0].topk,
            privileged_ids=told.__getitem__ if told is not None else None,
        )
    elif config.teacher:
        scorer = held_teacher
    auditor = None
    if config.stream.verify_every:
        auditor = Auditor(config, workers, dtype=placement.dtype, keep=folder.write_rollouts, emit=emit)
    driver = StepDriver(
        config,
        runner=runner(
            agent(
                config.rollout,
                on_turn=sampled if scorer is not None else None,
                on_content=content if config.stream.release == "content" else None,
            )
        ),
        generators=generators,
        workers=workers,
        shares_prompts=ready.shares_prompts,
        prompt_ids=prompt_ids,
        max_parts=trainers.most_parts(config, placement, parameters=ready.parameters),
        policy_version=state.policy_version,
        emit=emit,
        keep=folder.write_rollouts,
        scorer=scorer,
        auditor=auditor,
    )
    if scorer is None and config.stream.mode == "stream" and driver.max_parts < PARTS_PER_COHORT:
        text = (
            "stream.partials_gib holds no parts of an open group: backwards wait until a group's rewards are complete "
            "(exact, but with less overlap)"
        )
        emit(Warned(at_s=time.time(), text=text))
    if not ready.shares_prompts:
        emit(Warned(at_s=time.time(), text="this model cannot be cut into blocks: prompts are not shared"))
    evaluator = None
    if config.eval is not None:
        evaluated = msgspec.structs.replace(config.rollout, temperature=config.eval.temperature)
        evaluator = Evaluator(config.eval, eval_tasks, runner=runner(agent(evaluated)), emit=emit)
    gauges = GaugeReader(
        generators=generators,
        workers=workers,
        queue=lambda: (driver.stream.queued, driver.stream.parts_in_use) if driver.stream is not None else (0, 0),
        tools_running=lambda: tools.running,
        emit=feed.emit,  # not `emit`: gauges come whether or not anything moves, and must not quiet the watchdog
    )
    feed.emit(_run_started(config, folder, runtime, generators[0], state))
    assert ready.arena is not None  # the first worker's
    await driver.publish(ready.arena)  # also at the start: engines and trainer hold the same bits from the first token
    reading = asyncio.create_task(gauges.run(), name="gauges")
    stack.push_async_callback(_cancel, reading)
    return Parts(
        folder=folder,
        feed=feed,
        checkpoints=opened.checkpoints,
        model_path=model_path,
        renderer=renderer,
        agent=agent(config.rollout),
        generators=generators,
        seats=seats,
        workers=workers,
        source=source,
        driver=driver,
        gauges=gauges,
        evaluator=evaluator,
        start_step=state.step,
        seconds=dict.fromkeys(("generation", "learning", "commit", "publish", "eval"), 0.0),
    )


class _ToolCounter:
    """Rollouts with a command running now, read off the events; whatever follows a command ends it here too."""

    def __init__(self) -> None:
        self._busy: set[str] = set()

    @property
    def running(self) -> int:
        return len(self._busy)

    def see(self, event: AnyEvent) -> None:
        if isinstance(event, ToolStarted):
            self._busy.add(event.rollout_id)
        elif isinstance(event, ToolFinished | ScoringStarted | RolloutFailed | RolloutStarted):
            self._busy.discard(event.rollout_id)


def _run_started(
    config: Config, folder: RunFolder, runtime: Runtime, generator: Generator, state: CheckpointState
) -> RunStarted:
    return RunStarted(
        at_s=time.time(),
        name=folder.name,
        run_dir=str(folder.path),
        pid=os.getpid(),
        model=config.model.name,
        backend=generator.name,
        runtime=runtime.name,
        algo=config.algo.type,
        mode=config.stream.mode,
        max_steps=config.max_steps,
        start_step=state.step,
        prompts_per_step=config.algo.prompts_per_step,
        group_size=config.algo.group_size,
        seed=config.seed,
    )


async def _tasks(config: Config, env: EnvConfig) -> list[Task]:
    tasks = await asyncio.to_thread(load_env, env, variables=os.environ)
    if config.sandbox.network == "off":
        return [msgspec.structs.replace(task, network=False) for task in tasks]
    return tasks


async def _cancel(task: asyncio.Task[None]) -> None:
    """End a background task; one that had ended by an error before raises it now."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error
