"""What a viewer may read of rollouts that are not on disk yet: those that live, and those that wait for their step.

Beside the step driver, for the feed. Called from the feed's thread: it takes copies and changes nothing.
"""

from collections.abc import Callable, Sequence

from thundersync.core.types import Rollout, RolloutId
from thundersync.monitor.archive import Transcript, sampled_ids
from thundersync.rollout.agent import ShellAgent
from thundersync.rollout.dialogue import Renderer


class LiveRollouts:
    """Looks through the agents, then through what has landed in the open step."""

    def __init__(
        self, agents: Sequence[ShellAgent], landed: Callable[[], Sequence[Rollout]], renderer: Renderer
    ) -> None:
        self._agents = agents
        self._landed = landed
        self._renderer = renderer

    def look(self, name: RolloutId) -> Transcript | None:
        """As far as it has come; None if it is neither alive nor in the open step."""
        for agent in self._agents:
            attempt = agent.alive(name)
            if attempt is not None:
                dialogue = attempt.dialogue
                return Transcript(
                    rollout_id=name,
                    group_id=attempt.group_id,
                    task_id=attempt.task.task_id,
                    policy_version=attempt.policy_version,
                    messages=dialogue.messages if dialogue else [],
                    sequences=dialogue.sequences() if dialogue else [],
                    turns=list(attempt.turns),
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
        """What each sampled token reads as by itself."""
        return {token: self._renderer.decode([token]) for token in sampled_ids(transcript)}
