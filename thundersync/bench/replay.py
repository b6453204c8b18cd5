"""A rollout replayed: recorded turns through a real engine, recorded waits in place of commands and checkers.

Stands where `ShellAgent` stands. Token ids are made up, their counts are the workload's: a reply has exactly as many
tokens as were recorded, whatever the policy would have ended with. Knows nothing of arms and learning.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from thundersync.bench.workload import GroupWork, RolloutWork, TurnWork, Workload
from thundersync.core.types import (
    Checker,
    Failed,
    FinalContent,
    GroupId,
    Image,
    Outcome,
    Rollout,
    RolloutId,
    SampledTurn,
    Scored,
    Task,
    TaskId,
    TokenSequence,
    Turn,
)
from thundersync.errors import EngineFailed, StaleRollout
from thundersync.generate.base import Generation, Generator, Sampling
from thundersync.monitor.events import (
    AnyEvent,
    RolloutScored,
    RolloutStarted,
    ScoringStarted,
    ToolFinished,
    ToolStarted,
    TurnGenerated,
    TurnStarted,
)

Emit = Callable[[AnyEvent], None]
FIRST_ID = 16
"""Below it vocabularies keep their special tokens."""


class Script:
    """Which workload a task stands for, and the token ids of everything that is not sampled. The same for all arms."""

    def __init__(self, workload: Workload, *, vocabulary: int, seed: int) -> None:
        """`vocabulary`: token ids below it exist."""
        self._workload = workload
        self._vocabulary = vocabulary
        self._seed = seed
        self._works: dict[TaskId, GroupWork] = {}
        self._shared = self.ids("shared", workload.shared_tokens)

    def tasks(self, number: int) -> list[Task]:
        """Of the `number`-th replay. Their names are new, so that no arm knows how long they will take."""
        step = self._workload.of_replay(number)
        tasks = [replayed_task(f"bench-{number:04d}-{index:02d}") for index in range(len(step.groups))]
        self._works |= {task.task_id: group for task, group in zip(tasks, step.groups, strict=True)}
        return tasks

    def work(self, task_id: TaskId) -> GroupWork:
        return self._works[task_id]

    def prompt_ids(self, task: Task) -> list[int]:
        own = self._works[task.task_id].prompt_tokens - len(self._shared)
        return self._shared + self.ids(task.task_id, own)

    def ids(self, key: str, count: int) -> list[int]:
        """Made-up ids; the same key gives the same."""
        chance = random.Random(f"{self._seed}/{key}")
        return [chance.randrange(FIRST_ID, self._vocabulary) for _ in range(count)]


class ReplayAgent:
    """Runs a workload's rollouts, any number at once; holds no state of any of them."""

    def __init__(
        self,
        script: Script,
        *,
        temperature: float,
        emit: Emit,
        on_turn: Callable[[SampledTurn], None] | None = None,
        on_content: Callable[[FinalContent], None] | None = None,
    ) -> None:
        """`on_content` is told of a rollout whose turns are over, before its checker's wait."""
        self._script = script
        self._temperature = temperature
        self._emit = emit
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
        """One rollout of `task`'s group, the one that its number names. Raises: StaleRollout, EngineFailed."""
        index = int(rollout_id.rpartition("-")[2])
        replay = _Replay(
            task,
            self._script.work(task.task_id).rollouts[index],
            prompt_ids=self._script.prompt_ids(task),
            rollout_id=rollout_id,
            group_id=group_id,
            policy_version=policy_version,
            attempt=attempt,
        )
        self._emit(
            RolloutStarted(
                at_s=replay.started_s,
                rollout_id=rollout_id,
                group_id=group_id,
                task_id=task.task_id,
                attempt=attempt,
            )
        )
        for number, turn in enumerate(replay.work.turns):
            await self._turn(replay, number, turn, generator)
        return replay.rollout(await self._score(replay))

    async def _turn(self, replay: _Replay, number: int, work: TurnWork, generator: Generator) -> None:
        rollout_id = replay.rollout_id
        replay.follow(self._script.ids(f"{rollout_id}/{number}", work.given_tokens), fresh=work.fresh)
        prompt_ids = replay.token_ids
        self._emit(TurnStarted(at_s=time.time(), rollout_id=rollout_id, turn=number))
        began_s = time.monotonic()
        generation = await generator.generate(
            prompt_ids,
            Sampling(temperature=self._temperature, max_tokens=work.sampled_tokens, to_limit=True),
            request_id=f"{rollout_id}/{replay.attempt}/{number}",
        )
        generate_s = time.monotonic() - began_s
        if generation.policy_version != replay.policy_version:
            raise StaleRollout(rollout_id, made_by=generation.policy_version, bound_to=replay.policy_version)
        if len(generation.token_ids) != work.sampled_tokens:
            raise EngineFailed(
                f"rollout {rollout_id} was to sample {work.sampled_tokens} tokens, the engine gave "
                f"{len(generation.token_ids)} ({generation.finish_reason})"
            )
        turn = replay.reply(generation, generate_s=generate_s, tool_s=work.tool_s)
        self._emit(
            TurnGenerated(
                at_s=time.time(),
                rollout_id=rollout_id,
                turn=number,
                sampled_tokens=work.sampled_tokens,
                prompt_tokens=len(prompt_ids),
                cached_tokens=generation.cached_tokens,
                generate_s=generate_s,
                finish_reason=generation.finish_reason,
            )
        )
        if self._on_turn is not None:
            self._on_turn(replay.sampled(turn, generation))
        if work.tool_s:
            self._emit(ToolStarted(at_s=time.time(), rollout_id=rollout_id, turn=number, command="(replayed)"))
            await asyncio.sleep(work.tool_s)
            self._emit(
                ToolFinished(at_s=time.time(), rollout_id=rollout_id, turn=number, exit_code=0, tool_s=work.tool_s)
            )

    async def _score(self, replay: _Replay) -> Outcome:
        work = replay.work
        if self._on_content is not None and work.turns:
            self._on_content(replay.content())
        self._emit(ScoringStarted(at_s=time.time(), rollout_id=replay.rollout_id))
        await asyncio.sleep(work.score_s)
        if work.reward is None or not work.turns:
            return Failed(reason="agent", detail="it had failed when it was recorded")
        self._emit(
            RolloutScored(
                at_s=time.time(),
                rollout_id=replay.rollout_id,
                group_id=replay.group_id,
                reward=work.reward,
                stop="submitted",
                turns=len(work.turns),
                sampled_tokens=work.sampled_tokens,
                score_s=work.score_s,
            )
        )
        return Scored(reward=work.reward, stop="submitted")


