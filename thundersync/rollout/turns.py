"""The turns of one rollout: sample a reply, run its command, tell the model what came back; until something ends it.

Place in the flow: the middle of `agent.ShellAgent.run`, between a started sandbox and the checker. Knows nothing of how
sandboxes start, how rewards are made, or of other rollouts.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, TypeVar

import msgspec

from sandboxes.base import Command, Sandbox
from thundersync.config import RolloutConfig
from thundersync.core.types import (
    Failed,
    FailureKind,
    FinishReason,
    GroupId,
    Message,
    RolloutId,
    SampledTurn,
    StopReason,
    Task,
    Turn,
)
from thundersync.errors import EngineFailed, StaleRollout
from thundersync.generate.base import Generation, Generator, Sampling
from thundersync.monitor.events import AnyEvent, ToolFinished, ToolStarted, TurnGenerated, TurnStarted
from thundersync.rollout.dialogue import Dialogue
from thundersync.rollout.protocol import Action, NoAction, correction, observation, parse_reply

Emit = Callable[[AnyEvent], None]
Clock = Callable[[], float]
OnTurn = Callable[[SampledTurn], None]
"""Told of every turn the moment it was sampled, before its command runs."""
T = TypeVar("T")

COMMAND_ENV: Mapping[str, str] = {
    # For programs that would wait for a key, or fill the context with progress bars.
    "PAGER": "cat",
    "MANPAGER": "cat",
    "GIT_PAGER": "cat",
    "LESS": "-R",
    "PIP_PROGRESS_BAR": "off",
    "TQDM_DISABLE": "1",
    "DEBIAN_FRONTEND": "noninteractive",
}


class Broken(Exception):
    """Carries a failed outcome out of a rollout, up to where the rollout is put together."""

    def __init__(self, reason: FailureKind, detail: str) -> None:
        super().__init__(detail)
        self.failed = Failed(reason=reason, detail=detail)


class Attempt:
    """One attempt at a task while it runs; whatever ends it, this is what it leaves."""

    def __init__(
        self,
        task: Task,
        *,
        rollout_id: RolloutId,
        group_id: GroupId,
        generator: Generator,
        policy_version: int,
        number: int,
    ) -> None:
        self.task = task
        self.rollout_id = rollout_id
        self.group_id = group_id
        self.generator = generator
        self.policy_version = policy_version
        self.number = number
        self.dialogue: Dialogue | None = None
        self.turns: list[Turn] = []
        self.score_s = 0.0


class Conversation:
    """Drives one attempt's turns. `limit_s` is the wall clock for all of them, from now on.

    `grace_s`: how long beyond a command's own limit the sandbox may take to answer before it counts as broken.
    """

    def __init__(
        self,
        attempt: Attempt,
        dialogue: Dialogue,
        sandbox: Sandbox,
        *,
        config: RolloutConfig,
        sampling: Sampling,
        tools: bool,
        limit_s: float,
        grace_s: float,
        emit: Emit,
        clock: Clock,
        on_turn: OnTurn | None = None,
    ) -> None:
        self._on_turn = on_turn
        self._attempt = attempt
        self._dialogue = dialogue
        self._sandbox = sandbox
        self._config = config
        self._sampling = sampling
        self._tools = tools
        self._limit_s = limit_s
        self._grace_s = grace_s
        self._emit = emit
        self._clock = clock
        self._deadline_s = clock() + limit_s

    async def run(self) -> StopReason:
        """Turn after turn until one of the reasons to stop; the last command has run by then.

        Raises: StaleRollout, EngineFailed, SandboxError, Broken.
        """
        idle = 0  # turns in a row without an action
        for index in range(self._config.max_turns):
            reply = await self._sample(index)
            if not isinstance(reply, Message):
                return reply
            finish_reason = self._turns[-1].finish_reason
            stop: StopReason | None
            match parse_reply(reply.content, tools=self._tools):
                case Action() as action:
                    idle = 0
                    answer = await self._act(index, action)
                    stop = "submitted" if action.submit else "context" if finish_reason == "context" else None
                case NoAction() as why:
                    idle += 1
                    answer = Message(role="user", content=correction(why))
                    stop = _CUT.get(finish_reason) or ("no_action" if idle == 2 else None)
            if stop is not None:
                return stop
            if self._clock() >= self._deadline_s:
                return "time"
            if index + 1 < self._config.max_turns:
                await asyncio.to_thread(self._dialogue.follow, answer)
        return "max_turns"

    @property
    def _turns(self) -> list[Turn]:
        return self._attempt.turns

    async def _sample(self, index: int) -> Message | StopReason:
        """The next reply, or why there is none."""
        prompt_ids = self._dialogue.prompt_ids
        rollout_id = self._attempt.rollout_id
        self._emit(TurnStarted(at_s=time.time(), rollout_id=rollout_id, turn=index))
        started_s = self._clock()
        try:
            async with asyncio.timeout(max(0.0, self._deadline_s - started_s)):
                generation = await self._attempt.generator.generate(
                    prompt_ids, self._sampling, request_id=f"{rollout_id}/{self._attempt.number}/{index}"
                )
        except TimeoutError:
            return self._without_reply("time", "engine", f"the engine gave no reply within {self._limit_s:g} s")
        generate_s = self._clock() - started_s
        self._check(generation)
        if not generation.token_ids:
            detail = f"a prompt of {len(prompt_ids)} tokens leaves no room for a reply"
            return self._without_reply("context", "agent", detail)
        sequence = self._dialogue.sequence_index
        text = self._dialogue.reply(generation.token_ids, generation.logprobs)
        turn = Turn(
            index=index,
            sequence=sequence,
            start=len(prompt_ids),
            end=len(prompt_ids) + len(generation.token_ids),
            finish_reason=generation.finish_reason,
            policy_version=generation.policy_version,
            generate_s=generate_s,
            cached_tokens=generation.cached_tokens,
        )
        self._turns.append(turn)
        self._emit(
            TurnGenerated(
                at_s=time.time(),
                rollout_id=rollout_id,
                turn=index,
                sampled_tokens=len(generation.token_ids),
                prompt_tokens=len(prompt_ids),
                cached_tokens=generation.cached_tokens,
                generate_s=generate_s,
                finish_reason=generation.finish_reason,
            )
        )
        if self._on_turn is not None:
            self._on_turn(self._sampled(turn, generation))
        return Message(role="assistant", content=text)

    def _sampled(self, turn: Turn, generation: Generation) -> SampledTurn:
        attempt, sequence = self._attempt, self._dialogue.sequences()[turn.sequence]
        return SampledTurn(
            rollout_id=attempt.rollout_id,
            group_id=attempt.group_id,
            task_id=attempt.task.task_id,
            attempt=attempt.number,
            turn=turn.index,
            sequence=turn.sequence,
            token_ids=sequence.token_ids[: turn.end],
            start=turn.start,
            end=turn.end,
            logprobs=generation.logprobs,
            prompt_tokens=self._opening_in(sequence.token_ids),
            policy_version=turn.policy_version,
        )

    def _opening_in(self, token_ids: list[int]) -> int:
        """Tokens of the rollout's opening prompt if the sequence begins with it, else 0 (a history was rewritten)."""
        first = self._dialogue.sequences()[0]
        opening = first.token_ids[: first.prompt_tokens]
        return len(opening) if token_ids[: len(opening)] == opening else 0

    def _check(self, generation: Generation) -> None:
        bound_to = self._attempt.policy_version
        if generation.policy_version != bound_to:
            raise StaleRollout(self._attempt.rollout_id, made_by=generation.policy_version, bound_to=bound_to)
        if generation.finish_reason == "abort":
            raise EngineFailed("the engine aborted a reply that nobody had cancelled")
        ids, logprobs = generation.token_ids, generation.logprobs
        if len(ids) != len(logprobs):
            raise EngineFailed(f"the engine gave {len(ids)} token ids with {len(logprobs)} logprobs")
        if not ids and generation.finish_reason != "context":
            raise EngineFailed(f"the engine gave an empty reply with finish reason {generation.finish_reason!r}")
        if not all(map(math.isfinite, logprobs)):
            raise Broken("nonfinite", "the engine gave a logprob that is not finite")

    def _without_reply(self, stop: StopReason, reason: FailureKind, detail: str) -> StopReason:
        if not self._turns:
            # Nothing was sampled, so there is nothing that a reward could be about.
            raise Broken(reason, detail)
        return stop

    async def _act(self, index: int, action: Action) -> Message:
        """Run the action's script, write it into the turn, and say what came of it."""
        role: Literal["user", "tool"] = "tool" if action.via == "tool" else "user"
        if not action.command:
            return Message(role=role, content="")
        rollout_id = self._attempt.rollout_id
        self._emit(ToolStarted(at_s=time.time(), rollout_id=rollout_id, turn=index, command=action.command))
        started_s = self._clock()
        left_s = max(0.0, self._deadline_s - started_s)
        limit_s = min(self._config.command_timeout_s, left_s)
        limit_chars = self._config.output_limit_chars
        command = Command(
            # One stream, in the order in which it was written, as a terminal shows it. On the first line, so that
            # bash counts the lines of its messages as the model wrote them.
            script="exec 2>&1; " + action.command,
            timeout_s=limit_s,
            env=dict(COMMAND_ENV),
            # A character has up to 4 bytes: so much that what the sandbox drops lies within what is cut here.
            output_limit_bytes=max(65536, 8 * limit_chars),
        )
        result = await in_time(self._sandbox.run(command), limit_s + self._grace_s, "run a command")
        tool_s = self._clock() - started_s
        output = observation(
            (result.stdout + result.stderr).decode(errors="replace"),
            exit_code=result.exit_code,
            limit_chars=limit_chars,
            cut_bytes=result.stdout_cut_bytes + result.stderr_cut_bytes,
            timed_out_s=limit_s if result.timed_out else None,
            oom=result.oom_killed,
        )
        self._turns[-1] = msgspec.structs.replace(
            self._turns[-1], command=action.command, output=output, exit_code=result.exit_code, tool_s=tool_s
        )
        self._emit(
            ToolFinished(at_s=time.time(), rollout_id=rollout_id, turn=index, exit_code=result.exit_code, tool_s=tool_s)
        )
        return Message(role=role, content=output)


_CUT: dict[FinishReason, StopReason] = {"length": "reply_limit", "context": "context"}
"""How a reply without an action ends its rollout, where a limit cut it."""


async def in_time(answer: Awaitable[T], limit_s: float, what: str) -> T:
    """What a sandbox answers, or Broken once it has not answered for `limit_s`."""
    try:
        async with asyncio.timeout(limit_s):
            return await answer
    except TimeoutError as error:
        raise Broken("sandbox", f"the sandbox did not {what} within {limit_s:g} s") from error
