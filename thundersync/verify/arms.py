"""The ways a step's gradient can take, and a recording worked again through the real stream in one of them.

An arm names what differs from a run: the order of arrival, what the workers may hold, how passes are packed, which
schedule turns follow. What the gradient then is, is `proof`'s business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec import Struct

from thundersync.config import Config
from thundersync.core.ledger import Ledger
from thundersync.core.objective import SeparableObjective
from thundersync.core.ready_queue import PartRoom
from thundersync.core.turn_ledger import TurnKey, TurnLedger
from thundersync.core.types import FinalContent, Rollout, RolloutId, SampledTurn, StreamMode
from thundersync.generate.base import TokenScores
from thundersync.learn import messages as m
from thundersync.learn.link import WorkerLink
from thundersync.learn.stream import GradientStream
from thundersync.learn.turn_stream import TurnStream
from thundersync.monitor.events import AnyEvent
from thundersync.recipe import kl_in_reward, objective_of
from thundersync.step import shared_prefix
from thundersync.verify.audit import smallest_group
from thundersync.verify.recording import Recording
from thundersync.verify.reference import ask_each

LOOK_AGAIN_S = 0.002
TURNS_OF_THE_LOOP = 25
"""After which every feeder has taken what it can: a few for the news, a few for each that waits for its lock."""
BLOCK_TOKENS = 32
"""Of the arm that cuts its rows: short enough that those of a tiny step are cut too."""

Schedule = Literal["deferred", "forward", "immediate"]


class Arm(Struct, frozen=True, kw_only=True):
    """One way. Defaults are a run's own."""

    path: str
    order: str
    names: list[RolloutId]
    """A permutation of the recording's."""
    mode: StreamMode = "stream"
    at_once: bool = False
    """All arrive before any is worked: passes are packed as far as they go."""
    one_by_one: bool = False
    """A rollout a pass."""
    parts: int | None = None
    """So many parts fit in memory; pieces that find no room wait as tokens until they can go straight into the sums.
    None: as many as the configuration allows at most, whatever lies beside them."""
    spilled: bool = False
    """Parts live in host memory and visit the device."""
    held: bool = False
    """All are worked before any reward is known."""
    cut: bool = False
    """Rows are cut into short blocks."""
    schedule: Schedule = "deferred"


def reward_arms(recording: Recording, *, max_parts: int, may_be_cut: bool, may_be_held: bool) -> Iterator[Arm]:
    """Of rollouts whose rewards are compared. `max_parts`: a worker's budget; `may_be_cut`: model and terms allow
    blocks; `may_be_held`: no term goes into the step's sums before the reward is known."""
    came, streams = recording.names, max_parts > 0
    yield Arm(path="streamed", order="as they came", names=came)
    yield Arm(path="streamed", order="reversed", names=came[::-1])
    yield Arm(path="streamed", order="shuffled", names=recording.shuffled(1))
    yield Arm(path="streamed", order="shuffled again", names=recording.shuffled(2))
    yield Arm(path="a rollout a pass", order="shuffled", names=recording.shuffled(1), one_by_one=True)
    yield Arm(path="packed", order="all at once", names=came, at_once=True)
    if streams:
        yield Arm(path="no room for parts", order="reversed", names=came[::-1], parts=0)
        yield Arm(path="room for one part", order="shuffled", names=recording.shuffled(2), parts=1)
        yield Arm(path="spilled parts", order="shuffled", names=recording.shuffled(1), spilled=True)
    if streams and may_be_held:
        yield Arm(path="held for rewards", order="reversed", names=came[::-1], held=True)
    if may_be_cut:
        yield Arm(path=f"blocks of {BLOCK_TOKENS}", order="as they came", names=came, cut=True)
    yield Arm(path="lazy", order="after the last", names=came, mode="lazy")


def turn_arms(recording: Recording, *, may_be_cut: bool) -> Iterator[Arm]:
    """Of turns that a teacher scores. A model that cannot be cut into blocks works them after their rollout."""
    came = recording.names
    schedules: list[Schedule] = ["forward", "immediate"] if may_be_cut else []
    for schedule in schedules:
        yield Arm(path=schedule, order="as they came", names=came, schedule=schedule)
        yield Arm(path=schedule, order="reversed", names=came[::-1], schedule=schedule)
        yield Arm(path=schedule, order="shuffled", names=recording.shuffled(1), schedule=schedule)
    yield Arm(path="deferred", order="as they came", names=came)
    yield Arm(path="deferred", order="shuffled", names=recording.shuffled(2))
    yield Arm(path="a rollout a pass", order="reversed", names=came[::-1], one_by_one=True)
    yield Arm(path="packed", order="all at once", names=came, at_once=True)
    if may_be_cut:
        yield Arm(path=f"blocks of {BLOCK_TOKENS}", order="as they came", names=came, cut=True)
    yield Arm(path="lazy", order="after the last", names=came, mode="lazy")


