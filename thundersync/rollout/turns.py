"""The turns of one rollout: sample a reply, run its command, tell the model what came back; until something ends it.

Place in the flow: the middle of `agent.ShellAgent.run`, between a started sandbox and the checker. Knows nothing of how
sandboxes start, how rewards are made, or of other rollouts.
"""

import asyncio
import time

import msgspec

from thundersync.config import RolloutConfig
from thundersync.core.types import FinishReason, Message, StopReason, Turn
from thundersync.generate.base import Sampling
from thundersync.monitor.events import ToolFinished, ToolStarted
from thundersync.rollout.attempt import Attempt, Clock, Emit, OnTurn, in_time
from thundersync.rollout.dialogue import Dialogue
from thundersync.rollout.hands import Hands, Told
from thundersync.rollout.protocol import Action, NoAction
from thundersync.rollout.sampler import LimitReached, Sampler, stopped_by


class Conversation:
    """Drives one attempt's turns. `limit_s` is the wall clock for all of them, from now on.

    `grace_s`: how long beyond a command's own limit the sandbox may take to answer before it counts as broken.
    """

    def __init__(
        self,
        attempt: Attempt,
        dialogue: Dialogue,
        hands: Hands,
        *,
        config: RolloutConfig,
        sampling: Sampling,
        limit_s: float,
        grace_s: float,
        emit: Emit,
        clock: Clock,
        on_turn: OnTurn | None = None,
    ) -> None:
        self._attempt = attempt
        self._dialogue = dialogue
        self._hands = hands
        self._config = config
        self._sampling = sampling
        self._grace_s = grace_s
        self._emit = emit
        self._clock = clock
        self._deadline_s = clock() + limit_s
        self._sampler = Sampler(
            attempt,
            max_turns=config.max_turns,
            deadline_s=self._deadline_s,
            limit_s=limit_s,
            emit=emit,
            clock=clock,
            on_turn=on_turn,
        )

    async def run(self) -> StopReason:
        """Turn after turn until one of the reasons to stop; the last command has run by then.

        Raises: StaleRollout, EngineFailed, SandboxError, Broken.
        """
        idle = 0  # turns in a row without an action
        for index in range(len(self._turns), self._config.max_turns):
            reply = await self._sample()
            if not isinstance(reply, Message):
                return reply
            finish_reason = self._turns[-1].finish_reason
            stop: StopReason | None
            match self._hands.read(reply.content):
                case Action() as action:
                    idle = 0
                    told = await self._act(index, action)
                    answer = told.message
                    stop = "submitted" if told.submitted else "context" if finish_reason == "context" else None
                case NoAction() as why:
                    idle += 1
                    answer = Message(role="user", content=self._hands.correct(why))
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

    async def _sample(self) -> Message | StopReason:
        """The next reply, or why there is none."""
        try:
            generation = await self._sampler.sample(
                self._dialogue.prompt_ids, self._sampling, sequence=lambda: self._dialogue.sequence_index
            )
        except LimitReached as reached:
            return stopped_by(reached, self._attempt)
        return Message(role="assistant", content=self._dialogue.reply(generation.token_ids, generation.logprobs))

    async def _act(self, index: int, action: Action) -> Told:
        """Do what the action asks for, and write what came of it into the turn."""
        rollout_id = self._attempt.rollout_id
        if action.command:
            self._emit(ToolStarted(at_s=time.time(), rollout_id=rollout_id, turn=index, command=action.command))
        started_s = self._clock()
        limit_s = min(self._config.command_timeout_s, max(0.0, self._deadline_s - started_s))
        told = await in_time(self._hands.act(action, limit_s=limit_s), limit_s + self._grace_s, "run a command")
        if action.command:
            tool_s = self._clock() - started_s
            self._turns[-1] = msgspec.structs.replace(
                self._turns[-1],
                command=action.command,
                output=told.message.content,
                exit_code=told.exit_code,
                tool_s=tool_s,
            )
            self._emit(
                ToolFinished(
                    at_s=time.time(), rollout_id=rollout_id, turn=index, exit_code=told.exit_code, tool_s=tool_s
                )
            )
        return told


_CUT: dict[FinishReason, StopReason] = {"length": "reply_limit", "context": "context"}
"""How a reply without an action ends its rollout, where a limit cut it."""
