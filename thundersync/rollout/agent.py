"""One rollout: a task's sandbox, the conversation turn by turn, then the checker's verdict.

Place in the flow: the runner gives it a task, an engine and a policy version; it gives back a `Rollout`. Knows nothing
of groups, advantages or training.

Whatever fails outside the policy (sandbox, engine, checker) becomes the outcome `Failed`; whatever the policy does,
and every limit it runs into, is scored. Errors are left for broken invariants (a stale policy version, a template that
refuses the roles) and for cancellation, and even then the sandbox is closed.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from sandboxes.base import Runtime, Sandbox
from thundersync.config import RolloutConfig
from thundersync.core.types import (
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
from thundersync.generate.base import Generator, Sampling
from thundersync.monitor.events import ScoringStarted
from thundersync.rollout.attempt import Attempt, Broken, Clock, Emit, OnTurn, outcome_of
from thundersync.rollout.dialogue import Dialogue, Renderer
from thundersync.rollout.manners import Manners, OnePrompt
from thundersync.rollout.turns import Conversation
from thundersync.rollout.worlds import Worlds
from thundersync.score.judge import CheckerJudge, Judge
from thundersync.score.reward import RewardChecker, Verdict
from thundersync.score.stages import in_stages

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
        prompt: Manners | Sequence[Message],
        emit: Emit,
        stop: tuple[str, ...] = (),
        pids: int = 256,
        labels: Mapping[str, str] | None = None,
        grace_s: float = 30.0,
        clock: Clock = time.monotonic,
        on_turn: OnTurn | None = None,
        on_content: OnContent | None = None,
        judge: Judge | None = None,
    ) -> None:
        """`judge` says what a rollout is worth; by default the task's checker. `on_content` is told of a rollout whose
        turns are over, before that.

        `grace_s`: how long beyond its own limit a sandbox may take to answer or close before it counts as broken.
        """
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
        self._checker = checker
        self._judge = judge or CheckerJudge(checker)
        self._config = config
        self._manners = (
            prompt if isinstance(prompt, Manners) else OnePrompt(prompt, limit_chars=config.output_limit_chars)
        )
        self._emit = emit
        self._sampling = Sampling(temperature=config.temperature, max_tokens=config.max_tokens, stop=stop)
        self._grace_s = grace_s
        self._clock = clock
        self._on_turn = on_turn
        self._on_content = on_content
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
        """One attempt at `task`, with every turn on `generator`.

        Raises: StaleRollout, ChatTemplateError. A world that fails is an outcome, not an error.
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
        self._alive[rollout_id] = live
        try:
            outcome = await outcome_of(self._attempt(live))
        finally:
            self._alive.pop(rollout_id, None)
        return live.rollout(outcome, live.said())

    async def _attempt(self, live: Attempt) -> Outcome:
        opening = self._manners.opening(live.task)
        # Tokenising a long prompt would hold the loop.
        dialogue = live.speaker = await asyncio.to_thread(Dialogue, self._renderer, opening)
        if not dialogue.prompt_ids:
            raise Broken("agent", "the chat template made an empty prompt")
        async with self.worlds.open(live.task, live.rollout_id) as sandbox:
            live.origin = sandbox.origin
            talk = _Talk(self.worlds.limit_s(live.task))
            verdict = await in_stages(
                sandbox,
                live.task,
                act=lambda task, last: self._converse(live, dialogue, sandbox, task, talk, last=last),
                judge=lambda task: self._score(live, sandbox, task, talk.stop),
                checker=self._checker,
            )
        scored = Scored(reward=verdict.reward, rewards=verdict.rewards, stop=talk.stop, change=verdict.change)
        self._emit(live.scored(scored))
        return scored

    async def _converse(
        self, live: Attempt, dialogue: Dialogue, sandbox: Sandbox, task: Task, talk: "_Talk", *, last: bool
    ) -> None:
        """The turns of one stage; most tasks have one. Those that nothing is left for are judged as they stand."""
        if live.turns and talk.goes_on and len(live.turns) < self._config.max_turns:
            await asyncio.to_thread(dialogue.follow, Message(role="user", content=task.instruction))
        if not live.turns or (talk.goes_on and len(live.turns) < self._config.max_turns):
            conversation = Conversation(
                live,
                dialogue,
                self._manners.hands(task, sandbox, tools=bool(self._renderer.tools)),
                config=self._config,
                sampling=self._sampling,
                limit_s=min(talk.left_s, task.agent_timeout_s or talk.left_s),
                grace_s=self._grace_s,
                emit=self._emit,
                clock=self._clock,
                on_turn=self._on_turn,
            )
            began_s = self._clock()
            talk.stop = await conversation.run()
            talk.left_s -= self._clock() - began_s
        if last and self._on_content is not None:
            self._on_content(live.content(dialogue.sequences()))

    async def _score(self, live: Attempt, sandbox: Sandbox, task: Task, stop: StopReason) -> Verdict:
        self._emit(ScoringStarted(at_s=time.time(), rollout_id=live.rollout_id))
        started_s = self._clock()
        try:
            return await self._judge.judge(sandbox, task, live.unscored(stop, live.said()))
        finally:
            live.score_s += self._clock() - started_s


class _Talk:
    """How much talking is left for the stages to come, and why the last talk ended."""

    def __init__(self, limit_s: float) -> None:
        self.left_s = limit_s
        self.stop: StopReason = "submitted"

    @property
    def goes_on(self) -> bool:
        return self.left_s > 0 and self.stop != "context"
