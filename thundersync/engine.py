"""The engine: builds every part, owns every lifetime, and is what a program embeds.

    async with Engine(load_config("configs/quickstart.toml")) as engine:
        async for step in engine.steps():
            print(step.step, step.metrics["reward_mean"])

Entering it starts the generation engines, the trainer worker and the sandbox runtime; leaving it ends them all,
bounded and through cancellation. What a step is, is in `step`; this module knows only how parts fit together.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import msgspec

import sandboxes
from sandboxes import Runtime
from sandboxes.shield import finish
from thundersync.checkpoints import Checkpoints, CheckpointState
from thundersync.config import Config, RolloutConfig
from thundersync.config_file import to_toml
from thundersync.core.types import Failed, Message, Rollout, Task
from thundersync.errors import ResumeError, StepWithoutScore, TaskError, ThundersyncError
from thundersync.evaluation import EvalResult, Evaluator
from thundersync.generate import make_generator
from thundersync.generate.base import Generator, Sampling
from thundersync.generate.child import child_environment
from thundersync.generate.supervised import SupervisedGenerator
from thundersync.learn import messages as m
from thundersync.learn.link import WorkerLink
from thundersync.models import resolve_model
from thundersync.monitor.events import (
    AnyEvent,
    CheckpointSaved,
    RolloutFailed,
    RolloutStarted,
    RunFinished,
    RunStarted,
    ScoringStarted,
    ToolFinished,
    ToolStarted,
    Warned,
)
from thundersync.monitor.feed import Feed
from thundersync.monitor.gauges import GaugeReader
from thundersync.placement import Placement, place_here
from thundersync.rollout.agent import ShellAgent
from thundersync.rollout.dialogue import Renderer
from thundersync.rollout.prompts import load_prompt
from thundersync.rollout.protocol import BASH_TOOL
from thundersync.rollout.runner import RolloutRunner
from thundersync.rundir import RunFolder
from thundersync.score.reward import RewardChecker
from thundersync.step import StepDriver, StepResult
from thundersync.tasks.harbor import load_tasks
from thundersync.tasks.source import TaskSource

TEARDOWN_LIMIT_S = 60.0
PROMPTS_CHECKED = 100
SAVE_LIMIT_S = 300.0
"""For the last commit's checkpoint on the way out."""


