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
from sandboxes import Pool, Runtime
from sandboxes.base import isolation_of
from thundersync import trainers
from thundersync.agents import Agents
from thundersync.ahead import Ahead, sandbox_gauge
from thundersync.checkpoints import Checkpoints, CheckpointState
from thundersync.config import Config, EnvConfig
from thundersync.core.objective import SeparableObjective
from thundersync.core.types import FinalContent, SampledTurn, Task
from thundersync.endpoint import Door, open_door, refuse_missing_parser
from thundersync.environments import with_environments
from thundersync.evaluate.evaluator import Evaluator
from thundersync.generate.base import Generator
from thundersync.generate.manifest import read_manifest
from thundersync.generate.shorter_context import ShorterContext
from thundersync.generate.supervised import SupervisedGenerator
from thundersync.learn.link import WorkerLink
from thundersync.learn.turn_stream import Scorer
from thundersync.live import LiveRollouts
from thundersync.machines import Machines, make_machines, start_machines
from thundersync.models import base_of, resolve_model
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
from thundersync.own import Own
from thundersync.placement import Placement
from thundersync.refusals import refuse_long_prompts, refuse_network, refuse_overlap
from thundersync.rollout.agent import ShellAgent
from thundersync.rollout.dialogue import Renderer
from thundersync.rollout.manners import Manners, OnePrompt
from thundersync.rollout.runner import Agent
from thundersync.rollout.without_sandboxes import WithoutSandboxes
from thundersync.rundir import RunFolder
from thundersync.score.teacher import SelfTeacher
from thundersync.score.turns import TurnScorer, held_teacher
from thundersync.sizes import decoder_in
from thundersync.step import StepDriver
from thundersync.tasks.load import load_env
from thundersync.tasks.own import source_of
from thundersync.tasks.source import TaskSource
from thundersync.teaching import longer_by, refuse_untold, teacher_paths, told_prompts
from thundersync.tracking.tracker import Tracker, refuse_missing
from thundersync.verify.audit import Auditor


