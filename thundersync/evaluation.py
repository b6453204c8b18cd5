"""One evaluation as a run of its own: engines, sandboxes and held-out tasks, and no trainer.

    async with Evaluation(config, samples=4) as evaluation:
        report = await evaluation.run()

The engines load the model's own files; an adapter is merged for them once. Beside `assembly`, which builds what trains.
What a sample is, what is kept and what it all comes to is in `evaluate`.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Literal

import msgspec

from sandboxes import Pool
from sandboxes.base import isolation_of
from sandboxes.shield import finish
from thundersync.adapter import engines_with
from thundersync.ahead import sandbox_gauge
from thundersync.assembly import ToolCounter, ended, load_tasks, open_pool
from thundersync.config import Config, EnvConfig
from thundersync.config_file import to_toml
from thundersync.core.types import Task
from thundersync.errors import ConfigError, ResumeError, TaskError
from thundersync.evaluate.evaluator import Evaluator
from thundersync.evaluate.report import Report, make_report, write_predictions, write_report
from thundersync.evaluate.samples import ASKED, Asked, SampleFile, SuiteAsked, files_digest
from thundersync.generate.base import Generator
from thundersync.generate.nobody import NoEngine
from thundersync.models import resolve_model
from thundersync.monitor.events import AnyEvent, RunFinished, RunStarted, Warned
from thundersync.monitor.feed import Feed
from thundersync.monitor.gauges import GaugeReader
from thundersync.refusals import refuse_long_prompts, refuse_network, refuse_overlap
from thundersync.rollout.agent import ShellAgent
from thundersync.rollout.dialogue import Renderer
from thundersync.rollout.manners import Manners
from thundersync.rollout.runner import Agent, RolloutRunner
from thundersync.rollout.scripted import ScriptedAgent
from thundersync.rollout.worlds import Worlds
from thundersync.rundir import RunFolder
from thundersync.score.reward import RewardChecker
from thundersync.tasks.rows import USUAL_SPLIT

AgentKind = Literal["policy", "oracle", "idle"]
TEARDOWN_LIMIT_S = 60.0
GRACE_S = 30.0
_STAMP = "%Y%m%d-%H%M%S"


class Evaluation:
    """Enter it once; everything it started is gone when it is left, and every finished sample is on disk.

    `suites` are what tasks to take; without any, those of [eval.env]. `split`: of those that are data sets from the
    hub. `samples`: rollouts of each task; 0 = eval.group_size, or 1. `agent`: who attempts them; `oracle` runs the
    reference solutions and `idle` does nothing, neither needs an engine. `resume` goes on with the newest evaluation of
    this name.
    Raises on entering: ConfigError, ModelMissing, TaskError, RuntimeUnavailable, EngineFailed, ResumeError.
    """

    def __init__(
        self,
        config: Config,
        *,
        suites: Sequence[str] = (),
        split: str = USUAL_SPLIT,
        samples: int = 0,
        agent: AgentKind = "policy",
        resume: bool = False,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._config = config
        self._suites = list(suites)
        self._split = split
        self._samples = samples or (config.eval.group_size if config.eval is not None else 1)
        self._kind: AgentKind = agent
        self._resume = resume
        self._say = say
        self._stack = AsyncExitStack()
        self._tools = ToolCounter()
        self._after: list[Callable[[], Awaitable[object]]] = []
        self._began_s = 0.0
        self.generators: list[Generator] = []
        """The engines, once entered."""

    async def __aenter__(self) -> Evaluation:
        self._began_s = time.monotonic()
        failed = ExitStack()
        try:
            await self._build(failed)
        except BaseException:
            failed.close()
            await finish(self._stack.aclose(), limit_s=TEARDOWN_LIMIT_S)
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        seconds = time.monotonic() - self._began_s
        reason = "" if error is None else _reason(error)
        self._feed.emit(RunFinished(at_s=time.time(), ok=error is None, reason=reason, steps=0, seconds=seconds))
        try:
            await finish(self._stack.aclose(), limit_s=TEARDOWN_LIMIT_S)
        finally:
            for callback in self._after:
                await callback()

    def on_close(self, callback: Callable[[], Awaitable[object]]) -> None:
        """Await `callback` after everything has ended, the feed included: a viewer has then been told of the end."""
        self._after.append(callback)

    @property
    def run_dir(self) -> Path:
        """The evaluation's folder."""
        return self._folder.path

    async def run(self) -> Report:
        """Every sample that is not there yet; then what all of them come to, as files in the folder too."""
        result = await self._evaluator.run(0, known=self._known, keep=self._file.add)
        report = make_report(
            self._evaluator.tasks_of(result, [suite for suite, _ in self._tasks]),
            result.rollouts,
            agent=self._kind,
            model=self._config.model.name,
            samples=self._samples,
            temperature=self._temperature,
            seed=self._config.seed,
        )
        await asyncio.to_thread(write_report, self.run_dir, report)
        groups = {self._evaluator.group_of(0, index): task for index, (_, task) in enumerate(self._tasks)}
        name = _model_name(self._config.model.name) if self._kind == "policy" else self._kind
        await asyncio.to_thread(write_predictions, self.run_dir, result.rollouts, groups, model=name)
        return report

    @property
    def _temperature(self) -> float:
        return self._config.eval.temperature if self._config.eval is not None else self._config.rollout.temperature

    async def _build(self, failed: ExitStack) -> None:
        config, stack = self._config, self._stack
        if config.serve is not None and self._kind == "policy":
            raise ConfigError(
                "[serve] makes outside programs the agent, and this command has its own",
                remedy="Evaluate within the run ([eval]), or leave [serve] out to evaluate the built-in agent.",
            )
        self._tasks = await self._load()
        tasks = [task for _, task in self._tasks]
        manners = Manners(config.rollout)
        model_path = None
        if self._kind == "policy":
            model_path = await asyncio.to_thread(resolve_model, config.model.name, say=self._say)
        pool = await self._sandboxes(tasks)
        self._open(stack, failed)
        await self._begin(model_path)
        if model_path is None:
            agent = self._without_model(pool)
        else:
            agent = await self._with_model(pool, model_path, manners)
        runner = RolloutRunner(
            agent=agent,
            generators=self.generators,
            on_failure="retry",
            max_attempts=config.algo.max_attempts,
            emit=self._emit,
            concurrency=min(
                config.rollout.concurrency or sum(each.max_concurrency for each in self.generators),
                config.sandbox.max_containers,
            ),
        )
        self._evaluator = Evaluator(tasks, samples=self._samples, runner=runner, emit=self._emit)
        gauges = GaugeReader(
            generators=self.generators,
            workers=[],
            queue=lambda: (0, 0),
            tools_running=lambda: self._tools.running,
            sandboxes=lambda: sandbox_gauge(pool),
            emit=self._feed.emit,
        )
        self._feed.emit(self._started(pool.name, self.generators[0].name))
        reading = asyncio.create_task(gauges.run(), name="gauges")
        stack.push_async_callback(ended, reading)

    async def _sandboxes(self, tasks: Sequence[Task]) -> Pool:
        """Where the tasks are attempted. Raises: ConfigError, RuntimeUnavailable, TaskError."""
        sandbox = self._config.sandbox
        if sandbox.runtime == "none":
            raise ConfigError(
                'sandbox.runtime = "none" has no sandboxes to evaluate in', remedy='Set sandbox.runtime = "auto".'
            )
        pool = await open_pool(self._config, say=self._say, warn=self._warn, stack=self._stack)
        refuse_network(pool.name, tasks)
        self._say(isolation_of(pool))
        return pool

    def _without_model(self, pool: Pool) -> Agent:
        config = self._config
        self.generators = [NoEngine(config.sandbox.max_containers)]
        checker = self._checker(pool)
        worlds = Worlds(
            pool,
            checker,
            timeout_s=config.rollout.timeout_s,
            pids=config.sandbox.pids,
            labels={"thundersync.run": self._folder.name},
            grace_s=GRACE_S,
            emit=self._emit,
        )
        kind: Literal["oracle", "idle"] = "oracle" if self._kind == "oracle" else "idle"
        return ScriptedAgent(kind, worlds=worlds, checker=checker, emit=self._emit)

    async def _with_model(self, pool: Pool, model_path: Path, manners: Manners) -> Agent:
        config = self._config
        # Before the engines: they may be forked, and a fork in the middle of another thread's import can hang.
        renderer = await asyncio.to_thread(Renderer.load, model_path, tools=manners.tools)

        def prompt_ids(task: Task) -> list[int]:
            return renderer.encode(renderer.text(manners.opening(task)))

        tasks = [task for _, task in self._tasks]
        await asyncio.to_thread(refuse_long_prompts, tasks, prompt_ids, config.model.max_model_len)
        self.generators = await engines_with(
            config,
            model_path,
            logs=self._folder.logs,
            emit=self._emit,
            say=self._say,
            stack=self._stack,
        )
        return ShellAgent(
            renderer=renderer,
            runtime=pool,
            checker=self._checker(pool),
            config=msgspec.structs.replace(config.rollout, temperature=self._temperature),
            prompt=manners,
            emit=self._emit,
            stop=config.rollout.stop,
            pids=config.sandbox.pids,
            labels={"thundersync.run": self._folder.name},
            grace_s=GRACE_S,
        )

    def _checker(self, pool: Pool) -> RewardChecker:
        return RewardChecker(
            runtime=pool, pids=self._config.sandbox.pids, labels={"thundersync.run": self._folder.name}
        )

    async def _load(self) -> list[tuple[str, Task]]:
        """Every task with its suite's name. Raises: ConfigError without any, TaskError."""
        config = self._config
        first = config.eval.num_examples if config.eval is not None else 0
        if self._suites:
            envs = [EnvConfig(path=path, split=self._split) for path in self._suites]
        elif config.eval is not None:
            envs = [config.eval.env]
        else:
            raise ConfigError(
                "there are no evaluation tasks",
                remedy="Add [eval] with env = { ... } to the configuration, or name some with --suite.",
            )
        found = [(env.path, await load_tasks(config, env, say=self._say)) for env in envs]
        if not self._suites:
            refuse_overlap(await load_tasks(config, config.env, say=self._say), found[0][1])
        for name, tasks in found:
            if len({task.task_id for task in tasks}) < len(tasks):
                raise TaskError(f"two tasks of {name} have one id", remedy="Give each an id of its own.")
        return [(name, task) for name, tasks in found for task in tasks[: first or None]]

    def _open(self, stack: AsyncExitStack, failed: ExitStack) -> None:
        """The folder and the feed."""
        config = self._config
        who = "" if self._kind == "policy" else f"-{self._kind}"
        base = f"eval-{config.name or _model_name(config.model.name)}{who}"
        name = f"{base}-{time.strftime(_STAMP)}"
        if self._resume:
            form = re.compile(re.escape(base) + r"-\d{8}-\d{6}")
            before = [path.parent for path in Path(config.output_dir).glob(f"eval-*/{ASKED}")]
            names = sorted(path.name for path in before if form.fullmatch(path.name))
            if not names:
                raise ResumeError(f"{config.output_dir} has no evaluation {base} to go on with", remedy="Begin one.")
            name = names[-1]
        self._folder = RunFolder.create(config.output_dir, name, to_toml(config), self._resume)
        stack.push_async_callback(self._folder.close)
        if not self._resume:
            failed.callback(self._folder.free_name)
        self._feed = Feed.open(self._folder.path, bind=config.monitor.bind)
        stack.push_async_callback(self._feed.close)

    async def _begin(self, model_path: Path | None) -> None:
        config = self._config
        suites: dict[str, list[str]] = {}
        for suite, task in self._tasks:
            suites.setdefault(suite, []).append(task.task_id)
        settings = msgspec.structs.replace(config.rollout, temperature=self._temperature, concurrency=0)
        asked = Asked(
            agent=self._kind,
            model=config.model.name if model_path is not None else "",
            files=files_digest(model_path) if model_path is not None else "",
            suites=[SuiteAsked(name=name, task_ids=ids) for name, ids in suites.items()],
            settings=msgspec.json.encode(settings).decode(),
        )
        self._file = SampleFile(self._folder.path)
        self._stack.push_async_callback(self._file.close)
        self._known = await asyncio.to_thread(self._file.begin, asked)
        if self._known:
            self._say(f"{len(self._known)} samples are there already")

    def _warn(self, text: str) -> None:
        self._emit(Warned(at_s=time.time(), text=text))

    def _emit(self, event: AnyEvent) -> None:
        self._tools.see(event)
        self._feed.emit(event)

    def _started(self, runtime: str, backend: str) -> RunStarted:
        return RunStarted(
            at_s=time.time(),
            name=self._folder.name,
            run_dir=str(self._folder.path),
            pid=os.getpid(),
            model=self._config.model.name if self._kind == "policy" else self._kind,
            backend=backend,
            runtime=runtime,
            algo="eval",
            mode="eval",
            max_steps=0,
            start_step=0,
            prompts_per_step=len(self._tasks),
            group_size=self._samples,
            seed=self._config.seed,
        )


def _model_name(name: str) -> str:
    """Short, and fit for a file's name: the last part of a path or of a hub's id."""
    last = re.split(r"[/\\]", name.rstrip("/\\"))[-1].removeprefix("package:")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-.") or "model"


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
        return "interrupted"
    return " ".join(str(error).split())[:300] or type(error).__name__
