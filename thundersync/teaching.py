"""The teachers of a run: made from [teacher], each where `placement` put it, and what only a teacher is shown.

Nothing is started here; a teacher of another vocabulary than the policy's is refused before anything is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from thundersync import fleet
from thundersync.config import Config, TeacherConfig
from thundersync.core.types import Task, TaskId
from thundersync.errors import ModelMissing, TaskError
from thundersync.generate.base import Generator
from thundersync.models import base_of, resolve_model
from thundersync.monitor.events import AnyEvent
from thundersync.placement import Placement
from thundersync.score.openai_teacher import OpenAITeacher
from thundersync.score.teacher import EngineTeacher, SelfTeacher, Teacher, TeacherPool
from thundersync.score.tokenizers import refuse_other_tokenizer


async def teacher_paths(config: Config, model_path: Path, *, say: Callable[[str], None]) -> list[Path | None]:
    """Each teacher's model folder; None for one that has none here.

    Raises: ModelMissing; TokenizerMismatch unless its ids mean what the policy's do.
    """
    paths: list[Path | None] = []
    for teacher in config.teacher:
        path = await asyncio.to_thread(resolve_model, teacher.name, say=say) if teacher.name else None
        if path is not None and await asyncio.to_thread(base_of, path) != path:
            raise ModelMissing(
                f"the teacher {teacher.name} is an adapter: engines load whole models",
                remedy="Merge it into its base with peft's merge_and_unload, save that, and name the folder.",
            )
        if path is not None:
            await asyncio.to_thread(refuse_other_tokenizer, model_path, path)
        paths.append(path)
    return paths


def teacher_pool(
    config: Config,
    placement: Placement,
    paths: Sequence[Path | None],
    *,
    model_path: Path,
    generators: Sequence[Generator],
    environment: Mapping[str, str],
    logs: Path,
    emit: Callable[[AnyEvent], None],
) -> TeacherPool | None:
    """Those that are asked for scores, not yet started; None if there are none, or the trainer workers hold it.

    `generators` are the policy's, for a policy that teaches itself; `environment` holds servers' keys.
    """
    routes: list[tuple[str, Teacher]] = []
    for index, (teacher, path, place) in enumerate(zip(config.teacher, paths, placement.teachers, strict=True)):
        if teacher.privileged:
            routes.append((teacher.tasks, SelfTeacher(generators)))
        elif teacher.base_url:
            routes.append((teacher.tasks, _served(config, teacher, model_path, environment)))
        elif place is not None and path is not None:
            engines = fleet.engines(
                config,
                place,
                path,
                name="teacher" if len(paths) == 1 else f"teacher-{index}",
                dtype=placement.dtype,
                logs=logs,
                seed=config.seed,
                max_model_len=config.model.max_model_len,
                max_topk=teacher.topk,
                emit=emit,
            )
            routes.append((teacher.tasks, EngineTeacher(teacher.name, engines)))
    return TeacherPool(routes) if routes else None


def held_path(config: Config, paths: Sequence[Path | None]) -> str:
    """The folder of the teacher that the trainer workers hold, for its whole vocabulary; empty if they hold none."""
    held = [str(path) for teacher, path in zip(config.teacher, paths, strict=True) if teacher.topk == -1]
    return held[0] if held else ""


def refuse_untold(tasks: Sequence[Task]) -> None:
    """Raises: TaskError naming the tasks that have no reference solution to show to a teacher."""
    without = [task.task_id for task in tasks if not task.solution]
    if without:
        raise TaskError(
            f"{len(without)} tasks have no reference solution to show to the teacher: {', '.join(without[:3])}"
            + (", ..." if len(without) > 3 else ""),
            remedy='Add solution/solve.sh to each, or train with another algo.type than "opsd".',
        )


def told_solution(task: Task) -> str:
    """The instruction as only a teacher sees it, with the task's reference solution."""
    solution = Path(task.solution).read_text(errors="replace").strip()
    return f"{task.instruction.rstrip()}\n\nThis solves it:\n```\n{solution}\n```\n"


def told_prompts(tasks: Sequence[Task], prompt_ids: Callable[[Task], list[int]]) -> dict[TaskId, list[int]]:
    """Each task's prompt [T] with its solution; `prompt_ids` makes a task's prompt. For a thread."""
    told = (msgspec.structs.replace(task, instruction=told_solution(task)) for task in tasks)
    return {task.task_id: prompt_ids(task) for task in told}


def longer_by(told: Mapping[TaskId, list[int]], tasks: Sequence[Task], prompt_ids: Callable[[Task], list[int]]) -> int:
    """How many tokens longer than a rollout, at most, is what its teacher reads. For a thread."""
    return max(len(told[task.task_id]) - len(prompt_ids(task)) for task in tasks)


def _served(config: Config, teacher: TeacherConfig, model_path: Path, environment: Mapping[str, str]) -> OpenAITeacher:
    return OpenAITeacher(
        base_url=teacher.base_url,
        api_key=environment.get(teacher.api_key_env, ""),
        topk=teacher.topk,
        context_tokens=config.model.max_model_len,
        policy_tokenizer=model_path,
        tokenizer=Path(teacher.tokenizer) if teacher.tokenizer else None,
    )