class Parts(msgspec.Struct, kw_only=True):
    """Everything a running engine holds."""

    folder: RunFolder
    feed: Feed
    checkpoints: Checkpoints
    model_path: Path
    renderer: Renderer
    agent: Agent
    generators: list[SupervisedGenerator]
    pool: Pool
    seats: Sequence[Generator]
    """The same engines as rollouts see them."""
    workers: list[WorkerLink]
    source: TaskSource
    driver: StepDriver
    gauges: GaugeReader
    evaluator: Evaluator | None
    start_step: int
    seconds: dict[str, float]
    objective: SeparableObjective | None = None
    """Of the program that embeds the engine; None: the configuration's."""

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
    own: Own | None = None,
) -> Parts:
    """Cheap checks first, then what takes time; each part's end is registered before the next begins.

    `failed` is for what has to be undone only if this does not succeed. `own` is what the program that embeds the
    engine puts in the place of parts.
    """
    own = await with_environments(own or Own(), config, stack)
    own.check(config)
    refuse_missing(config.monitor)
    if own.agent is None:
        refuse_missing_parser(config.serve)
    if own.eval_tasks is not None:
        eval_tasks = within(config, own.eval_tasks)
    else:
        eval_tasks = await load_tasks(config, config.eval.env, say=say) if config.eval is not None else []

    def accept(given: Sequence[Task]) -> list[Task]:
        """Tasks of the program's own, as they are worked; those that cannot be are refused when they are known."""
        own.check_tasks(given, runtime.name if runtime is not None else "")
        refuse_overlap(given, eval_tasks)
        if runtime is not None:
            refuse_network(runtime.name, within(config, given))
            if machines is not None and machines.teachers is not None:
                machines.teachers.refuse_tasks_without_teacher(task.task_id for task in given)
        return within(config, given)

    def warn(text: str) -> None:
        emit(Warned(at_s=time.time(), text=text))

    runtime: Runtime | None = None
    machines: Machines | None = None
    size = config.algo.prompts_per_step
    if own.tasks is not None:
        source = source_of(own.tasks, prompts_per_step=size, seed=config.seed, accept=accept)
        tasks = source.tasks
    else:
        tasks = await load_tasks(config, config.env, say=say)
        source = TaskSource(tasks, prompts_per_step=size, seed=config.seed)
        refuse_overlap(tasks, eval_tasks)
    if own.agent is None:
        manners = Manners(config.rollout)
    else:
        manners = OnePrompt(own.prompt(config), limit_chars=config.rollout.output_limit_chars)
    model_path = await asyncio.to_thread(resolve_model, config.model.name, say=say)
    teachers_at = await teacher_paths(config, model_path, say=say)
    if any(teacher.privileged for teacher in config.teacher):
        await asyncio.to_thread(refuse_untold, tasks)
    runtime = pool = await open_pool(config, say=say, warn=warn, stack=stack)
    refuse_network(runtime.name, [*tasks, *eval_tasks])
    opened = await open_run(config, source, resume=resume, say=say, stack=stack, failed=failed)
    folder, feed, state = opened.folder, opened.feed, opened.state
    tracker = Tracker(
        config,
        name=folder.name,
        folder=folder.path,
        first_step=state.step,
        warn=lambda text: feed.emit(Warned(at_s=time.time(), text=text)),
    )
    stack.push_async_callback(tracker.close)
    await tracker.start()
    if opened.checkpoint:
        source.restore(state.tasks_state)
    if own.on_event is not None:
        feed.listen(own.on_event)
    say(f"{placement.sentence()}; {isolation_of(runtime)}")
    tools = ToolCounter()

    def emit(event: AnyEvent) -> None:
        tools.see(event)
        tracker.see(event)
        if ahead is not None:
            ahead.see(event)
        if door is not None:
            door.heartbeat()
        if driver is not None and driver.stream is not None:
            driver.stream.heartbeat()
        feed.emit(event)

    driver: StepDriver | None = None
    ahead: Ahead | None = None
    door: Door | None = None
    # Before the engines: they may be forked, and a fork in the middle of another thread's import can hang.
    declared = manners.tools if own.agent is None else []  # an agent function says itself what the model may call
    renderer = await asyncio.to_thread(Renderer.load, model_path, tools=declared)

    if config.serve is not None and own.agent is None:
        door = await open_door(
            config,
            config.serve,
            folder=folder.path,
            model_path=model_path,
            renderer=renderer,
            environment=os.environ,
            say=say,
            # Not `emit`: a warning must not quiet the watchdog.
            warn=lambda text: feed.emit(Warned(at_s=time.time(), text=text)),
        )
        stack.push_async_callback(door.close)

    def prompt_ids(task: Task) -> list[int]:
        # What an outside agent shows the model first is known when it does so (`StepDriver.opening`).
        return renderer.encode(renderer.text(manners.opening(task))) if door is None else []

    if own.agent is None and door is None:  # others may show the model less than the instruction
        await asyncio.to_thread(refuse_long_prompts, [*tasks, *eval_tasks], prompt_ids, config.model.max_model_len)
    context_tokens, told = config.model.max_model_len, None
    if config.algo.type == "opsd":
        told = await asyncio.to_thread(told_prompts, tasks, prompt_ids)
        context_tokens += await asyncio.to_thread(longer_by, told, tasks, prompt_ids)
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
    shapes = (await asyncio.to_thread(read_manifest, base_of(model_path))).shapes
    ready, notes = await start_machines(
        machines,
        config,
        placement,
        model_path=model_path,
        shapes=shapes,
        teachers_at=teachers_at,
        checkpoint=opened.checkpoint,
        say=say,
        objective=own.objective,
    )
    for note in notes:
        emit(Warned(at_s=time.time(), text=note))
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

    def opening(group_id: str, opening_ids: Sequence[int]) -> None:
        assert driver is not None
        driver.opening(group_id, opening_ids)

    agents = Agents(
        config,
        own,
        renderer=renderer,
        runtime=runtime,
        manners=manners,
        door=door,
        generators=seats,
        run_name=folder.name,
        emit=emit,
    )
    trained = agents.agent(
        config.rollout,
        on_turn=sampled if config.teacher else None,
        on_content=content if config.stream.release == "content" else None,
        on_opening=opening,
    )
    if isinstance(trained, ShellAgent) and type(source) is TaskSource:  # any other may not know what it will need
        ahead = Ahead(
            pool,
            tasks_of=source.step,
            spec_of=trained.worlds.next_spec,
            group_size=config.algo.group_size,
            steps=config.max_steps,
            most=config.sandbox.max_containers,
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
        auditor = Auditor(
            config,
            workers,
            dtype=placement.dtype,
            keep=folder.write_rollouts,
            emit=emit,
            objective=own.objective,
        )
    driver = StepDriver(
        config,
        runner=agents.runner(trained),
        generators=generators,
        workers=workers,
        shares_prompts=ready.shares_prompts,
        prompt_ids=prompt_ids,
        room=trainers.parts_allowed(config, placement, shapes=shapes, decoder=decoder_in(base_of(model_path))).room,
        policy_version=state.policy_version,
        emit=emit,
        keep=folder.write_rollouts,
        scorer=scorer,
        auditor=auditor,
        objective=own.objective,
        missing=door.missing if door is not None else lambda: "",
    )
    if scorer is None and config.stream.mode == "stream" and not driver.room.most:
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
        evaluator = Evaluator(
            eval_tasks[: config.eval.num_examples or None],
            samples=config.eval.group_size,
            runner=agents.runner(agents.agent(evaluated)),
            emit=emit,
        )
    gauges = GaugeReader(
        generators=generators,
        workers=workers,
        queue=lambda: (driver.stream.queued, driver.stream.parts_in_use) if driver.stream is not None else (0, 0),
        tools_running=lambda: tools.running,
        sandboxes=lambda: sandbox_gauge(pool),
        emit=feed.emit,  # not `emit`: gauges come whether or not anything moves, and must not quiet the watchdog
    )
    feed.emit(_run_started(config, placement, folder, runtime, generators[0], state, algo=own.named(config)))
    assert ready.arena is not None  # the first worker's
    await driver.publish(ready.arena)  # also at the start: engines and trainer hold the same bits from the first token
    if door is not None:
        stack.push_async_callback(door.end)  # before anything else ends: programs wait for rollouts
    live = LiveRollouts(agents.made, lambda: driver.stream.rollouts if driver.stream is not None else [], renderer)
    feed.tell_live(live.look, live.texts)
    reading = asyncio.create_task(gauges.run(), name="gauges")
    stack.push_async_callback(ended, reading)
    return Parts(
        folder=folder,
        feed=feed,
        checkpoints=opened.checkpoints,
        model_path=model_path,
        renderer=renderer,
        agent=agents.agent(config.rollout),
        generators=generators,
        pool=pool,
        seats=seats,
        workers=workers,
        source=source,
        driver=driver,
        gauges=gauges,
        evaluator=evaluator,
        start_step=state.step,
        seconds=dict.fromkeys(("generation", "learning", "commit", "publish", "eval"), 0.0),
        objective=own.objective,
    )


async def open_pool(
    config: Config, *, say: Callable[[str], None], warn: Callable[[str], None], stack: AsyncExitStack
) -> Pool:
    """The configured sandboxes, rid of what a dead run has left. `warn` is told when a daemon is away and comes back.

    Raises: RuntimeUnavailable.
    """
    if config.sandbox.runtime == "none":
        runtime: Runtime = WithoutSandboxes()
    else:
        runtime = await sandboxes.choose(
            config.sandbox.runtime,
            docker_host=config.sandbox.docker_host or os.environ.get("DOCKER_HOST", ""),
            images_bytes=int(config.sandbox.images_gib * 2**30),
            # What a task names was meant for a disk: in memory, only the run's own configuration gives more than this.
            box_mib=config.sandbox.disk_mib or sandboxes.BOX_MIB,
            say=say,
        )
    pool = Pool(runtime, ahead=config.sandbox.max_containers, say=warn)
    stack.push_async_callback(pool.close)
    if left := await pool.reap({}):
        say(f"removed {left} sandboxes that a dead run had left")
    return pool


class ToolCounter:
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
    config: Config,
    placement: Placement,
    folder: RunFolder,
    runtime: Runtime,
    generator: Generator,
    state: CheckpointState,
    *,
    algo: str,
) -> RunStarted:
    return RunStarted(
        at_s=time.time(),
        name=folder.name,
        run_dir=str(folder.path),
        pid=os.getpid(),
        model=config.model.name,
        backend=generator.name,
        runtime=runtime.name,
        algo=algo,
        mode=config.stream.mode,
        max_steps=config.max_steps,
        start_step=state.step,
        prompts_per_step=config.algo.prompts_per_step,
        group_size=config.algo.group_size,
        seed=config.seed,
        engine_devices=len(placement.engine.gpus) if placement.on_gpus else max(1, len(placement.engine.cpus)),
        trainer_devices=len({place.gpu for place in placement.trainers})
        if placement.on_gpus
        else len({cpu for place in placement.trainers for cpu in place.cpus}),
        trainer_workers=len(placement.trainers),
        on_gpus=placement.on_gpus,
        dtype=placement.dtype,
    )


async def load_tasks(config: Config, env: EnvConfig, *, say: Callable[[str], None]) -> list[Task]:
    return within(config, await asyncio.to_thread(load_env, env, variables=os.environ, say=say))


def within(config: Config, tasks: Sequence[Task]) -> list[Task]:
    """Tasks as this run works them: without network if it has none, and with no more disk than it gives."""
    most = config.sandbox.disk_mib
    return [
        msgspec.structs.replace(
            task,
            network=task.network and config.sandbox.network == "task",
            disk_mib=min(most or task.disk_mib, task.disk_mib or most),
        )
        for task in tasks
    ]


async def ended(task: asyncio.Task[None]) -> None:
    """End a background task; one that had ended by an error before raises it now."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error
