"""Samples one attempt's replies: exact ids in, a turn of the attempt out; limits, events and checks included.

Place in the flow: below whoever decides what the model is shown (an agent function's `Policy`, a session behind HTTP),
above the engine. Knows nothing of messages, templates, tools or rewards.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from thundersync.core.types import SampledTurn, StopReason, Turn
from thundersync.errors import EngineFailed, StaleRollout, ThundersyncError
from thundersync.generate.base import Generation, Sampling
from thundersync.monitor.events import HistoryForked, TurnAborted, TurnGenerated, TurnStarted
from thundersync.rollout.attempt import Attempt, Broken, Clock, Emit, OnTurn

_REMEDIES: dict[StopReason, str] = {
    "time": "Raise rollout.timeout_s (or the task's agent_timeout_s), or let the agent end earlier.",
    "max_turns": "Raise rollout.max_turns, or let the agent end earlier.",
    "context": "Raise model.max_model_len, or show the model less.",
}


class LimitReached(ThundersyncError):
    """A rollout may sample no more; `stop` says which limit it met.

    Uncaught in an agent function it ends the rollout, which is then judged as it is: limits are part of the task.
    """

    def __init__(self, stop: StopReason, detail: str) -> None:
        super().__init__(detail, remedy=_REMEDIES.get(stop, ""))
        self.stop: StopReason = stop


class Sampler:
    """The replies of one attempt, any number at once. Every turn is recorded in `attempt.turns` when it is sampled.

    `deadline_s` (on `clock`) ends them all, `limit_s` is how long that was from the start, for people. At most
    `max_turns` replies; `on_turn` is told of each the moment it was sampled. A request that was aborted, or that gave
    nothing, is no reply: it costs no turn.
    """

    def __init__(
        self,
        attempt: Attempt,
        *,
        max_turns: int,
        deadline_s: float,
        limit_s: float,
        emit: Emit,
        clock: Clock,
        on_turn: OnTurn | None = None,
    ) -> None:
        self._attempt = attempt
        self._max_turns = max_turns
        self._deadline_s = deadline_s
        self._limit_s = limit_s
        self._emit = emit
        self._clock = clock
        self._on_turn = on_turn
        self._begun = len(attempt.turns)
        """Requests so far, each with a number of its own, also where nothing came of it."""
        self._spent = self._begun
        """Of `max_turns`: replies sampled, and being sampled."""
        self._open: set[int] = set()
        """Numbers of the requests that viewers believe to be with the engine."""
        self._closed = False

    @property
    def rollout_id(self) -> str:
        return self._attempt.rollout_id

    @property
    def policy_version(self) -> int:
        return self._attempt.policy_version

    @property
    def turns_left(self) -> int:
        return self._max_turns - self._spent

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._deadline_s - self._clock())

    def tell_fork(self, reason: str) -> None:
        """What comes next does not extend what was sampled."""
        self._emit(HistoryForked(at_s=time.time(), rollout_id=self._attempt.rollout_id, reason=reason))

    def close(self) -> None:
        """The attempt is over: nothing may be sampled for it any more."""
        self._closed = True
        for index in sorted(self._open):
            # Now, not when the engine lets go of it: by then viewers may see the rollout scored.
            self._abort(index)

    async def sample(self, prompt_ids: Sequence[int], sampling: Sampling, *, sequence: Callable[[], int]) -> Generation:
        """The reply to `prompt_ids`. `sequence` is asked, once there is a reply, which of the rollout's sequences it
        belongs to: one that nothing was sampled in has no place among them.

        Raises: LimitReached, EngineFailed, StaleRollout, Broken (a logprob that is not finite).
        """
        if self._closed:
            raise LimitReached("time", f"rollout {self._attempt.rollout_id} has ended: nothing more is sampled for it")
        if self._spent >= self._max_turns:
            raise LimitReached("max_turns", f"rollout.max_turns = {self._max_turns} replies have been sampled")
        self._spent += 1
        try:
            return await self._sample(prompt_ids, sampling, sequence)
        except BaseException:
            self._spent -= 1
            raise

    async def _sample(self, prompt_ids: Sequence[int], sampling: Sampling, sequence: Callable[[], int]) -> Generation:
        # Never a number again: an engine may still be aborting the request that had it.
        index, self._begun = self._begun, self._begun + 1
        self._attempt.opening = self._attempt.opening or list(prompt_ids)
        self._emit(TurnStarted(at_s=time.time(), rollout_id=self._attempt.rollout_id, turn=index))
        self._open.add(index)
        try:
            return await self._reply(index, prompt_ids, sampling, sequence)
        finally:
            self._abort(index)  # unless it has become a turn

    def _abort(self, index: int) -> None:
        """Tell that nothing came of a request; once, and never of a turn."""
        if index in self._open:
            self._open.remove(index)
            self._emit(TurnAborted(at_s=time.time(), rollout_id=self._attempt.rollout_id, turn=index))

    async def _reply(
        self, index: int, prompt_ids: Sequence[int], sampling: Sampling, sequence: Callable[[], int]
    ) -> Generation:
        rollout_id = self._attempt.rollout_id
        started_s = self._clock()
        try:
            async with asyncio.timeout(max(0.0, self._deadline_s - started_s)) as limit:
                generation = await self._attempt.generator.generate(
                    prompt_ids, sampling, request_id=f"{rollout_id}/{self._attempt.number}/{index}"
                )
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise LimitReached("time", f"the engine gave no reply within {self._limit_s:g} s") from error
        self._check(generation)
        if self._closed:  # the agent ended, or was ended, while this was sampled: the turn is no part of the rollout
            raise LimitReached("time", f"rollout {rollout_id} ended while a reply was sampled")
        if not generation.token_ids:
            raise LimitReached("context", f"a prompt of {len(prompt_ids)} tokens leaves no room for a reply")
        self._record(index, sequence(), prompt_ids, generation, self._clock() - started_s)
        return generation

    def _record(
        self, index: int, sequence: int, prompt_ids: Sequence[int], generation: Generation, generate_s: float
    ) -> None:
        start, end = len(prompt_ids), len(prompt_ids) + len(generation.token_ids)
        attempt = self._attempt
        attempt.turns.append(
            Turn(
                index=index,
                sequence=sequence,
                start=start,
                end=end,
                finish_reason=generation.finish_reason,
                policy_version=generation.policy_version,
                generate_s=generate_s,
                cached_tokens=generation.cached_tokens,
            )
        )
        self._open.remove(index)
        self._emit(
            TurnGenerated(
                at_s=time.time(),
                rollout_id=attempt.rollout_id,
                turn=index,
                sampled_tokens=end - start,
                prompt_tokens=start,
                cached_tokens=generation.cached_tokens,
                generate_s=generate_s,
                finish_reason=generation.finish_reason,
            )
        )
        if self._on_turn is not None:
            opening = attempt.opening
            opens = list(prompt_ids[: len(opening)]) == opening
            self._on_turn(
                SampledTurn(
                    rollout_id=attempt.rollout_id,
                    group_id=attempt.group_id,
                    task_id=attempt.task.task_id,
                    attempt=attempt.number,
                    turn=index,
                    sequence=sequence,
                    token_ids=[*prompt_ids, *generation.token_ids],
                    start=start,
                    end=end,
                    logprobs=generation.logprobs,
                    prompt_tokens=len(opening) if opens else 0,
                    policy_version=generation.policy_version,
                )
            )

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


def stopped_by(reached: LimitReached, attempt: Attempt) -> StopReason:
    """How an attempt that met a limit ended. Raises: Broken where nothing was sampled that a reward could be about."""
    if not attempt.turns:
        raise Broken("agent" if reached.stop == "context" else "engine", reached.message) from reached
    return reached.stop
