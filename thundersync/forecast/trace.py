"""What a step looked like from outside: when each piece was released, what it weighed, what its work costs.

A trace says nothing of the order in which the work was done: `simulate` finds that for each arm. Read from a run's
events (`recorded`), measured by a bench, or made up by a study. Times are seconds since the step opened.
"""

import math
from collections.abc import Callable

from msgspec import Struct, structs

from thundersync.core.objective import Objective
from thundersync.core.ready_queue import PartRoom
from thundersync.errors import ThundersyncError

NO_LIMIT = 2**62


class UnusableTrace(ThundersyncError):
    """A step that cannot be simulated: nothing in it, or numbers that no step has."""


class TurnTrace(Struct, frozen=True, kw_only=True):
    """One turn of a distilled rollout."""

    release_s: float
    """Its teacher's score landed."""
    cost_s: float
    """Of its forward and backward on one trainer worker, beyond what a pass costs anyway (`StepTrace.pass_s`)."""
    tokens: int = 1
    """It sampled."""


class RolloutTrace(Struct, frozen=True, kw_only=True):
    """One rollout of the step."""

    rollout_id: str
    group_id: str
    release_s: float
    """Its reward landed or, of a failed one, its last attempt was given up. Distilling: it ended."""
    reward: float | None
    """None: its world failed, and it never votes."""
    cost_s: float
    """Of its forward and backward on one trainer worker, beyond what a pass costs anyway (`StepTrace.pass_s`)."""
    tokens: int = 1
    """Of its longest row beyond what its group shares: bounds which pieces fit in one pass."""
    generate_s: float = 0.0
    """How much of `release_s` it spent generating or waiting for an engine; the rest is tools and checkers, which no
    GPU makes faster."""
    content_s: float | None = None
    """Its tokens were final and its checker began; None: not known."""
    turns: list[TurnTrace] = []
    """Distilling: its turns in order; `cost_s` is then not used."""


class StepTrace(Struct, frozen=True, kw_only=True):
    """One step, as far as a schedule can see it."""

    rollouts: list[RolloutTrace]
    commit_s: float
    """From the last backward to the new weights in the trainer."""
    publish_s: float
    """From there to the engines having them."""
    workers: int = 1
    """Trainer devices, each working one pass at a time."""
    engines: int = 1
    """Devices that generate."""
    engine_load: float = 1.0
    """Of the seconds spent generating: the share that other rollouts on the same device cause, and that more devices
    therefore divide. 1: the engines' throughput is the limit. 0: every sequence has a device to itself already."""
    generated_s: float = 0.0
    """The last token was sampled."""
    pass_s: float = 0.0
    """What every pass costs, whatever it holds."""
    close_s: float = 0.0
    """What closing a group costs each worker that worked anything of it (joining parts, the shared prompt's sweep)."""
    sweep_share: float = 2.0 / 3.0
    """Distilling: how much of a turn's cost is left for the sweep of its rollout when the turn was worked alone."""
    turns_stream: bool = True
    """Distilling: turns may be worked before their rollout has ended (every `stream.turns` but `deferred`)."""
    max_tokens: int = NO_LIMIT
    """Of a pass: rows x longest row (`trainer.micro_batch_tokens`)."""
    longest: int = 0
    """Distilling: tokens a rollout may reach (`model.max_model_len`); as many are begun as fit `max_tokens`."""
    room: PartRoom = PartRoom(most=NO_LIMIT)
    """Of a worker's memory, for open groups."""
    objective: Objective = Objective()
    min_group_size: int = 2
    skip_flat: bool = True
    holds: bool = False
    """A streamed backward may start while the checker runs (`stream.release = "content"`)."""
    step: int = 0
    measured_s: float = 0.0
    """What the step took; 0: it was not run."""

    @property
    def released_s(self) -> float:
        """The last release: no arm ends before it."""
        return max((rollout.release_s for rollout in self.rollouts), default=0.0)

    @property
    def after_s(self) -> float:
        """From the last backward to the engines having the new weights."""
        return self.commit_s + self.publish_s

    @property
    def distils(self) -> bool:
        return self.objective.distils or any(rollout.turns for rollout in self.rollouts)

    def groups(self) -> dict[str, list[RolloutTrace]]:
        """By group, in membership order."""
        found: dict[str, list[RolloutTrace]] = {}
        for rollout in self.rollouts:
            found.setdefault(rollout.group_id, []).append(rollout)
        return found


def check_trace(trace: StepTrace) -> None:
    """Raises: UnusableTrace, naming every fault."""
    turns = [turn for rollout in trace.rollouts for turn in rollout.turns]
    pieces: list[RolloutTrace | TurnTrace] = [*trace.rollouts, *turns]
    numbers = {
        "a release": [piece.release_s for piece in pieces],
        "a piece's cost": [piece.cost_s for piece in pieces],
        "commit or publish": [trace.commit_s, trace.publish_s],
        "the fixed cost of a pass or a closing": [trace.pass_s, trace.close_s],
    }
    faults = [] if trace.rollouts else ["it has no rollouts"]
    faults += [
        f"{name} takes {bad:g} s"
        for name, values in numbers.items()
        for bad in values
        if not (math.isfinite(bad) and bad >= 0)
    ]
    if trace.workers < 1 or trace.engines < 1:
        faults.append(f"{trace.workers} trainer devices and {trace.engines} engine devices")
    if faults:
        raise UnusableTrace(
            f"step {trace.step} cannot be simulated: {'; '.join(faults[:4])}",
            remedy="Seconds are finite and not negative, and every side has a device.",
        )


def with_releases(trace: StepTrace, change: Callable[[RolloutTrace, float], float]) -> StepTrace:
    """The same work released at other times: `change(rollout, at_s)` is asked for each of their moments."""

    def moved(rollout: RolloutTrace) -> RolloutTrace:
        turns = [structs.replace(turn, release_s=change(rollout, turn.release_s)) for turn in rollout.turns]
        content_s = None if rollout.content_s is None else change(rollout, rollout.content_s)
        return structs.replace(rollout, release_s=change(rollout, rollout.release_s), content_s=content_s, turns=turns)

    return structs.replace(trace, rollouts=[moved(rollout) for rollout in trace.rollouts])
