"""Rollouts of an agent function: `async def agent(task, policy, sandbox) -> Outcome`, written by whoever embeds us.

Place in the flow: as `agent.ShellAgent`, for the runner. The function decides what the model is shown and what is done
with its replies; here it gets its policy and its sandbox, its limits, and its judge. Knows nothing of groups.

Whatever it raises is the world's failure, never a reward of zero; a limit that it meets ends the rollout, which is then
judged as it is.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from sandboxes.base import Runtime, Sandbox
from sandboxes.errors import SandboxError
from thundersync.config import RolloutConfig
from thundersync.core.types import (
    Failed,
    GroupId,
    Message,
    Outcome,
    Rollout,
    RolloutId,
    Scored,
    StopReason,
    Task,
)
from thundersync.errors import EngineFailed, StaleRollout, ThundersyncError
from thundersync.generate.base import Generator, Sampling
from thundersync.monitor.events import ScoringStarted, Warned
from thundersync.rollout.agent import OnContent
from thundersync.rollout.attempt import Attempt, Broken, Clock, Emit, OnTurn, outcome_of
from thundersync.rollout.dialogue import ChatTemplateError, Renderer
from thundersync.rollout.lazy_sandbox import LazySandbox, ToldSandbox
from thundersync.rollout.policy import Policy
from thundersync.rollout.sampler import LimitReached, Sampler, stopped_by
from thundersync.rollout.worlds import Worlds
from thundersync.score.judge import Judge, described
from thundersync.score.reward import CheckFailed, RewardChecker

AgentFunction: TypeAlias = Callable[[Task, Policy, Sandbox], Awaitable[Outcome | None]]
"""Gives an outcome where it has judged itself, and None where the rollout is to be judged by the run's reward."""