class Replayer:
    """Works recordings through the real streams and workers of a configuration."""

    def __init__(
        self,
        config: Config,
        workers: Sequence[WorkerLink],
        *,
        shares_prompts: bool,
        max_parts: int,
        objective: SeparableObjective | None = None,
    ) -> None:
        """`objective` in the place of the configuration's."""
        self._config = config
        self._objective = objective or objective_of(config)
        self._workers = workers
        self._shares_prompts = shares_prompts
        self._max_parts = max_parts

    async def work(self, recording: Recording, arm: Arm) -> GradientStream | TurnStream:
        """Until the step owes nothing; its gradient is then in the workers."""
        limits = m.Limits(resident_parts=0 if arm.spilled else None, block_tokens=BLOCK_TOKENS if arm.cut else None)
        await self._ask_all(limits)
        stream = self._turns(recording, arm) if recording.turns else self._rollouts(recording, arm)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stream.run(), name="replay")
            tasks.create_task(self._arrive(stream, recording, arm), name="arrivals")
        return stream

    async def forget(self) -> None:
        """Nothing of the last recording is kept in the workers."""
        await self._ask_all(m.Discard())
        await self._ask_all(m.Limits(resident_parts=None, block_tokens=None))

    async def _arrive(self, stream: GradientStream | TurnStream, recording: Recording, arm: Arm) -> None:
        await self._idle()  # the workers have opened the step
        for arrival in recording.arriving(arm.names) if arm.held else ():
            if arrival.rollout is not None and arrival.rollout.sequences:
                assert isinstance(stream, GradientStream)
                stream.content(_content(arrival.rollout))
                await self._idle()
        for arrival in recording.arriving(arm.names):
            if arrival.turn is not None:
                assert isinstance(stream, TurnStream)
                stream.sampled(arrival.turn)
            if not arm.at_once:
                await self._idle()  # the turn is scored, and worked where the schedule has it so, before it is the last
            if arrival.broken is not None:
                stream.attempt_ended(arrival.broken)
            if arrival.rollout is not None:
                await stream.land(arrival.rollout)
            if not arm.at_once:
                await self._idle()

    async def _idle(self) -> None:
        """Until the workers have done what they can with what has arrived: the same passes in every replay."""
        while True:
            for _ in range(TURNS_OF_THE_LOOP):
                await asyncio.sleep(0)
            if not any(worker.waiting for worker in self._workers):
                return
            await asyncio.sleep(LOOK_AGAIN_S)

    def _rollouts(self, recording: Recording, arm: Arm) -> GradientStream:
        algo = self._config.algo
        ledger = Ledger(
            recording.groups,
            objective=self._objective,
            min_group_size=smallest_group(self._config),
            skip_flat=algo.zero_variance == "skip",
        )
        return GradientStream(
            ledger,
            self._workers,
            policy_version=recording.policy_version,
            prompts=recording.prompts,
            prefix=shared_prefix(list(recording.prompts.values())),
            shares_prompts=self._shares_prompts,
            mode=arm.mode,
            max_tokens=self._max_tokens(arm),
            room=PartRoom(most=self._max_parts if arm.parts is None else arm.parts),
            stall_timeout_s=self._config.stall_timeout_s,
            emit=_unheard,
            kl_in_reward=kl_in_reward(self._config),
        )

    def _turns(self, recording: Recording, arm: Arm) -> TurnStream:
        async def score(turn: SampledTurn) -> TokenScores | None:
            return recording.turns[TurnKey(turn.rollout_id, turn.attempt, turn.sequence, turn.turn)].scores

        return TurnStream(
            TurnLedger(recording.groups),
            self._workers,
            objective=self._objective,
            score=score,
            policy_version=recording.policy_version,
            prompts=recording.prompts,
            prefix=shared_prefix(list(recording.prompts.values())),
            schedule=arm.schedule,
            mode=arm.mode,
            max_tokens=self._max_tokens(arm),
            longest=min(self._config.model.max_model_len, self._max_tokens(arm)),
            stall_timeout_s=self._config.stall_timeout_s,
            emit=_unheard,
        )

    def _max_tokens(self, arm: Arm) -> int:
        return 1 if arm.one_by_one else self._config.trainer.micro_batch_tokens

    async def _ask_all(self, request: m.AnyRequest) -> None:
        await ask_each(self._workers, [request] * len(self._workers), m.Done, limit_s=self._config.stall_timeout_s)


def _content(rollout: Rollout) -> FinalContent:
    return FinalContent(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        attempt=rollout.attempt,
        sequences=rollout.sequences,
        policy_version=rollout.policy_version,
    )


def _unheard(event: AnyEvent) -> None:
    """A replay is no run: viewers are told nothing of it."""
