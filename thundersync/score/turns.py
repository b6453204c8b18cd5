"""A sampled turn -> its teacher's scores: which teacher, which prompt, how many alternatives.

Place in the flow: between the turn stream, which asks the moment a turn ends, and the teachers. Knows no gradients.
"""

from __future__ import annotations

from collections.abc import Callable

from thundersync.core.types import SampledTurn, TaskId
from thundersync.errors import TeacherFailed
from thundersync.generate.base import TokenScores
from thundersync.score.teacher import PrivilegedPrompt, TeacherPool

PrivilegedIds = Callable[[TaskId], list[int]]


class TurnScorer:
    """Asks a task's teacher about the tokens of a turn, and of no others.

    `privileged_ids` gives, for self-distillation, the prompt that only the teacher is shown.
    """

    def __init__(self, teachers: TeacherPool, *, topk: int, privileged_ids: PrivilegedIds | None = None) -> None:
        self._teachers = teachers
        self._topk = topk
        self._privileged_ids = privileged_ids

    async def __call__(self, turn: SampledTurn) -> TokenScores | None:
        """Raises: TeacherFailed, StaleScore."""
        teacher = self._teachers.for_task(turn.task_id)
        if self._privileged_ids is None:
            return await teacher.score(turn.token_ids, start=turn.start, topk=self._topk)
        if not turn.prompt_tokens:
            raise TeacherFailed(
                f"turn {turn.turn} of rollout {turn.rollout_id} was sampled after a rewritten history that does not "
                "begin with the task's prompt, so the solution cannot be shown in its place",
                remedy='Use a model whose chat template only appends, or algo.type = "opd" with a teacher of its own.',
            )
        shown = PrivilegedPrompt(
            teacher, prompt_tokens=turn.prompt_tokens, privileged_ids=self._privileged_ids(turn.task_id)
        )
        return await shown.score(turn.token_ids, start=turn.start, topk=self._topk)


async def held_teacher(turn: SampledTurn) -> TokenScores | None:
    """The scorer of a teacher that the trainer workers hold: they look for themselves."""
    return None
