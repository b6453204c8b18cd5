"""The audit of a live step: right before its commit, its streamed gradient against its own one-piece gradient.

`stream.verify_every` says how often. Costs a forward and backward of the whole step (two, where the distance is above
the least tolerance and the rounding floor has to be measured), and while it lasts two more buffers of the trainable
parameters in each worker; changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from thundersync.config import Config
from thundersync.core.objective import SeparableObjective
from thundersync.core.types import Rollout
from thundersync.errors import ExactnessLost
from thundersync.learn.link import WorkerLink
from thundersync.learn.stream import GradientStream
from thundersync.learn.turn_stream import TurnStream
from thundersync.monitor.events import AnyEvent, Audited
from thundersync.placement import Dtype
from thundersync.recipe import objective_of
from thundersync.verify import textbook
from thundersync.verify.reference import compare, keep_reference, rounding_floor
from thundersync.verify.tolerance import LEAST, says_nothing, tolerance


class Auditor:
    """Compares every `stream.verify_every`-th step."""

    def __init__(
        self,
        config: Config,
        workers: Sequence[WorkerLink],
        *,
        dtype: Dtype,
        keep: Callable[[int, Sequence[Rollout]], Awaitable[Path]],
        emit: Callable[[AnyEvent], None],
        objective: SeparableObjective | None = None,
    ) -> None:
        """`keep` writes a step's rollouts and says where: of a step that is never committed nobody else would."""
        self._config = config
        self._workers = workers
        self._dtype: Dtype = dtype
        self._keep = keep
        self._emit = emit
        self._objective = objective

    def wants(self, step: int) -> bool:
        """Steps are counted from 0; the first audit is of step `verify_every` - 1."""
        every = self._config.stream.verify_every
        return bool(every) and (step + 1) % every == 0

    async def audit(self, step: int, stream: GradientStream | TurnStream) -> dict[str, float]:
        """Of a step that owes nothing. Gives metrics. Raises ExactnessLost, WorkerLost."""
        began_s, limit_s = time.monotonic(), self._config.stall_timeout_s
        book = textbook_of(stream, self._config, self._objective)
        await keep_reference(self._workers, book, limit_s=limit_s)
        found = await compare(self._workers, stream.scales(), limit_s=limit_s)
        exact, allowed = found.relative_l2 <= LEAST, LEAST
        if not exact:
            floor = await rounding_floor(self._workers, book, limit_s=limit_s)
            allowed = tolerance(floor)
            # A gradient that has all but cancelled is rounding on both sides: no evidence of anything.
            exact = found.relative_l2 <= allowed or says_nothing(floor, self._dtype)
        self._emit(
            Audited(
                at_s=time.time(),
                step=step,
                relative_l2=found.relative_l2,
                worst=found.worst,
                worst_name=found.worst_name,
                tolerance=allowed,
                ok=exact,
            )
        )
        if not exact:
            path = await self._keep(step, stream.rollouts)
            raise ExactnessLost(
                f"the streamed gradient of step {step} is {found.relative_l2:.1e} from its one-piece gradient "
                f"(relative L2, tolerance {allowed:.0e}), most in {found.worst_name}; the step was not committed",
                remedy=f"Report it with {path}, which has the step's tokens and rewards. The last checkpoint is good: "
                "--resume continues from it.",
            )
        return {"audit_relative_l2": found.relative_l2, "audit_s": time.monotonic() - began_s}


def textbook_of(
    stream: GradientStream | TurnStream, config: Config, objective: SeparableObjective | None = None
) -> textbook.Textbook:
    """A worked step as one loss: from what was sampled, and what it was worth when it landed."""
    objective = objective or objective_of(config)
    if isinstance(stream, TurnStream):
        return textbook.of_turns(stream.turns.values(), objective)
    members = [member for group in stream.ledger.groups.values() for member in group.members.values()]
    return textbook.of_rollouts(
        stream.rollouts,
        {member.rollout_id: member.reward for member in members if member.votes and member.reward is not None},
        objective,
        min_group_size=smallest_group(config),
        skip_flat=config.algo.zero_variance == "skip",
    )


def smallest_group(config: Config) -> int:
    """Members that must vote for a group to count."""
    return config.algo.group_size if config.algo.on_failure == "drop" else config.algo.min_group_size
