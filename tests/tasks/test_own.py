"""Tasks of an embedding program: shuffled, drawn or asked for, and a resumed run goes on where the first one stood."""

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest

from tests.fakes import a_task
from thundersync.core.types import Task
from thundersync.errors import ConfigError, ResumeError, TaskError
from thundersync.tasks.own import source_of
from thundersync.tasks.source import TaskSource

TASKS = [a_task(f"t{index}") for index in range(7)]


def source(given: Any, *, accept: Any = list) -> TaskSource:
    return source_of(given, prompts_per_step=3, seed=4, accept=accept)


async def taken(of: TaskSource, steps: Sequence[int]) -> list[list[str]]:
    return [[task.task_id for task in await of.take(step)] for step in steps]


async def in_order() -> AsyncIterator[Task]:
    for task in TASKS:
        yield task


def plainly() -> Iterator[Task]:
    yield from TASKS


async def asked(step: int, count: int, seed: int) -> list[Task]:
    return [a_task(f"{seed}/{step}/{index}") for index in range(count)]


class Curriculum:
    """Harder with each step it was told of."""

    def __init__(self) -> None:
        self.level = 0

    async def step(self, step: int, *, count: int, seed: int) -> list[Task]:
        return [a_task(f"level-{self.level}-{index}") for index in range(count)]

    def state(self) -> Any:
        return {"level": self.level}

    def restore(self, state: Any) -> None:
        self.level = state["level"]


async def test_a_collection_is_shuffled_as_tasks_of_a_folder_are() -> None:
    same = TaskSource(TASKS, prompts_per_step=3, seed=4)
    own = source(TASKS)
    assert await taken(own, range(4)) == await taken(same, range(4))
    assert own.digest == same.digest and own.state() is None


@pytest.mark.parametrize("make", [in_order, plainly])
async def test_an_iterator_is_taken_in_order_and_gone_on_with_after_a_resume(make: Any) -> None:
    first = source(make())
    assert await taken(first, [0]) == [["t0", "t1", "t2"]]
    kept = first.state()
    assert await taken(first, [1]) == [["t3", "t4", "t5"]]
    second = source(make())
    second.restore(kept)
    assert await taken(second, [1, 2]) == [["t3", "t4", "t5"], []]
    assert second.digest == first.digest


async def test_a_function_is_asked_each_step_and_a_step_is_taken_once() -> None:
    own = source(asked)
    assert await taken(own, [0, 0, 1]) == [[f"4/{s}/{i}" for i in range(3)] for s in (0, 0, 1)]
    assert [task.task_id for task in own.step(1)] == ["4/1/0", "4/1/1", "4/1/2"]
    assert own.step(2) == []  # nobody knows yet


async def test_a_source_with_a_memory_keeps_it() -> None:
    one = Curriculum()
    own = source(one)
    one.level = 2
    assert (await taken(own, [0]))[0][0] == "level-2-0"
    other = Curriculum()
    source(other).restore(own.state())
    assert other.level == 2
    with pytest.raises(ResumeError, match="Curriculum cannot go on"):
        source(Curriculum()).restore({})


async def test_tasks_are_accepted_before_their_step() -> None:
    def accept(tasks: Sequence[Task]) -> list[Task]:
        raise TaskError("not these")

    with pytest.raises(TaskError, match="not these"):
        source(TASKS, accept=accept)
    with pytest.raises(TaskError, match="not these"):
        await source(asked, accept=accept).take(0)


async def test_what_gives_no_tasks_is_refused() -> None:
    async def strings(step: int, count: int, seed: int) -> list[str]:
        return ["a"] * count

    async def too_many(step: int, count: int, seed: int) -> list[Task]:
        return TASKS

    for wrong in (7, lambda step: TASKS):
        with pytest.raises(ConfigError, match="gives no tasks"):
            source(wrong)
    with pytest.raises(TaskError, match="gave str"):
        source(["a", "b"])
    with pytest.raises(TaskError, match="gave str"):
        await source(strings).take(0)
    with pytest.raises(TaskError, match="gave 7 tasks for step 0, which has 3"):
        await source(too_many).take(0)
    with pytest.raises(TaskError, match="no tasks"):
        source([])