class _Replay:
    """One rollout while it is replayed."""

    def __init__(
        self,
        task: Task,
        work: RolloutWork,
        *,
        prompt_ids: list[int],
        rollout_id: RolloutId,
        group_id: GroupId,
        policy_version: int,
        attempt: int,
    ) -> None:
        self.work = work
        self.rollout_id, self.group_id = rollout_id, group_id
        self.policy_version, self.attempt = policy_version, attempt
        self.started_s = time.time()
        self._task_id = task.task_id
        self._prompt_tokens = len(prompt_ids)
        self._sequences = [_Line(prompt_ids)]
        self._turns: list[Turn] = []

    @property
    def token_ids(self) -> list[int]:
        return list(self._sequences[-1].token_ids)

    def follow(self, ids: list[int], *, fresh: bool) -> None:
        if fresh:
            self._sequences.append(_Line(ids))
        else:
            self._sequences[-1].grow(ids, None)

    def reply(self, generation: Generation, *, generate_s: float, tool_s: float) -> Turn:
        line = self._sequences[-1]
        start = len(line.token_ids)
        line.grow(generation.token_ids, generation.logprobs)
        turn = Turn(
            index=len(self._turns),
            sequence=len(self._sequences) - 1,
            start=start,
            end=len(line.token_ids),
            finish_reason=generation.finish_reason,
            policy_version=generation.policy_version,
            generate_s=generate_s,
            tool_s=tool_s,
            cached_tokens=generation.cached_tokens,
        )
        self._turns.append(turn)
        return turn

    def sampled(self, turn: Turn, generation: Generation) -> SampledTurn:
        return SampledTurn(
            rollout_id=self.rollout_id,
            group_id=self.group_id,
            task_id=self._task_id,
            attempt=self.attempt,
            turn=turn.index,
            sequence=turn.sequence,
            token_ids=self.token_ids,
            start=turn.start,
            end=turn.end,
            logprobs=generation.logprobs,
            prompt_tokens=0 if turn.sequence else self._prompt_tokens,
            policy_version=turn.policy_version,
        )

    def content(self) -> FinalContent:
        return FinalContent(
            rollout_id=self.rollout_id,
            group_id=self.group_id,
            attempt=self.attempt,
            sequences=self._learned(),
            policy_version=self.policy_version,
        )

    def rollout(self, outcome: Outcome) -> Rollout:
        return Rollout(
            rollout_id=self.rollout_id,
            group_id=self.group_id,
            task_id=self._task_id,
            policy_version=self.policy_version,
            messages=[],
            sequences=self._learned(),
            turns=self._turns,
            outcome=outcome,
            started_s=self.started_s,
            generate_s=sum(turn.generate_s for turn in self._turns),
            tool_s=sum(turn.tool_s for turn in self._turns),
            score_s=self.work.score_s,
            attempt=self.attempt,
        )

    def _learned(self) -> list[TokenSequence]:
        return [line.whole() for line in self._sequences if any(line.sampled)]


class _Line:
    """A token sequence under construction; it ends with what was sampled last."""

    def __init__(self, ids: list[int]) -> None:
        self.token_ids = list(ids)
        self.sampled = [False] * len(ids)
        self.logprobs = [0.0] * len(ids)

    def grow(self, ids: list[int], logprobs: list[float] | None) -> None:
        self.token_ids += ids
        self.sampled += [logprobs is not None] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs

    def whole(self) -> TokenSequence:
        return TokenSequence(
            token_ids=self.token_ids,
            sampled=self.sampled,
            logprobs=self.logprobs,
            prompt_tokens=self.sampled.index(True),
        )


def replayed_task(task_id: TaskId) -> Task:
    """A task that only has a name."""
    return Task(
        task_id=task_id, suite="bench", instruction="(replayed)", image=Image(name="none"), checker=Checker(tests="")
    )
