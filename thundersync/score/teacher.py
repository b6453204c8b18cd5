"""Teachers: who says how probable a turn's tokens should have been, for on-policy distillation.

Place in the flow: a turn has been sampled, its tool call runs; what comes back from here makes its backward possible.
Knows token ids and engines; nothing of turns, gradients or sandboxes. A teacher behind a server is `openai_teacher`,
whether two models mean the same tokens is `tokenizers`.
"""

import asyncio
import itertools
from collections.abc import Coroutine, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol

from thundersync.errors import ConfigError, EngineDied, EngineFailed, EngineLost, StaleScore, TeacherFailed
from thundersync.generate.base import Generator, TokenScores

SCORE_LIMIT_S = 600.0
# A lone engine that died comes back under its supervisor, and is asked once more.
LEAST_ATTEMPTS = 2


class Teacher(Protocol):
    """Scores given tokens. Every method is a coroutine on the coordinator's loop and never blocks it."""

    @property
    def name(self) -> str:
        """For people, and in errors."""

    @property
    def payload_bytes(self) -> int:
        """Of all answers so far: what top-k costs."""

    async def start(self) -> list[str]:
        """Be ready, and proven so. Returns notes for the user.

        Raises: EngineFailed, TeacherFailed, TokenizerMismatch; `close` is still owed then.
        """

    async def score(self, token_ids: Sequence[int], *, start: int, topk: int = 0) -> TokenScores:
        """Logprobs of `token_ids[start:]`, each given all tokens before it, at temperature 1; see `Generator.score`.

        Raises: TeacherFailed.
        """

    async def close(self) -> None:
        """End everything that `start` made. Idempotent, bounded."""


class EngineTeacher:
    """A frozen model in engines of our own, any number of replicas; implements `Teacher`.

    The engines are started and closed here, and never published to: an answer under another version than 0 is refused.
    """

    def __init__(self, name: str, generators: Sequence[Generator], *, limit_s: float = SCORE_LIMIT_S) -> None:
        """`limit_s` bounds one score, waiting for a place in the engine included."""
        self._name = name
        self._generators = list(generators)
        self._replicas = _Replicas(name, self._generators, limit_s=limit_s)

    @property
    def name(self) -> str:
        return self._name

    @property
    def payload_bytes(self) -> int:
        return self._replicas.payload_bytes

    async def start(self) -> list[str]:
        await _side_by_side(generator.start() for generator in self._generators)
        return []

    async def score(self, token_ids: Sequence[int], *, start: int, topk: int = 0) -> TokenScores:
        scores = await self._replicas.score(token_ids, start=start, topk=topk)
        if scores.policy_version != 0:
            raise TeacherFailed(
                f"the teacher {self._name} answered as version {scores.policy_version}: weights were published to it",
                remedy="A teacher is frozen; give it engines of its own.",
            )
        return scores

    async def close(self) -> None:
        await _side_by_side(generator.close() for generator in self._generators)


class SelfTeacher:
    """The policy itself as teacher, in the run's own engines and under the open step's version; implements `Teacher`.

    For self-distillation: give it a `PrivilegedPrompt`, without which it would say what the student said. Starts and
    closes nothing, for the engines are not its own.
    """

    def __init__(self, generators: Sequence[Generator], *, limit_s: float = SCORE_LIMIT_S) -> None:
        self._replicas = _Replicas("the policy itself", generators, limit_s=limit_s)
        self._bound_to = 0

    @property
    def name(self) -> str:
        return "the policy itself"

    @property
    def payload_bytes(self) -> int:
        return self._replicas.payload_bytes

    def bind(self, policy_version: int) -> None:
        """From now on every score must come from `policy_version`: the open step's."""
        self._bound_to = policy_version

    async def start(self) -> list[str]:
        return []

    async def score(self, token_ids: Sequence[int], *, start: int, topk: int = 0) -> TokenScores:
        """As `Teacher.score`. Raises: StaleScore when the version that scored is not the bound one."""
        bound_to = self._bound_to
        scores = await self._replicas.score(token_ids, start=start, topk=topk)
        if scores.policy_version != bound_to:
            raise StaleScore(made_by=scores.policy_version, bound_to=bound_to)
        return scores

    async def close(self) -> None:
        """Nothing is held."""


