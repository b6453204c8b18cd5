"""Runs a step's rollouts: which one starts when, on which engine, and how often a failed one is tried again.

Place in the flow: between the step driver, which fixes the groups before anything runs, and `ShellAgent`, which runs
one rollout. Evaluation uses it the same way. Knows nothing of rewards' meaning, gradients or commits.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, Protocol

from msgspec import Struct

from thundersync.core.types import Failed, GroupId, Rollout, RolloutId, Task, TaskId
from thundersync.generate.base import Generator
from thundersync.monitor.events import AnyEvent, RolloutFailed, RolloutSeated

OnRollout = Callable[[Rollout], Awaitable[None]]


class GroupPlan(Struct, frozen=True, kw_only=True):
    """A group as it was fixed at the step's start: arrival order never decides who is in it."""

    group_id: GroupId
    task: Task
    rollout_ids: list[RolloutId]


class Agent(Protocol):
    """What runs one rollout, e.g. `ShellAgent`."""

    async def run(
        self,
        task: Task,
        *,
        rollout_id: RolloutId,
        group_id: GroupId,
        generator: Generator,
        policy_version: int,
        attempt: int = 1,
    ) -> Rollout: ...


class GroupRunner(Protocol):
    """What runs a step's groups: `RolloutRunner`, or what stands in its place in a bench."""

    async def run(
        self,
        groups: Sequence[GroupPlan],
        *,
        policy_version: int,
        on_rollout: OnRollout,
        on_retry: Callable[[Rollout], None] = ...,
        expected_s: Mapping[TaskId, float] | None = None,
    ) -> None: ...


class RolloutRunner:
    """Runs groups of rollouts on all engines; one instance may run several steps or evaluations one after another.

    `concurrency` bounds the rollouts alive at once (0: what the engines hold together). A failed rollout is tried
    again up to `max_attempts` times in all under `on_failure = "retry"`, on another engine if its engine was what
    failed, after a pause that doubles from `retry_delay_s`.
    """

    def __init__(
        self,
        *,
        agent: Agent,
        generators: Sequence[Generator],
        on_failure: Literal["retry", "shrink", "drop"],
        max_attempts: int,
        emit: Callable[[AnyEvent], None],
        concurrency: int = 0,
        retry_delay_s: float = 0.5,
    ) -> None:
        self._agent = agent
        self._generators = list(generators)
        self._attempts = max_attempts if on_failure == "retry" else 1
        self._emit = emit
        self._concurrency = concurrency
        self._retry_delay_s = retry_delay_s

    async def run(
        self,
        groups: Sequence[GroupPlan],
        *,
        policy_version: int,
        on_rollout: OnRollout,
        on_retry: Callable[[Rollout], None] = lambda rollout: None,
        expected_s: Mapping[TaskId, float] | None = None,
    ) -> None:
        """Run every rollout of `groups` and hand each over the moment it is finished; returns after the last.

        The longest expected start first (`expected_s`, seconds per rollout of a task; unknown tasks before all, as
        they may be long), otherwise in the order given. `on_rollout` gets each rollout exactly once, scored or
        finally failed; `on_retry` gets an attempt that failed and will be followed by another.

        Raises: an ExceptionGroup with what broke an invariant (StaleRollout, ChatTemplateError), or what `on_rollout`
        raised; all other rollouts are cancelled and cleaned up by then.
        """
        known = expected_s or {}
        ordered = sorted(groups, key=lambda group: -known.get(group.task.task_id, math.inf))
        seats = _Seats(self._generators)
        alive = asyncio.Semaphore(self._concurrency or sum(each.max_concurrency for each in self._generators))
        async with asyncio.TaskGroup() as rollouts:
            for group in ordered:
                for rollout_id in group.rollout_ids:
                    rollouts.create_task(
                        self._carry(group, rollout_id, policy_version, seats, alive, on_rollout, on_retry),
                        name=rollout_id,
                    )

    async def _carry(
        self,
        group: GroupPlan,
        rollout_id: RolloutId,
        policy_version: int,
        seats: "_Seats",
        alive: asyncio.Semaphore,
        on_rollout: OnRollout,
        on_retry: Callable[[Rollout], None],
    ) -> None:
        """One rollout through all its attempts."""
        avoid: set[int] = set()
        for attempt in range(1, self._attempts + 1):
            async with alive:
                seat = seats.take(group.group_id, avoid)
                self._emit(RolloutSeated(at_s=time.time(), rollout_id=rollout_id, engine=seat))
                try:
                    rollout = await self._agent.run(
                        group.task,
                        rollout_id=rollout_id,
                        group_id=group.group_id,
                        generator=self._generators[seat],
                        policy_version=policy_version,
                        attempt=attempt,
                    )
                finally:
                    seats.give_back(seat)
            # From here on without a place among the living: neither a pause nor a slow receiver keeps others waiting.
            if not isinstance(rollout.outcome, Failed):
                break
            # "agent" means that the task cannot be posed to this model, which no further attempt would change.
            again = attempt < self._attempts and rollout.outcome.reason != "agent"
            self._emit(
                RolloutFailed(
                    at_s=time.time(),
                    rollout_id=rollout_id,
                    group_id=group.group_id,
                    failure=rollout.outcome.reason,
                    detail=rollout.outcome.detail,
                    will_retry=again,
                )
            )
            if not again:
                break
            on_retry(rollout)
            if rollout.outcome.reason in ("engine", "nonfinite"):
                avoid.add(seat)
            await asyncio.sleep(self._retry_delay_s * 2 ** (attempt - 1))
        await on_rollout(rollout)


class _Seats:
    """Which engine a rollout runs on: its group's, so that the prompt is computed once, while that has room."""

    def __init__(self, generators: Sequence[Generator]) -> None:
        self._room = [generator.max_concurrency for generator in generators]
        self._live: Counter[int] = Counter()
        self._home: dict[GroupId, int] = {}

    def take(self, group_id: GroupId, avoid: set[int]) -> int:
        """An engine's index, counted as taken until `give_back`. Engines in `avoid` only if there is no other."""
        usable = [seat for seat in range(len(self._room)) if seat not in avoid] or list(range(len(self._room)))
        least_loaded = min(usable, key=lambda seat: self._live[seat] / self._room[seat])
        home = self._home.setdefault(group_id, least_loaded)
        full = self._live[home] >= self._room[home] and self._live[least_loaded] < self._room[least_loaded]
        seat = least_loaded if full or home not in usable else home
        self._live[seat] += 1
        return seat

    def give_back(self, seat: int) -> None:
        self._live[seat] -= 1
