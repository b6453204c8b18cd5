"""The engine: one run as an object, and what a program embeds.

    async with Engine(load_config("configs/quickstart.toml")) as engine:
        async for step in engine.steps():
            print(step.step, step.metrics["reward_mean"])

Entering it starts the generation engines, the trainer workers and the sandbox runtime; leaving it ends them all,
bounded and through cancellation. What a step is, is in `step`; how parts are made and fit together, in `assembly`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

from sandboxes.shield import finish
from thundersync.ahead import sandbox_metrics
from thundersync.assembly import Parts, build
from thundersync.config import Config
from thundersync.config_checks import check
from thundersync.core.objective import SeparableObjective
from thundersync.core.types import Message, Rollout, Task
from thundersync.errors import ThundersyncError
from thundersync.evaluate.evaluator import EvalResult
from thundersync.generate.base import Sampling
from thundersync.learn import messages as m
from thundersync.monitor.events import CheckpointSaved, Event, RunFinished
from thundersync.own import AgentFunction, Own, OwnTasks, RewardFunction
from thundersync.placement import Placement, place_here
from thundersync.refusals import run_state
from thundersync.report.command import write_own_report
from thundersync.step import StepResult

TEARDOWN_LIMIT_S = 60.0
REPORT_LIMIT_S = 60.0
SAVE_LIMIT_S = 300.0
"""For the last commit's checkpoint on the way out."""