class PrivilegedPrompt:
    """One rollout's view of a teacher that is shown more than the student was: its own prompt, the same replies."""

    def __init__(self, teacher: Teacher, *, prompt_tokens: int, privileged_ids: Sequence[int]) -> None:
        """The first `prompt_tokens` of every sequence to score are replaced by `privileged_ids`, which must end alike:
        with whatever opens the assistant's turn."""
        self._teacher = teacher
        self._prompt_tokens = prompt_tokens
        self._privileged_ids = list(privileged_ids)

    async def score(self, token_ids: Sequence[int], *, start: int, topk: int = 0) -> TokenScores:
        """As `Teacher.score`; `token_ids` and `start` are the student's."""
        if start < self._prompt_tokens:
            raise TeacherFailed(
                f"scores are asked for from token {start}, inside the prompt of {self._prompt_tokens} tokens",
                remedy="The teacher has another prompt than the student, so only what follows it can be scored.",
            )
        shown = [*self._privileged_ids, *token_ids[self._prompt_tokens :]]
        return await self._teacher.score(
            shown, start=start - self._prompt_tokens + len(self._privileged_ids), topk=topk
        )


class TeacherPool:
    """Several teachers, each for the tasks whose id matches its pattern; the first match has the task."""

    def __init__(self, routes: Sequence[tuple[str, Teacher]]) -> None:
        """`routes` are (pattern as of a shell, teacher); one teacher may stand in several."""
        self._routes = list(routes)
        self._teachers = list({id(teacher): teacher for _, teacher in routes}.values())

    @property
    def payload_bytes(self) -> int:
        return sum(teacher.payload_bytes for teacher in self._teachers)

    def refuse_tasks_without_teacher(self, task_ids: Iterable[str]) -> None:
        """Before anything starts. Raises: ConfigError naming the tasks."""
        alone = [task_id for task_id in task_ids if self._find(task_id) is None]
        if alone:
            patterns = ", ".join(pattern for pattern, _ in self._routes)
            raise ConfigError(
                f"{len(alone)} tasks match no teacher's pattern ({patterns}): {', '.join(alone[:3])}"
                + (", ..." if len(alone) > 3 else ""),
                remedy='Add a teacher with tasks = "*" as the last one, or widen a pattern.',
            )

    async def start(self) -> list[str]:
        """Start every teacher, side by side. Returns their notes. Raises what the first to fail raised."""
        notes = await _side_by_side(teacher.start() for teacher in self._teachers)
        return [note for several in notes for note in several]

    def for_task(self, task_id: str) -> Teacher:
        """Raises: ConfigError when no pattern matches."""
        teacher = self._find(task_id)
        if teacher is None:
            self.refuse_tasks_without_teacher([task_id])
        assert teacher is not None
        return teacher

    async def close(self) -> None:
        await _side_by_side(teacher.close() for teacher in self._teachers)

    def _find(self, task_id: str) -> Teacher | None:
        return next((teacher for pattern, teacher in self._routes if fnmatchcase(task_id, pattern)), None)


class _Replicas:
    """Engines of one model: the least loaded is asked, and another one where it fails."""

    def __init__(self, name: str, generators: Sequence[Generator], *, limit_s: float) -> None:
        self._name = name
        self._generators = list(generators)
        self._limit_s = limit_s
        self._load = [0] * len(self._generators)
        """Tokens in flight, by replica."""
        self._numbers = itertools.count()
        self.payload_bytes = 0

    async def score(self, token_ids: Sequence[int], *, start: int, topk: int) -> TokenScores:
        try:
            async with asyncio.timeout(self._limit_s):
                scores = await self._attempts(token_ids, start, topk)
        except TimeoutError as error:
            raise TeacherFailed(
                f"{self._name} did not score {len(token_ids)} tokens within {self._limit_s:g} s",
                remedy="Give the teacher more engines or devices, or the run a lower rollout.concurrency.",
            ) from error
        self.payload_bytes += scores.nbytes
        return scores

    async def _attempts(self, token_ids: Sequence[int], start: int, topk: int) -> TokenScores:
        number = next(self._numbers)
        failed: dict[int, EngineFailed | EngineLost] = {}
        for attempt in range(max(LEAST_ATTEMPTS, len(self._generators))):
            index = self._least_loaded(failed)
            if index is None:
                break
            self._load[index] += len(token_ids)
            try:
                return await self._generators[index].score(
                    token_ids, start=start, topk=topk, request_id=f"score-{number}-{attempt}"
                )
            except (EngineFailed, EngineLost) as error:
                failed[index] = error
            finally:
                self._load[index] -= len(token_ids)
        last = list(failed.values())[-1]
        raise TeacherFailed(f"{self._name} did not score: {last.message}", remedy=last.remedy) from last

    def _least_loaded(self, failed: dict[int, EngineFailed | EngineLost]) -> int | None:
        """One that has not failed this request; else one that died, which its supervisor brings back."""
        for choice in (
            [index for index in range(len(self._generators)) if index not in failed],
            [index for index, error in failed.items() if isinstance(error, EngineDied)],
        ):
            if choice:
                return min(choice, key=lambda index: self._load[index])
        return None


async def _side_by_side(work: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """All of them to their end, then what went wrong first, if anything did: none is left half done."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
