"""One rollout: a task's sandbox, the conversation turn by turn, then the checker's verdict.

Place in the flow: the runner gives it a task, an engine and a policy version; it gives back a `Rollout`. Knows nothing
of groups, advantages or training.

Whatever fails outside the policy (sandbox, engine, checker) becomes the outcome `Failed`; whatever the policy does,
and every limit it runs into, is scored. Errors are left for broken invariants (a stale policy version, a template that
refuses the roles) and for cancellation, and even then the sandbox is closed.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from sandboxes.base import Runtime, Sandbox, SandboxSpec
from sandboxes.errors import SandboxError
from sandboxes.shield import finish
from thundersync.config import RolloutConfig
from thundersync.core.types import (
    Failed,
    FinalContent,
    GroupId,
    Message,
    Outcome,
    Rollout,
    RolloutId,
    Scored,
    StopReason,
    Task,
)
from thundersync.errors import EngineFailed
from thundersync.generate.base import Generator, Sampling
from thundersync.monitor.events import RolloutScored, RolloutStarted, ScoringStarted, Warned
from thundersync.rollout.dialogue import Dialogue, Renderer
from thundersync.rollout.turns import Attempt, Broken, Clock, Conversation, Emit, OnTurn, in_time
from thundersync.score.reward import CheckFailed, RewardChecker

TTL_MARGIN_S = 600.0
"""A sandbox outlives all the limits of its rollout by this, so that it never ends by itself under a live owner."""


OnContent = Callable[[FinalContent], None]


class ShellAgent:
    """Runs rollouts, any number at once; holds no state of any of them.

    `prompt` opens every conversation and the task's instruction follows it. `stop` are stop strings of each reply.
    `emit` gets the feed's events as they happen. `clock` gives monotonic seconds.
    """

    def __init__(
        self,
        *,
        renderer: Renderer,
        runtime: Runtime,
        checker: RewardChecker,
        config: RolloutConfig,
        prompt: Sequence[Message],
        emit: Emit,
        stop: tuple[str, ...] = (),
        pids: int = 256,
        labels: Mapping[str, str] | None = None,
        grace_s: float = 30.0,
        clock: Clock = time.monotonic,
        on_turn: OnTurn | None = None,
        on_content: OnContent | None = None,
    ) -> None:
        """`on_content` is told of a rollout whose turns are over, before its checker runs.

        `grace_s`: how long beyond its own limit a sandbox may take to answer or close before it counts as broken.
        """
        self._renderer = renderer
        self._runtime = runtime
        self._checker = checker
        self._config = config
        self._prompt = list(prompt)
        self._emit = emit
        self._sampling = Sampling(temperature=config.temperature, max_tokens=config.max_tokens, stop=stop)
        self._pids = pids
        self._labels = dict(labels or {})
        self._grace_s = grace_s
        self._clock = clock
        self._on_turn = on_turn
        self._on_content = on_content

    async def run(
        self,
        task: Task,
        *,
        rollout_id: RolloutId,
        group_id: GroupId,
        generator: Generator,
        policy_version: int,
        attempt: int = 1,
    ) -> Rollout:
        """One attempt at `task`, with every turn on `generator`.

        Raises: StaleRollout, ChatTemplateError. A world that fails is an outcome, not an error.
        """
        started_s = time.time()
        self._emit(
            RolloutStarted(
                at_s=started_s, rollout_id=rollout_id, group_id=group_id, task_id=task.task_id, attempt=attempt
            )
        )
        live = Attempt(
            task,
            rollout_id=rollout_id,
            group_id=group_id,
            generator=generator,
            policy_version=policy_version,
            number=attempt,
        )
        outcome: Outcome
        try:
            outcome = await self._attempt(live)
        except SandboxError as error:
            outcome = Failed(reason="sandbox", detail=str(error))
        except CheckFailed as error:
            outcome = Failed(reason=error.reason, detail=error.message)
        except EngineFailed as error:
            outcome = Failed(reason="engine", detail=error.message)
        except Broken as error:
            outcome = error.failed
        return _rollout(live, outcome, started_s=started_s)

    async def _attempt(self, live: Attempt) -> Outcome:
        opening = [*self._prompt, Message(role="user", content=live.task.instruction)]
        # Tokenising a long prompt would hold the loop.
        live.dialogue = await asyncio.to_thread(Dialogue, self._renderer, opening)
        if not live.dialogue.prompt_ids:
            raise Broken("agent", "the chat template made an empty prompt")
        async with self._sandbox(live) as sandbox:
            conversation = Conversation(
                live,
                live.dialogue,
                sandbox,
                config=self._config,
                sampling=self._sampling,
                tools=bool(self._renderer.tools),
                limit_s=self._limit_s(live.task),
                grace_s=self._grace_s,
                emit=self._emit,
                clock=self._clock,
                on_turn=self._on_turn,
            )
            stop = await conversation.run()
            if self._on_content is not None:
                self._on_content(_content(live, live.dialogue))
            return await self._score(live, sandbox, stop)

    async def _score(self, live: Attempt, sandbox: Sandbox, stop: StopReason) -> Outcome:
        self._emit(ScoringStarted(at_s=time.time(), rollout_id=live.rollout_id))
        started_s = self._clock()
        try:
            verdict = await self._checker.score(sandbox, live.task)
        finally:
            live.score_s = self._clock() - started_s
        self._emit(
            RolloutScored(
                at_s=time.time(),
                rollout_id=live.rollout_id,
                group_id=live.group_id,
                reward=verdict.reward,
                stop=stop,
                turns=len(live.turns),
                sampled_tokens=sum(turn.end - turn.start for turn in live.turns),
                score_s=live.score_s,
            )
        )
        return Scored(reward=verdict.reward, rewards=verdict.rewards, stop=stop)

    @asynccontextmanager
    async def _sandbox(self, live: Attempt) -> AsyncIterator[Sandbox]:
        task = live.task
        spec = SandboxSpec(
            image=task.image.name,
            context=task.image.context,
            workdir=task.workdir,
            env=task.env,
            network=task.network,
            cpus=task.cpus,
            memory_mib=task.memory_mib,
            pids=self._pids,
            build_timeout_s=task.build_timeout_s,
            ttl_s=self._limit_s(task) + task.checker.timeout_s + TTL_MARGIN_S,
            labels={**self._labels, "rollout": live.rollout_id},
        )
        start_limit_s = task.build_timeout_s + self._grace_s
        sandbox = await in_time(self._runtime.start(spec), start_limit_s, "start")
        try:
            # Repairs start from a state that is made in the sandbox: the bug in, the repository's past out.
            await in_time(self._checker.prepare(sandbox, task), start_limit_s, "be prepared")
            yield sandbox
        finally:
            try:
                await finish(sandbox.close(), limit_s=self._grace_s)
            except (SandboxError, TimeoutError) as error:
                # The verdict stands; the runtime still owns what is left and removes it when it closes.
                text = f"sandbox {sandbox.sandbox_id} of rollout {live.rollout_id} did not close: {error}"
                self._emit(Warned(at_s=time.time(), text=text))

    def _limit_s(self, task: Task) -> float:
        """Wall clock of a rollout's turns: the run's limit, or the task's own where that is shorter."""
        return min(self._config.timeout_s, task.agent_timeout_s or math.inf)


def _content(attempt: Attempt, dialogue: Dialogue) -> FinalContent:
    return FinalContent(
        rollout_id=attempt.rollout_id,
        group_id=attempt.group_id,
        attempt=attempt.number,
        sequences=dialogue.sequences(),
        policy_version=attempt.policy_version,
    )


def _rollout(attempt: Attempt, outcome: Outcome, *, started_s: float) -> Rollout:
    dialogue = attempt.dialogue
    return Rollout(
        rollout_id=attempt.rollout_id,
        group_id=attempt.group_id,
        task_id=attempt.task.task_id,
        policy_version=attempt.policy_version,
        messages=dialogue.messages if dialogue else [],
        sequences=dialogue.sequences() if dialogue else [],
        turns=attempt.turns,
        outcome=outcome,
        started_s=started_s,
        generate_s=sum(turn.generate_s for turn in attempt.turns),
        tool_s=sum(turn.tool_s for turn in attempt.turns),
        score_s=attempt.score_s,
        attempt=attempt.number,
    )