class FunctionAgent:
    """Runs rollouts of one agent function, any number at once.

    `checker` prepares the sandboxes, `judge` says what the rollouts are worth. `prompt` stands before the task's
    instruction in `policy.opening`.
    """

    def __init__(
        self,
        function: AgentFunction,
        *,
        renderer: Renderer,
        runtime: Runtime,
        checker: RewardChecker,
        judge: Judge,
        config: RolloutConfig,
        prompt: Sequence[Message],
        emit: Emit,
        pids: int = 256,
        labels: Mapping[str, str] | None = None,
        grace_s: float = 30.0,
        clock: Clock = time.monotonic,
        on_turn: OnTurn | None = None,
        on_content: OnContent | None = None,
    ) -> None:
        self._function = function
        self._renderer = renderer
        self.worlds = Worlds(
            runtime,
            checker,
            timeout_s=config.timeout_s,
            pids=pids,
            labels=labels or {},
            grace_s=grace_s,
            emit=emit,
            clock=clock,
        )
        """Where its sandboxes come from."""
        self._judge = judge
        self._config = config
        self._prompt = list(prompt)
        self._emit = emit
        self._sampling = Sampling(temperature=config.temperature, max_tokens=config.max_tokens, stop=config.stop)
        self._clock = clock
        self._on_turn = on_turn
        self._on_content = on_content
        self._told_of_forks = False
        self._alive: dict[RolloutId, Attempt] = {}

    def alive(self, rollout_id: RolloutId) -> Attempt | None:
        """The attempt that runs under this name now, for whoever looks; it goes on meanwhile."""
        return self._alive.get(rollout_id)

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
        """One attempt at `task`.

        Raises: StaleRollout, ChatTemplateError, and ThundersyncError for a function that gives neither an outcome nor
        None. A world that fails is an outcome.
        """
        live = Attempt(
            task,
            rollout_id=rollout_id,
            group_id=group_id,
            generator=generator,
            policy_version=policy_version,
            number=attempt,
        )
        self._emit(live.started())
        limit_s = self.worlds.limit_s(task)
        sampler = Sampler(
            live,
            max_turns=self._config.max_turns,
            deadline_s=self._clock() + limit_s,
            limit_s=limit_s,
            emit=self._emit,
            clock=self._clock,
            on_turn=self._on_turn,
        )
        opening = [*self._prompt, Message(role="user", content=task.instruction)]
        policy = live.speaker = Policy(sampler, self._renderer, sampling=self._sampling, opening=opening)
        sandbox = LazySandbox(lambda: self.worlds.open(task, rollout_id), rollout_id=rollout_id)
        self._alive[rollout_id] = live
        try:
            outcome = await outcome_of(self._attempt(live, policy, sandbox, limit_s))
        finally:
            self._alive.pop(rollout_id, None)
            policy.close()
            live.origin = sandbox.origin
            await sandbox.close()
        self._tell_forks(policy, rollout_id)
        return live.rollout(outcome, await asyncio.to_thread(live.said))

    async def _attempt(self, live: Attempt, policy: Policy, sandbox: LazySandbox, limit_s: float) -> Outcome:
        told = ToldSandbox(
            sandbox,
            live.turns,
            rollout_id=live.rollout_id,
            limit_chars=self._config.output_limit_chars,
            emit=self._emit,
        )
        found = await self._converse(live, policy, told, limit_s)
        policy.close()
        if found == "time" and sandbox.abandoned:  # a world that was not there is no fault of the policy's
            raise Broken("sandbox", f"the sandbox had not started when the rollout's {limit_s:g} s were over")
        if isinstance(found, Failed):
            return found
        if not live.turns:
            # Nothing was sampled, so there is nothing that a reward could be about.
            raise Broken("agent", "the agent function ended before the policy had said anything")
        if isinstance(found, Scored):
            if not math.isfinite(found.reward):
                return Failed(reason="no_reward", detail=f"the agent function gave a reward of {found.reward}")
            self._emit(live.scored(found))
            return found
        if self._on_content is not None:
            self._on_content(live.content(policy.sequences()))
        return await self._score(live, policy, sandbox, found)

    async def _converse(
        self, live: Attempt, policy: Policy, sandbox: Sandbox, limit_s: float
    ) -> Scored | Failed | StopReason:
        """The function's own outcome, or why it ended where it is to be judged."""
        try:
            async with asyncio.timeout(limit_s) as limit:
                given = await self._function(live.task, policy, sandbox)
        except LimitReached as reached:
            return stopped_by(reached, live)
        except (StaleRollout, ChatTemplateError, SandboxError, EngineFailed, CheckFailed, Broken):
            raise
        except Exception as error:  # a function of somebody else's may raise anything
            if isinstance(error, TimeoutError) and limit.expired():
                if not live.turns:
                    raise Broken("function", f"the agent function had said nothing within {limit_s:g} s") from error
                return "time"
            raise Broken("function", f"the agent function raised: {described(error)}") from error
        if given is None:
            return "submitted"
        if isinstance(given, Scored | Failed):
            return given
        raise ThundersyncError(
            f"the agent function gave {given!r}",
            remedy="Return Scored(reward=...) or Failed(...), or nothing to have the run's reward judge the rollout.",
        )

    async def _score(self, live: Attempt, policy: Policy, sandbox: Sandbox, stop: StopReason) -> Outcome:
        self._emit(ScoringStarted(at_s=time.time(), rollout_id=live.rollout_id))
        rollout = live.unscored(stop, await asyncio.to_thread(live.said))
        started_s = self._clock()
        try:
            verdict = await self._judge.judge(sandbox, live.task, rollout)
        finally:
            live.score_s = self._clock() - started_s
        outcome = Scored(reward=verdict.reward, rewards=verdict.rewards, stop=stop, change=verdict.change)
        self._emit(live.scored(outcome))
        return outcome

    def _tell_forks(self, policy: Policy, rollout_id: RolloutId) -> None:
        """Once a run: it is exact, but what is learned twice costs twice."""
        if policy.forks and not self._told_of_forks:
            self._told_of_forks = True
            text = (
                f"rollout {rollout_id}: a history with replies in it did not extend what had been sampled, so it went "
                "on in a sequence of its own (exact, but longer to learn); append reply.message unchanged to avoid it"
            )
            self._emit(Warned(at_s=time.time(), text=text))