class Engine:
    """One run, in the event loop of whoever enters it. Everything it started is gone when it is left.

    Needs no loop of a certain kind, takes no signal handlers, and may be followed by another engine in the same
    process. Enter it once. What a program brings of its own stands in the place of what the configuration names:

    `tasks`: a collection (shuffled by the seed), an iterator, a function of the step, or a `TaskStream`.
    `eval_tasks`: for [eval]. `agent`: `async def agent(task, policy, sandbox)`. `reward`: `async def reward(task,
    rollout, sandbox) -> float`. `objective`: a `SeparableObjective`, tried for separability before anything starts.
    `on_step` is awaited after each step, before its checkpoint. `on_event` is called with every event of the feed, on
    the event loop: it must not wait; what it raises ends the run at the end of the step.

    `resume` continues from the run's last checkpoint; `placement` is chosen from the machine if not given. `say` gets
    one line at a time about what is being prepared.
    Raises on entering: ConfigError, NotSeparable, ModelMissing, TaskError, RuntimeUnavailable, EngineFailed,
    WorkerLost, ResumeError, several of them as an ExceptionGroup; nothing is left behind then.
    """

    def __init__(
        self,
        config: Config,
        *,
        tasks: OwnTasks | None = None,
        eval_tasks: Sequence[Task] | None = None,
        agent: AgentFunction | None = None,
        reward: RewardFunction | None = None,
        objective: SeparableObjective | None = None,
        on_step: Callable[[StepResult], Awaitable[object]] | None = None,
        on_event: Callable[[Event], None] | None = None,
        resume: bool = False,
        placement: Placement | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.config = config
        self._ear = _Ear(on_event) if on_event is not None else None
        self._on_step = on_step
        self._own = Own(
            tasks=tasks,
            eval_tasks=eval_tasks,
            agent=agent,
            reward=reward,
            objective=objective,
            on_event=self._ear,
        )
        self._placement = placement
        self._resume = resume
        self._say = say
        self._stack = AsyncExitStack()
        self._parts: Parts | None = None
        self._entered = False
        self._stopping = False
        self._began_s = 0.0
        self._next_step = 0
        self._tasks_state: object = None
        """What the task source has to remember of the steps that are done."""
        self._saving: asyncio.Task[Path] | None = None
        self._saved_step = 0
        self._after: list[Callable[[], Awaitable[object]]] = []

    async def __aenter__(self) -> Engine:
        if self._entered:
            raise RuntimeError("an Engine is one run and is entered once; make another, with another name")
        self._entered = True
        self._began_s = time.monotonic()
        failed = ExitStack()
        try:
            check(self.config)
            placement = self._placement or place_here(self.config)
            self._parts = await build(self.config, placement, self._resume, self._say, self._stack, failed, self._own)
        except BaseException:
            failed.close()
            await finish(self._stack.aclose(), limit_s=TEARDOWN_LIMIT_S)
            raise
        self._next_step = self._saved_step = self._parts.start_step
        self._tasks_state = self._parts.source.state()
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
        with contextlib.suppress(TimeoutError):  # a page for the day after is no reason to fail, or to wait for long
            async with asyncio.timeout(REPORT_LIMIT_S):
                await asyncio.to_thread(write_own_report, self.run_dir, self._say, limit_s=REPORT_LIMIT_S / 2)

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
        """The training tasks, by id; of a source that makes them as it goes, those of the last step."""
        return self.parts.source.tasks

    @property
    def parts(self) -> Parts:
        if self._parts is None:
            raise RuntimeError("use the engine inside `async with`")
        return self._parts

    async def steps(self) -> AsyncIterator[StepResult]:
        """Train: yields after every step until `max_steps` are done, with evaluations and checkpoints in between.

        Ends earlier after `stop`, or when the program's own tasks have come to their end. Raises what broke the run;
        the last checkpoint stays.
        """
        parts, config = self.parts, self.config
        await self._evaluate_new()
        while self._next_step < config.max_steps and not self._stopping:
            step = self._next_step
            tasks = await parts.source.take(step)
            if not tasks:
                self._say(f"the tasks have come to their end before step {step}")
                break
            result = await parts.driver.run(step, tasks, on_commit=self._count_step, record=self._record)
            if self._on_step is not None:
                await self._on_step(result)
                self._tasks_state = parts.source.state()  # a curriculum may have learned from the step
            if self._ear is not None:
                self._ear.check()
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
        if self._next_step < config.max_steps:  # ended early: what the last step would have done
            if self._saved_step < self._next_step:
                await self.save()
            if not self._stopping:
                await self._evaluate_new()

    def _count_step(self) -> None:
        self._next_step += 1
        self._tasks_state = self.parts.source.state()

    async def _record(self, result: StepResult) -> None:
        """Write down what the step was."""
        parts = self.parts
        await parts.folder.write_rollouts(result.step, result.rollouts)
        metrics = result.metrics | {"loop_lag_max_ms": parts.gauges.take_lag() * 1000}
        metrics |= sandbox_metrics(parts.pool)
        await parts.folder.write_metrics(metrics)
        parts.count(metrics)

    def stop(self) -> None:
        """Begin no further step: `steps` ends when the one that is open is committed and saved. From any task."""
        self._stopping = True

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
        state = run_state(
            self.config,
            parts.source,
            step=self._next_step,
            policy_version=parts.driver.policy_version,
            tasks_state=self._tasks_state,
        )
        path = await parts.checkpoints.save(
            state,
            tokenizer_from=parts.model_path,
            write=self._save_shares,
        )
        self._saved_step = state.step
        parts.feed.emit(CheckpointSaved(at_s=time.time(), step=state.step, path=str(path)))
        return path

    async def _save_shares(self, draft: str) -> None:
        """Every worker's share, asked of all at once, before any of them gets a request of the next step."""
        saved = await asyncio.gather(
            *(
                worker.call(m.Save(path=draft), m.Done, limit_s=self.config.stall_timeout_s)
                for worker in self.parts.workers
            ),
            return_exceptions=True,
        )
        for share in saved:
            if isinstance(share, BaseException):
                raise share

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
        """One reply of the current policy to a conversation, beside a step as well. Raises: EngineFailed."""
        parts = self.parts
        ids = await asyncio.to_thread(lambda: parts.renderer.encode(parts.renderer.text(messages)))
        sampling = Sampling(
            temperature=self.config.rollout.temperature, max_tokens=max_tokens or self.config.rollout.max_tokens
        )
        async with parts.driver.gate.passing():
            reply = await parts.generators[0].generate(ids, sampling, request_id=f"generate-{time.monotonic_ns()}")
        spoken, _ = parts.renderer.split_end(reply.token_ids)
        return parts.renderer.decode_after(ids[-8:], spoken)

    async def rollout(self, task: Task) -> Rollout:
        """One rollout of the current policy on `task`, judged as those that train; nothing is learned from it.

        A step that is open beside it commits only when it has ended: its policy must not change under it.
        """
        parts = self.parts
        name = f"single-{time.monotonic_ns()}"
        async with parts.driver.gate.passing():
            return await parts.agent.run(
                task,
                rollout_id=f"{name}-00",
                group_id=name,
                generator=parts.seats[0],
                policy_version=parts.driver.policy_version,
            )


class _Ear:
    """A listener of the program's own: what it raises must not break whoever had something to tell."""

    def __init__(self, listener: Callable[[Event], None]) -> None:
        self._listener = listener
        self._error: Exception | None = None

    def __call__(self, event: Event) -> None:
        if self._error is None:
            try:
                self._listener(event)
            except Exception as error:
                self._error = error

    def check(self) -> None:
        """Raises what the listener raised; it has heard nothing since."""
        if self._error is not None:
            raise self._error


def _reason(error: BaseException) -> str:
    """The first real cause, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
        return "interrupted"
    return error.message if isinstance(error, ThundersyncError) else f"{type(error).__name__}: {error}"
