"""One step, from its groups to its commit: the order of things, and nothing of how each is done.

Groups are fixed first; rollouts and backwards then run side by side until the step owes nothing; one commit, one
publish. What it measured becomes one row of metrics.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from sandboxes.shield import finish
from thundersync.config import Config
from thundersync.core.ledger import Ledger
from thundersync.core.objective import SeparableObjective
from thundersync.core.ready_queue import PartRoom
from thundersync.core.turn_ledger import TurnLedger
from thundersync.core.types import (
    Failed,
    FinalContent,
    GroupId,
    Rollout,
    RolloutId,
    SampledTurn,
    Task,
    TaskId,
    group_id,
    rollout_id,
)
from thundersync.errors import Diverged, StepWithoutScore
from thundersync.gate import Gate
from thundersync.generate.base import EngineStats, Generator, WeightArena
from thundersync.learn import messages as m
from thundersync.learn.link import WorkerLink
from thundersync.learn.stream import GradientStream
from thundersync.learn.turn_stream import Scorer, TurnStream
from thundersync.monitor.events import AnyEvent, StepCommitted, StepOpened, Warned, WeightsPublished
from thundersync.outcomes import step_metrics, tasks_without_score
from thundersync.recipe import kl_in_reward, measured_terms, objective_of, turn_schedule
from thundersync.rollout.runner import GroupPlan, GroupRunner
from thundersync.verify.audit import Auditor

R = TypeVar("R", bound=m.Reply)
NONFINITE_LIMIT = 3
SHARED_PREFIX_TOKENS = 16
"""A prefix shorter than this is not worth a block of its own."""


class StepResult(Struct, frozen=True, kw_only=True):
    """What `Engine.steps` yields after each step."""

    step: int
    policy_version: int
    """After the commit."""
    empty: bool
    """No optimizer step was made, the policy version stays: no group had signal, or (see the metric `nonfinite`) the
    gradient was not finite."""
    metrics: dict[str, float]
    rollouts: list[Rollout]


@dataclass(frozen=True)
class WorkedStep:
    """A step that owes nothing and is not committed."""

    stream: GradientStream | TurnStream
    groups: dict[GroupId, list[RolloutId]]
    prompts: dict[GroupId, list[int]]


@dataclass(frozen=True)
class _Before:
    """Where a step began."""

    at_s: float
    engines: list[EngineStats]
    policy_version: int


class StepDriver:
    """Runs steps one after another; holds the policy version and the running estimates of task times."""

    def __init__(
        self,
        config: Config,
        *,
        runner: GroupRunner,
        generators: Sequence[Generator],
        workers: Sequence[WorkerLink],
        shares_prompts: bool,
        prompt_ids: Callable[[Task], list[int]],
        room: PartRoom,
        policy_version: int,
        emit: Callable[[AnyEvent], None],
        keep: Callable[[int, Sequence[Rollout]], Awaitable[Path]],
        scorer: Scorer | None = None,
        auditor: Auditor | None = None,
        objective: SeparableObjective | None = None,
        missing: Callable[[], str] = lambda: "",
    ) -> None:
        """`room`: for parts of open cohorts, in each worker. `keep` writes the rollouts of a step that went wrong, and
        says where. With a `scorer`, turns are distilled instead of rewarded; an `auditor` looks at some steps right
        before their commit. `missing` says who is waited for outside the run, if anybody is."""
        self._config = config
        self._runner = runner
        self._generators = generators
        self._workers = list(workers)
        self._objective = objective or objective_of(config)
        self.shares_prompts = shares_prompts
        self._nonfinite_in_a_row = 0
        self._prompt_ids = prompt_ids
        self.room = room
        self._keep = keep
        self.scorer = scorer
        self._auditor = auditor
        self._missing = missing
        self._emit = emit
        self._expected_s: dict[TaskId, float] = {}
        self.policy_version = policy_version
        self.stream: GradientStream | TurnStream | None = None
        """Of the open step."""
        self.gate = Gate()
        """Whoever asks an engine something beside the step passes here: never while weights are published."""
        self._prompts_of_step: dict[GroupId, list[int]] = {}
        self.arena: WeightArena | None = None
        """What the engines have: the weights published last."""

    async def run(
        self,
        step: int,
        tasks: Sequence[Task],
        *,
        on_commit: Callable[[], None] = lambda: None,
        record: Callable[[StepResult], Awaitable[None]] | None = None,
    ) -> StepResult:
        """Open, work, commit, publish, `record`. Raises an ExceptionGroup of what broke, or StepWithoutScore.

        `on_commit` is told the moment the weights are those after this step. From there to the end of `record` all of
        it happens: a cancellation waits, or the run would hold weights that belong to no step it knows of.
        """
        before = _Before(time.monotonic(), [generator.stats() for generator in self._generators], self.policy_version)
        stream = (await self.work(step, tasks)).stream
        await self._refuse_outage(step, stream.rollouts)
        audited = {}
        if self._auditor is not None and self._auditor.wants(step) and not (stream.empty or stream.bad):
            audited = await self._auditor.audit(step, stream)
        self._learn_times(stream.rollouts)
        for told in tasks_without_score(stream.rollouts):
            self._warn(f"step {step}: {told}")

        async def end() -> StepResult:
            result = await self._end(step, stream, before, audited, on_commit)
            if record is not None:
                await record(result)
            return result

        return await finish(end(), limit_s=3 * self._config.stall_timeout_s)  # what it waits for has limits of its own

    async def _end(
        self,
        step: int,
        stream: GradientStream | TurnStream,
        before: _Before,
        audited: dict[str, float],
        on_commit: Callable[[], None],
    ) -> StepResult:
        """Commit and publish, and what the step came to."""
        worked_s = time.monotonic()
        committed, publish_s = await self._commit(step, stream, on_commit)
        empty = committed is None or not committed.finite
        step_s = time.monotonic() - before.at_s
        metrics = step_metrics(stream, groups=len(stream.ledger.groups), bound_to=before.policy_version)
        metrics |= stream.sums.metrics(measured_terms(self._config)) | audited
        engines = [(b, g.stats()) for b, g in zip(before.engines, self._generators, strict=True)]
        commit_s = committed.busy_s if committed is not None else 0.0
        metrics |= {
            "step": float(step),
            "policy_version": float(self.policy_version),
            "empty": float(empty),
            "nonfinite": float(bool(stream.bad) or (committed is not None and not committed.finite)),
            "step_s": step_s,
            "engine_busy": statistics.fmean((now.busy_s - then.busy_s) / step_s for then, now in engines),
            "trainer_busy": (stream.sums.pass_busy_s / len(self._workers) + commit_s) / step_s,
            "cached_tokens": float(sum(now.cached_tokens - then.cached_tokens for then, now in engines)),
            "commit_s": commit_s,
            "publish_s": publish_s,
            "between_s": time.monotonic() - worked_s,
            "grad_norm": committed.grad_norm if committed is not None else 0.0,
            "lr": committed.lr if committed is not None else 0.0,
            "trainer_memory_peak_gib": committed.memory_peak_gib if committed is not None else 0.0,
        }
        self._emit(
            StepCommitted(
                at_s=time.time(),
                step=step,
                policy_version=self.policy_version,
                empty=empty,
                metrics=metrics,
            )
        )
        rollouts, self.stream = stream.rollouts, None
        return StepResult(
            step=step, policy_version=self.policy_version, empty=empty, metrics=metrics, rollouts=rollouts
        )

    async def work(self, step: int, tasks: Sequence[Task]) -> WorkedStep:
        """Open a step and work it until it owes nothing; its gradient is then in the workers, and nothing is committed.

        Raises an ExceptionGroup of what broke.
        """
        algo = self._config.algo
        plans = self.plans(step, tasks)
        prompts = self._prompts_of_step = await asyncio.to_thread(self._prompts, plans)
        stream = self.stream = self._open(plans, prompts)
        self._emit(
            StepOpened(
                at_s=time.time(),
                step=step,
                policy_version=self.policy_version,
                group_ids=[plan.group_id for plan in plans],
                task_ids=[plan.task.task_id for plan in plans],
                group_size=algo.group_size,
                mode=self._config.stream.mode,
            )
        )
        async with asyncio.TaskGroup() as tasks_of_step:
            tasks_of_step.create_task(stream.run(), name="gradient-stream")
            tasks_of_step.create_task(
                self._runner.run(
                    plans,
                    policy_version=self.policy_version,
                    on_rollout=stream.land,
                    on_retry=stream.attempt_ended,
                    expected_s=dict(self._expected_s),
                ),
                name="rollouts",
            )
        return WorkedStep(stream=stream, groups={plan.group_id: plan.rollout_ids for plan in plans}, prompts=prompts)

    def plans(self, step: int, tasks: Sequence[Task]) -> list[GroupPlan]:
        """The groups of a step, fixed before anything runs."""
        return [_plan(step, index, task, self._config.algo.group_size) for index, task in enumerate(tasks)]

    def opening(self, group_id: GroupId, prompt_ids: Sequence[int]) -> None:
        """What a rollout of the open step shows the model first, where nobody knew when the step opened: the first
        one's is taken for its group's, and computed once for all rollouts that begin with it."""
        if not self._prompts_of_step.get(group_id, prompt_ids):
            self._prompts_of_step[group_id] = list(prompt_ids)

    def sampled(self, turn: SampledTurn) -> None:
        """A turn of the open step was sampled: its teacher is asked at once."""
        assert isinstance(self.stream, TurnStream)
        self.stream.sampled(turn)

    def content(self, content: FinalContent) -> None:
        """The tokens of one of the open step's rollouts are final: its backward may begin while its checker runs."""
        assert isinstance(self.stream, GradientStream)
        self.stream.content(content)

    def _open(self, plans: Sequence[GroupPlan], prompts: Mapping[GroupId, list[int]]) -> GradientStream | TurnStream:
        """The step's stream: of turns where a teacher scores them, of rollouts where a checker rewards them."""
        algo, groups = self._config.algo, {plan.group_id: plan.rollout_ids for plan in plans}
        prefix = shared_prefix(list(prompts.values()))
        if self.scorer is not None:
            return TurnStream(
                TurnLedger(groups),
                self._workers,
                objective=self._objective,
                score=self.scorer,
                policy_version=self.policy_version,
                prompts=prompts,
                prefix=prefix,
                schedule=turn_schedule(self._config, may_be_cut=self.shares_prompts),
                mode=self._config.stream.mode,
                max_tokens=self._config.trainer.micro_batch_tokens,
                longest=self._config.model.max_model_len,
                stall_timeout_s=self._config.stall_timeout_s,
                emit=self._emit,
                missing=self._missing,
            )
        ledger = Ledger(
            groups,
            objective=self._objective,
            min_group_size=algo.group_size if algo.on_failure == "drop" else algo.min_group_size,
            skip_flat=algo.zero_variance == "skip",
        )
        return GradientStream(
            ledger,
            self._workers,
            policy_version=self.policy_version,
            prompts=prompts,
            prefix=prefix,
            shares_prompts=self.shares_prompts,
            mode=self._config.stream.mode,
            max_tokens=self._config.trainer.micro_batch_tokens,
            room=self.room,
            stall_timeout_s=self._config.stall_timeout_s,
            emit=self._emit,
            kl_in_reward=kl_in_reward(self._config),
            missing=self._missing,
        )

    async def publish(self, arena: WeightArena) -> float:
        """Bring every engine to the trainer's weights as the current policy version. Returns seconds."""
        async with self.gate.closed():
            began_s = time.monotonic()
            async with asyncio.TaskGroup() as publishing:
                for generator in self._generators:
                    publishing.create_task(generator.publish(arena, version=self.policy_version))
            self.arena = arena
            seconds = time.monotonic() - began_s
        self._emit(WeightsPublished(at_s=time.time(), policy_version=self.policy_version, publish_s=seconds))
        return seconds

    async def _commit(
        self, step: int, stream: GradientStream | TurnStream, on_commit: Callable[[], None]
    ) -> tuple[m.Committed | None, float]:
        """The one optimizer step and its publish; None for a step without signal, or with a pass that is not finite.

        A gradient that is not finite changes nothing; several in a row end the run. Raises: Diverged.
        """
        if stream.empty or stream.bad:
            await self._ask_all(m.Discard(), m.Done)
            on_commit()
            if stream.bad:
                await self._not_finite(step, f"the passes of {', '.join(stream.bad)}", stream.rollouts)
            return None, 0.0
        answers = await self._ask_all(m.Commit(scales=stream.scales()), m.Committed)
        on_commit()
        committed = answers[0]
        if committed.finite:
            assert committed.arena is not None
            self._nonfinite_in_a_row = 0
            self.policy_version += 1
            return committed, await self.publish(committed.arena)
        await self._not_finite(step, "the gradient", stream.rollouts)
        return committed, 0.0

    async def _ask_all(self, request: m.AnyRequest, expected: type[R]) -> list[R]:
        """The same request to every worker at once: a commit is theirs together."""
        async with asyncio.TaskGroup() as asking:
            calls = [
                asking.create_task(worker.call(request, expected, limit_s=self._config.stall_timeout_s))
                for worker in self._workers
            ]
        return [call.result() for call in calls]

    async def _refuse_outage(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """A step in which nothing could be scored is no step: something outside is down for everybody."""
        failures = [rollout.outcome for rollout in rollouts if isinstance(rollout.outcome, Failed)]
        if failures and len(failures) == len(rollouts):
            kept = await self._keep(step, rollouts)
            kinds = Counter(failure.reason for failure in failures)
            raise StepWithoutScore(
                f"not one of the {len(failures)} rollouts of step {step} could be scored "
                f"({', '.join(f'{count} x {kind}' for kind, count in kinds.items())}); the first: {failures[0].detail}",
                remedy=f"Mend that (all of them: {kept}), then continue with --resume: the step runs again.",
            )

    async def _not_finite(self, step: int, what: str, rollouts: Sequence[Rollout]) -> None:
        self._nonfinite_in_a_row += 1
        kept = await self._keep(step, rollouts)
        self._warn(
            f"step {step}: {what} had values that are not finite; nothing was changed, the last weights stay; "
            f"the step's tokens are in {kept}"
        )
        if self._nonfinite_in_a_row == NONFINITE_LIMIT:
            raise Diverged(
                f"{NONFINITE_LIMIT} steps in a row had values that are not finite, the last one step {step}: {what}",
                remedy=f"Lower optim.lr, and look at the rollouts in {kept}; --resume continues from the last commit.",
            )

    def _prompts(self, plans: Sequence[GroupPlan]) -> dict[GroupId, list[int]]:
        return {plan.group_id: self._prompt_ids(plan.task) for plan in plans}

    def _learn_times(self, rollouts: Sequence[Rollout]) -> None:
        """Running estimate of a rollout's seconds per task, so that the longest start first next time."""
        for rollout in rollouts:
            seconds = rollout.generate_s + rollout.tool_s + rollout.score_s
            known = self._expected_s.get(rollout.task_id, seconds)
            self._expected_s[rollout.task_id] = 0.7 * known + 0.3 * seconds

    def _warn(self, text: str) -> None:
        self._emit(Warned(at_s=time.time(), text=text))


def shared_prefix(prompts: Sequence[list[int]]) -> list[int]:
    """Tokens all prompts of a step begin with (system prompt, worked examples); empty if not worth a block."""
    if len(prompts) < 2:
        return []
    shortest, longest = min(prompts), max(prompts)  # in lexical order: what these two share, all share
    length = 0
    # The last token of a prompt predicts the rows' first tokens, so it never belongs to a shared block.
    most = min(map(len, prompts)) - 1
    while length < most and shortest[length] == longest[length]:
        length += 1
    return shortest[:length] if length >= SHARED_PREFIX_TOKENS else []


def _plan(step: int, index: int, task: Task, size: int) -> GroupPlan:
    group = group_id(step, index)
    return GroupPlan(group_id=group, task=task, rollout_ids=[rollout_id(group, i) for i in range(size)])
