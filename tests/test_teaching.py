"""Teachers made from [teacher]: who has which task, who shares the policy's vocabulary, and what only they see."""

import shutil
from pathlib import Path

import pytest

from tests.endtoend.rig import drawing_tasks
from tests.tiny import tiny_model
from thundersync.config import Config
from thundersync.config_file import config_from
from thundersync.core.types import Task
from thundersync.errors import TaskError, TokenizerMismatch
from thundersync.placement import place
from thundersync.score.teacher import TeacherPool
from thundersync.tasks.harbor import load_tasks
from thundersync.teaching import (
    held_path,
    longer_by,
    refuse_untold,
    teacher_paths,
    teacher_pool,
    told_prompts,
    told_solution,
)


def opd(model: Path, *teachers: dict[str, object], kind: str = "opd") -> Config:
    raw: dict[str, object] = {"model": {"name": str(model)}, "env": {"path": "p"}, "algo": {"type": kind}}
    return config_from(raw | {"engine": {"backend": "transformers"}, "teacher": list(teachers)})


async def pool(config: Config, model: Path, logs: Path) -> TeacherPool | None:
    placement = place(config, cores=[0, 1], gpus=[], cpu_flags=set())
    paths = await teacher_paths(config, model, say=lambda text: None)
    return teacher_pool(
        config,
        placement,
        paths,
        model_path=model,
        generators=[],
        environment={},
        logs=logs,
        emit=lambda event: None,
    )


def tasks(folder: Path) -> list[Task]:
    return load_tasks(str(drawing_tasks(folder, 2)))


async def test_each_task_has_the_first_teacher_that_matches(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    config = opd(model, {"name": str(model), "tasks": "git-*"}, {"base_url": "http://127.0.0.1:9/v1"})
    made = await pool(config, model, tmp_path)
    assert made is not None
    assert made.for_task("git-rebase").name == str(model)
    assert made.for_task("sort").name == "the model at http://127.0.0.1:9/v1"


async def test_a_policy_that_teaches_itself_needs_no_other_engine(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    made = await pool(opd(model, {"privileged": "solution"}, kind="opsd"), model, tmp_path)
    assert made is not None
    assert made.for_task("any").name == "the policy itself"


async def test_a_teacher_for_the_whole_vocabulary_is_the_workers(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    config = opd(model, {"name": str(model), "topk": -1})
    assert await pool(config, model, tmp_path) is None
    assert held_path(config, await teacher_paths(config, model, say=lambda text: None)) == str(model)


async def test_a_teacher_with_other_tokens_is_refused_before_it_starts(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    other = tmp_path / "other"
    shutil.copytree(model, other)
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokenizer.replace("<|im_end|>", "<|im_stop|>"))
    assert (other / "tokenizer.json").read_text() != tokenizer
    with pytest.raises(TokenizerMismatch):
        await teacher_paths(opd(model, {"name": str(other)}), model, say=lambda text: None)


def test_only_the_teacher_is_told_the_solution(tmp_path: Path) -> None:
    first, _ = with_solutions = tasks(tmp_path / "tasks")
    Path(first.solution).write_text("#!/bin/bash\nmkdir out\n")
    refuse_untold(with_solutions)
    assert "mkdir out" in told_solution(first)
    assert first.instruction.strip() in told_solution(first)
    told = told_prompts(with_solutions, lambda task: list(task.instruction.encode()))
    assert bytes(told[first.task_id]).decode() == told_solution(first)
    longer = longer_by(told, with_solutions, lambda task: list(task.instruction.encode()))
    assert longer == len(told_solution(first)) - len(first.instruction)


def test_a_task_without_a_solution_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    tasks(folder)
    shutil.rmtree(folder / "draw-1" / "solution")
    with pytest.raises(TaskError, match="1 tasks have no reference solution to show to the teacher: draw-1"):
        refuse_untold(load_tasks(str(folder)))
