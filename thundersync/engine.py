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
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

from sandboxes.shield import finish
from thundersync.assembly import Parts, build
from thundersync.config import Config
from thundersync.config_checks import check
from thundersync.core.types import Failed, Message, Rollout, Task
from thundersync.errors import StepWithoutScore, ThundersyncError
from thundersync.evaluation import EvalResult
from thundersync.generate.base import Sampling
from thundersync.learn import messages as m
from thundersync.monitor.events import CheckpointSaved, RunFinished
from thundersync.placement import Placement, place_here
from thundersync.refusals import run_state
from thundersync.step import StepResult

TEARDOWN_LIMIT_S = 60.0
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
        self._parts: Parts | None = None
        self._began_s = 0.0
        self._next_step = 0
        self._saving: asyncio.Task[Path] | None = None
        self._saved_step = 0
        self._after: list[Callable[[], Awaitable[object]]] = []

    async def __aenter__(self) -> Engine:
        self._began_s = time.monotonic()
        failed = ExitStack()
        try:
            check(self.config)
            placement = self._placement or place_here(self.config)
            self._parts = await build(self.config, placement, self._resume, self._say, self._stack, failed)
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
    def parts(self) -> Parts:
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
        state = run_state(self.config, parts.source, step=self._next_step, policy_version=parts.driver.policy_version)
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
            generator=parts.seats[0],
            policy_version=parts.driver.policy_version,
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


def _reason(error: BaseException) -> str:
    """The first real cause, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
        return "interrupted"
    return error.message if isinstance(error, ThundersyncError) else f"{type(error).__name__}: {error}"
