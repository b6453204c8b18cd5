"""What a viewer may read of rollouts that are not on disk yet: those that live, and those that wait for their step.

Beside the step driver, for the feed. Called from the feed's thread: it takes copies and changes nothing.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from thundersync.core.types import Rollout, RolloutId
from thundersync.monitor.archive import Transcript, sampled_ids
from thundersync.rollout.attempt import Attempt
from thundersync.rollout.dialogue import Renderer

AT_ONCE = 16
"""Tokens decoded before whoever waits for the run's tokenizer gets it: less than a millisecond."""
PAUSE_S = 0.0002


class Looked(Protocol):
    """Carries out rollouts, and lets a viewer look at one while it lives."""

    def alive(self, rollout_id: RolloutId) -> Attempt | None: ...


class LiveRollouts:
    """Looks through the agents, then through what has landed in the open step."""

    def __init__(self, agents: Sequence[Looked], landed: Callable[[], Sequence[Rollout]], renderer: Renderer) -> None:
        self._agents = agents
        self._landed = landed
        self._renderer = renderer
        self._texts: dict[int, str] = {}
        """Of the tokens that were asked for so far."""

    def look(self, name: RolloutId) -> Transcript | None:
        """As far as it has come; None if it is neither alive nor in the open step."""
        for agent in self._agents:
            attempt = agent.alive(name)
            if attempt is not None:
                said = attempt.said()
                return Transcript(
                    rollout_id=name,
                    group_id=attempt.group_id,
                    task_id=attempt.task.task_id,
                    policy_version=attempt.policy_version,
                    messages=said.messages,
                    sequences=said.sequences,
                    # A turn is there a moment before its reply is among the messages.
                    turns=[turn for turn in said.placed(attempt.turns) if (turn.sequence, turn.start) in said.places],
                    attempt=attempt.number,
                )
        for rollout in self._landed():
            if rollout.rollout_id == name:
                return Transcript(
                    rollout_id=name,
                    group_id=rollout.group_id,
                    task_id=rollout.task_id,
                    policy_version=rollout.policy_version,
                    messages=rollout.messages,
                    sequences=rollout.sequences,
                    turns=rollout.turns,
                    outcome=rollout.outcome,
                    started_s=rollout.started_s,
                    score_s=rollout.score_s,
                    attempt=rollout.attempt,
                )
        return None

    def texts(self, transcript: Transcript) -> dict[int, str]:
        """What each sampled token reads as by itself.

        The event loop takes the renderer's lock at each reply, and a thread that takes it again and again leaves it to
        nobody; so this one pauses. A tokenizer of the feed's own would hold the loop for longer, while it is loaded.
        """
        wanted = sampled_ids(transcript)
        for count, token in enumerate(wanted - self._texts.keys(), start=1):
            self._texts[token] = self._renderer.decode([token])
            if count % AT_ONCE == 0:
                time.sleep(PAUSE_S)
        return {token: self._texts[token] for token in wanted}