class Engine:
    """One run. Enter it once; everything it started is gone when it is left.

    `resume` continues from the run's last checkpoint; `placement` is chosen from the machine if not given. `say` gets
    one line at a time about what is being prepared.
    Raises on entering: ConfigError, ModelMissing, TaskError, RuntimeUnavailable, EngineFailed, WorkerLost, ResumeError;
    nothing is left behind then.
    """

    def __init__(
        self,
        config: Config,
        *,
        resume: bool = False,
        placement: Placement | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.config = config
        self._placement = placement
        self._resume = resume
        self._say = say
        self._stack = AsyncExitStack()
        self._parts: _Parts | None = None
        self._began_s = 0.0
        self._next_step = 0
        self._saving: asyncio.Task[Path] | None = None
        self._saved_step = 0
        self._after: list[Callable[[], Awaitable[object]]] = []

    async def __aenter__(self) -> Engine:
        self._began_s = time.monotonic()
        failed = ExitStack()
        try:
            placement = self._placement or place_here(self.config)
            self._parts = await _build(self.config, placement, self._resume, self._say, self._stack, failed)
        except BaseException:
            failed.close()
            await finish(self._stack.aclose(), limit_s=TEARDOWN_LIMIT_S)
            raise
        self._next_step = self._saved_step = self._parts.start_step
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            unsaved = await finish(self._save_what_is_left(), limit_s=SAVE_LIMIT_S)
        finally:
            await self._end(error)
        if unsaved is not None and error is None:
            raise unsaved

    async def _end(self, error: BaseException | None) -> None:
        """Tell viewers how it ended, then end everything."""
        seconds = time.monotonic() - self._began_s
        with contextlib.suppress(ThundersyncError):  # a full disk must not hide the first error
            self.parts.feed.emit(
                RunFinished(
                    at_s=time.time(),
                    ok=error is None,
                    reason="" if error is None else _reason(error),
                    steps=self._next_step,
                    seconds=seconds,
                    shares=self.parts.shares(seconds),
                )
            )
        await finish(self._close(), limit_s=TEARDOWN_LIMIT_S)

    async def _close(self) -> None:
        try:
            await self._stack.aclose()
        finally:
            for callback in self._after:
                await callback()

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return self.parts.folder.path

    @property
    def tasks(self) -> list[Task]:
        """The training tasks, by id."""
        return self.parts.source.tasks

    @property
    def parts(self) -> _Parts:
        if self._parts is None:
            raise RuntimeError("use the engine inside `async with`")
        return self._parts

    async def steps(self) -> AsyncIterator[StepResult]:
        """Train: yields after every step until `max_steps` are done, with evaluations and checkpoints in between.

        Raises what broke the run; the last checkpoint stays.
        """
        parts, config = self.parts, self.config
        await self._evaluate_new()
        while self._next_step < config.max_steps:
            step = self._next_step
            result = await parts.driver.run(step, parts.source.step(step))
            await parts.folder.write_rollouts(step, result.rollouts)
            _refuse_outage(result)
            metrics = result.metrics | {"loop_lag_max_ms": parts.gauges.take_lag() * 1000}
            await parts.folder.write_metrics(metrics)
            parts.count(metrics)
            self._next_step = step + 1
            last = self._next_step == config.max_steps
            if last or (config.ckpt.interval and self._next_step % config.ckpt.interval == 0):
                await self._finish_saving()
                # Beside the next step: while its first rollouts are generated, the trainer has nothing else to do.
                self._saving = asyncio.create_task(self.save(), name="checkpoint")
            interval = config.eval.interval if config.eval is not None else 0
            if last or (interval and self._next_step % interval == 0):
                await self._evaluate_new()
            yield result
        await self._finish_saving()

    async def evaluate(self) -> EvalResult:
        """Rollouts on the `eval` tasks under the current weights."""
        parts = self.parts
        if parts.evaluator is None:
            raise ThundersyncError("there are no evaluation tasks", remedy="Add [eval.env] to the configuration.")
        result = await parts.evaluator.run(parts.driver.policy_version)
        await parts.folder.write_evaluation(result.policy_version, result.rollouts)
        parts.seconds["eval"] += result.seconds
        return result

    async def _evaluate_new(self) -> None:
        """Evaluate unless there are no tasks for it, or this policy version was evaluated before a resume."""
        parts = self.parts
        if parts.evaluator is not None and not parts.folder.has_evaluation(parts.driver.policy_version):
            await self.evaluate()

    async def save(self) -> Path:
        """Write a checkpoint of the last committed weights now."""
        parts = self.parts
        state = _state(self.config, parts.source, step=self._next_step, policy_version=parts.driver.policy_version)
        path = await parts.checkpoints.save(
            state,
            tokenizer_from=parts.model_path,
            write=lambda draft: parts.workers[0].call(m.Save(path=draft), m.Done, limit_s=self.config.stall_timeout_s),
        )
        self._saved_step = state.step
        parts.feed.emit(CheckpointSaved(at_s=time.time(), step=state.step, path=str(path)))
        return path

    async def _finish_saving(self) -> None:
        """Wait for the checkpoint that is being written. Raises what went wrong with it."""
        saving, self._saving = self._saving, None
        if saving is not None:
            await saving

    async def _save_what_is_left(self) -> Exception | None:
        """On the way out: the last commit is kept, however the run ends. Gives the reason where it cannot be."""
        try:
            await self._finish_saving()
            if self._next_step > self._saved_step:
                self._say(f"saving step {self._next_step}, the last one committed")
                await self.save()
        except (ThundersyncError, OSError) as unsaved:
            self._say(f"what was learned after step {self._saved_step} could not be saved: {_reason(unsaved)}")
            return unsaved
        return None

    def on_close(self, callback: Callable[[], Awaitable[object]]) -> None:
        """Await `callback` after everything has ended, the feed included: a viewer has then been told of the end."""
        self._after.append(callback)

    async def generate(self, messages: Sequence[Message], *, max_tokens: int | None = None) -> str:
        """One reply of the current policy to a conversation. Raises: EngineFailed."""
        parts = self.parts
        ids = await asyncio.to_thread(lambda: parts.renderer.encode(parts.renderer.text(messages)))
        sampling = Sampling(
            temperature=self.config.rollout.temperature, max_tokens=max_tokens or self.config.rollout.max_tokens
        )
        reply = await parts.generators[0].generate(ids, sampling, request_id=f"generate-{time.monotonic_ns()}")
        spoken, _ = parts.renderer.split_end(reply.token_ids)
        return parts.renderer.decode_after(ids[-8:], spoken)

    async def rollout(self, task: Task) -> Rollout:
        """One rollout of the current policy on `task`, judged by its checker; nothing is learned from it."""
        parts = self.parts
        name = f"single-{time.monotonic_ns()}"
        return await parts.agent.run(
            task,
            rollout_id=f"{name}-00",
            group_id=name,
            generator=parts.generators[0],
            policy_version=parts.driver.policy_version,
        )


class _Parts(msgspec.Struct, kw_only=True):
    """Everything a running engine holds."""

    folder: RunFolder
    feed: Feed
    checkpoints: Checkpoints
    model_path: Path
    renderer: Renderer
    agent: ShellAgent
    generators: list[SupervisedGenerator]
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


async def _build(
    config: Config,
    placement: Placement,
    resume: bool,
    say: Callable[[str], None],
    stack: AsyncExitStack,
    failed: ExitStack,
) -> _Parts:
    """Cheap checks first, then what takes time; each part's end is registered before the next begins.

    `failed` is for what has to be undone only if this does not succeed.
    """
    tasks = await _tasks(config, config.env.path)
    source = TaskSource(tasks, prompts_per_step=config.algo.prompts_per_step, seed=config.seed)
    eval_tasks = await _tasks(config, config.eval.env.path) if config.eval is not None else []
    _refuse_overlap(tasks, eval_tasks)
    prompt = load_prompt(config.rollout.system_prompt)
    model_path = await asyncio.to_thread(resolve_model, config.model.name, say=say)
    docker_host = config.sandbox.docker_host or os.environ.get("DOCKER_HOST", "")
    runtime = await sandboxes.choose(config.sandbox.runtime, docker_host=docker_host)
    stack.push_async_callback(runtime.close)
    _refuse_network(runtime, [*tasks, *eval_tasks])
    if left := await runtime.reap({}):
        say(f"removed {left} sandboxes that a dead run had left")
    folder = RunFolder.create(config.output_dir, config.name, to_toml(config), resume)
    stack.push_async_callback(folder.close)
    feed = Feed.open(folder.path, bind=config.monitor.bind)
    stack.push_async_callback(feed.close)
    checkpoints = Checkpoints(folder.checkpoints, keep_last=config.ckpt.keep_last)
    found = checkpoints.latest() if resume else None
    if resume and found is None:
        say("no checkpoint yet: the run starts again from its first step")
    fresh = _state(config, source, step=0, policy_version=0)
    state = found[1] if found else fresh
    _refuse_other_run(state, fresh)
    if resume:
        folder.take_config(to_toml(config))
        await folder.rewind(state.step, state.policy_version)
    else:
        failed.callback(folder.free_name)
    say(f"{placement.sentence()}; {runtime.name} sandboxes: {runtime.isolation}")
    tools = _ToolCounter()

    def emit(event: AnyEvent) -> None:
        tools.see(event)
        if driver is not None and driver.stream is not None:
            driver.stream.heartbeat()
        feed.emit(event)

    driver: StepDriver | None = None
    generators = _generators(config, placement, model_path, folder.logs, emit, state.step)
    stack.push_async_callback(_close_all, generators)
    worker = WorkerLink(
        0, log_path=folder.logs / "trainer-0.log", environment=placement.trainer_environment(child_environment({}))
    )
    stack.push_async_callback(worker.close)
    say(f"starting {len(generators)} {generators[0].name} engine(s) and the trainer")
    setup = _setup(config, placement, model_path, worker.arena_path, str(found[0]) if found else "")
    # Before the engines: they may be forked, and a fork in the middle of another thread's import can hang.
    renderer = await asyncio.to_thread(Renderer.load, model_path, tools=[BASH_TOOL])

    def prompt_ids(task: Task) -> list[int]:
        return renderer.encode(renderer.text([*prompt, Message(role="user", content=task.instruction)]))

    await asyncio.to_thread(_refuse_long_prompts, [*tasks, *eval_tasks], prompt_ids, config.model.max_model_len)
    async with asyncio.TaskGroup() as starting:
        starting.create_task(_start_all(generators))
        answering = starting.create_task(worker.start(setup))
    ready = answering.result()
    checker = RewardChecker()

    def agent(rollout: RolloutConfig) -> ShellAgent:
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
        )

    def runner(which: ShellAgent) -> RolloutRunner:
        return RolloutRunner(
            agent=which,
            generators=generators,
            on_failure=config.algo.on_failure,
            max_attempts=config.algo.max_attempts,
            emit=emit,
            concurrency=min(
                config.rollout.concurrency or sum(each.max_concurrency for each in generators),
                config.sandbox.max_containers,
            ),
        )

    training_agent = agent(config.rollout)
    driver = StepDriver(
        config,
        runner=runner(training_agent),
        generators=generators,
        worker=worker,
        shares_prompts=ready.shares_prompts,
        prompt_ids=prompt_ids,
        parameters=ready.parameters,
        policy_version=state.policy_version,
        emit=emit,
    )
    if not ready.shares_prompts:
        emit(Warned(at_s=time.time(), text="this model cannot be cut into blocks: prompts are not shared"))
    evaluator = None
    if config.eval is not None:
        evaluated = msgspec.structs.replace(config.rollout, temperature=config.eval.temperature)
        evaluator = Evaluator(config.eval, eval_tasks, runner=runner(agent(evaluated)), emit=emit)
    gauges = GaugeReader(
        generators=generators,
        workers=[worker],
        queue=lambda: (driver.stream.queued, driver.stream.parts_in_use) if driver.stream is not None else (0, 0),
        tools_running=lambda: tools.running,
        emit=feed.emit,  # not `emit`: gauges come whether or not anything moves, and must not quiet the watchdog
    )
    feed.emit(_run_started(config, folder, runtime, generators[0], state))
    await driver.publish(ready.arena)  # also at the start: engines and trainer hold the same bits from the first token
    reading = asyncio.create_task(gauges.run(), name="gauges")
    stack.push_async_callback(_cancel, reading)
    return _Parts(
        folder=folder,
        feed=feed,
        checkpoints=checkpoints,
        model_path=model_path,
        renderer=renderer,
        agent=training_agent,
        generators=generators,
        workers=[worker],
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


def _generators(
    config: Config,
    placement: Placement,
    model_path: Path,
    logs: Path,
    emit: Callable[[AnyEvent], None],
    start_step: int,
) -> list[SupervisedGenerator]:
    width = config.engine.tensor_parallel_size

    def make(index: int, restarts: int) -> Generator:
        own = msgspec.structs.replace(
            config.engine,
            gpus=placement.engine_gpus[index * width : (index + 1) * width],
            gpu_memory_utilization=placement.gpu_share or config.engine.gpu_memory_utilization,
        )
        # Another stream of random numbers for each engine, restart and resume: the same one would sample the
        # rollouts again that a dead engine had finished.
        seed = ((config.seed * 1009 + start_step) * 1009 + index) * 1009 + restarts
        return make_generator(
            model_path,
            config=own,
            max_model_len=config.model.max_model_len,
            dtype=placement.dtype,
            log_path=logs / f"engine-{index}.log",
            cpus=placement.engine_cpus,
            seed=seed % 2**31,
        )

    return [SupervisedGenerator(functools.partial(make, index), emit) for index in range(placement.replicas)]


async def _start_all(generators: Sequence[Generator]) -> None:
    async with asyncio.TaskGroup() as starting:
        for generator in generators:
            starting.create_task(generator.start())


def _setup(config: Config, placement: Placement, model_path: Path, arena: Path, checkpoint: str) -> m.Setup:
    return m.Setup(
        model_path=str(model_path),
        dtype=placement.dtype,
        max_model_len=config.model.max_model_len,
        arena_path=str(arena),
        cpus=placement.trainer_cpus,
        device=placement.device,
        temperature=config.rollout.temperature,
        importance_cap=config.algo.mismatch_high if config.algo.mismatch == "tis" else None,
        lr=config.optim.lr,
        betas=config.optim.betas,
        eps=config.optim.eps,
        weight_decay=config.optim.weight_decay,
        max_grad_norm=config.optim.max_grad_norm,
        scheduler=config.optim.scheduler,
        warmup_steps=config.optim.warmup_steps,
        max_steps=config.max_steps,
        checkpoint=checkpoint,
    )


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


async def _tasks(config: Config, path: str) -> list[Task]:
    tasks = await asyncio.to_thread(load_tasks, path)
    if config.sandbox.network == "off":
        return [msgspec.structs.replace(task, network=False) for task in tasks]
    return tasks


def _refuse_network(runtime: Runtime, tasks: Sequence[Task]) -> None:
    """Told now, not by every rollout."""
    asking = [task.task_id for task in tasks if task.network]
    if runtime.name == "process" and asking:
        raise TaskError(
            f"{len(asking)} tasks ask for network, which process sandboxes never have: {', '.join(asking[:3])}, ...",
            remedy='Use sandbox.runtime = "docker", or sandbox.network = "off" if they do without.',
        )


def _refuse_long_prompts(tasks: Sequence[Task], prompt_ids: Callable[[Task], list[int]], limit: int) -> None:
    """A prompt that leaves no room for a reply is known before an engine starts; the longest instructions tell."""
    for task in sorted(tasks, key=lambda task: -len(task.instruction))[:PROMPTS_CHECKED]:
        length = len(prompt_ids(task))
        if length >= limit:
            raise TaskError(
                f"the prompt of task {task.task_id} has {length} tokens, model.max_model_len is {limit}: no reply fits",
                remedy="Raise model.max_model_len, or shorten rollout.system_prompt.",
            )


def _refuse_overlap(tasks: Sequence[Task], eval_tasks: Sequence[Task]) -> None:
    """Evaluation on training tasks would measure memory."""
    both = {task.checker.tests for task in tasks} & {task.checker.tests for task in eval_tasks}
    if both:
        raise TaskError(
            f"{len(both)} tasks are in env.path and in eval.env.path",
            remedy="Give the evaluation a folder of its own, e.g. starter/eval beside starter/train.",
        )


def _state(config: Config, source: TaskSource, *, step: int, policy_version: int) -> CheckpointState:
    return CheckpointState(
        step=step,
        policy_version=policy_version,
        seed=config.seed,
        model=config.model.name,
        prompts_per_step=config.algo.prompts_per_step,
        tasks=source.digest,
    )


def _refuse_other_run(state: CheckpointState, fresh: CheckpointState) -> None:
    """A resumed run works on the same tasks in the same order, or not at all."""
    changed = [
        f"{name}: the checkpoint has {getattr(state, name)}, the configuration {getattr(fresh, name)}"
        for name in ("model", "seed", "prompts_per_step", "tasks")
        if getattr(state, name) != getattr(fresh, name)
    ]
    if changed:
        raise ResumeError(
            "the checkpoint is of another run: " + "; ".join(changed),
            remedy="Resume with the run's own config.toml and tasks, or start a new run under another name.",
        )


def _refuse_outage(result: StepResult) -> None:
    """A step in which nothing could be scored is no step: something outside is down for everybody."""
    failures = [rollout.outcome for rollout in result.rollouts if isinstance(rollout.outcome, Failed)]
    if failures and len(failures) == len(result.rollouts):
        kinds = Counter(failure.reason for failure in failures)
        raise StepWithoutScore(
            f"not one of the {len(failures)} rollouts of step {result.step} could be scored "
            f"({', '.join(f'{count} x {kind}' for kind, count in kinds.items())}); the first: {failures[0].detail}",
            remedy="Mend that, then continue with --resume: the step runs again.",
        )


async def _cancel(task: asyncio.Task[None]) -> None:
    """End a background task; one that had ended by an error before raises it now."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


async def _close_all(generators: Sequence[Generator]) -> None:
    """Side by side: each may take seconds. Raises what went wrong, after all have been tried."""
    results = await asyncio.gather(*(generator.close() for generator in generators), return_exceptions=True)
    if errors := [result for result in results if isinstance(result, Exception)]:
        raise ExceptionGroup("engines did not close", errors)


def _reason(error: BaseException) -> str:
    """The first real cause, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
        return "interrupted"
    return error.message if isinstance(error, ThundersyncError) else f"{type(error).__name__}: {error}"
