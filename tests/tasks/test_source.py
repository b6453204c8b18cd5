"""The order of tasks is a pure function of seed and step, in epochs that use every task once."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thundersync.core.types import Checker, Image, Task
from thundersync.errors import TaskError
from thundersync.tasks.source import TaskSource

counts = st.integers(min_value=1, max_value=40)
seeds = st.integers(min_value=0, max_value=2**31)


def make_tasks(count: int) -> list[Task]:
    return [
        Task(task_id=f"t{index}", suite="s", instruction="do", image=Image(name="i"), checker=Checker(tests="/t"))
        for index in range(count)
    ]


def ids(source: TaskSource, steps: range) -> list[str]:
    return [task.task_id for step in steps for task in source.step(step)]


@given(count=counts, per_step=counts, seed=seeds, step=st.integers(min_value=0, max_value=200))
def test_a_step_is_the_same_whatever_was_asked_before(count: int, per_step: int, seed: int, step: int) -> None:
    walked = TaskSource(make_tasks(count), prompts_per_step=per_step, seed=seed)
    for earlier in range(0, step, 7):
        walked.step(earlier)
    resumed = TaskSource(make_tasks(count), prompts_per_step=per_step, seed=seed)
    assert walked.step(step) == resumed.step(step)
    assert len(walked.step(step)) == per_step


@given(count=counts, per_step=counts, seed=seeds, epochs=st.integers(min_value=1, max_value=4))
def test_every_epoch_holds_every_task_once(count: int, per_step: int, seed: int, epochs: int) -> None:
    source = TaskSource(make_tasks(count), prompts_per_step=per_step, seed=seed)
    drawn = ids(source, range(-(-count * epochs // per_step)))
    for epoch in range(epochs):
        assert Counter(drawn[epoch * count : (epoch + 1) * count]) == Counter(
            task.task_id for task in make_tasks(count)
        )


@given(seed=seeds, per_step=st.integers(min_value=1, max_value=8))
def test_the_order_does_not_depend_on_how_the_tasks_were_listed(seed: int, per_step: int) -> None:
    tasks = make_tasks(12)
    forward = TaskSource(tasks, prompts_per_step=per_step, seed=seed)
    backward = TaskSource(tasks[::-1], prompts_per_step=per_step, seed=seed)
    assert ids(forward, range(20)) == ids(backward, range(20))


def test_epochs_and_seeds_draw_different_orders() -> None:
    tasks = make_tasks(30)
    source = TaskSource(tasks, prompts_per_step=30, seed=42)
    other = TaskSource(tasks, prompts_per_step=30, seed=43)
    assert len({tuple(ids(source, range(step, step + 1))) for step in range(5)}) == 5
    assert ids(source, range(1)) != ids(other, range(1))


def test_the_order_of_a_seed_never_changes() -> None:
    # A run begun under an older version resumes with the same tasks.
    source = TaskSource(make_tasks(5), prompts_per_step=5, seed=42)
    assert ids(source, range(2)) == ["t3", "t2", "t4", "t0", "t1", "t2", "t3", "t1", "t4", "t0"]


def test_no_tasks_and_doubled_ids_are_refused() -> None:
    with pytest.raises(TaskError, match="no tasks"):
        TaskSource([], prompts_per_step=1, seed=0)
    with pytest.raises(TaskError, match="share the id"):
        TaskSource([*make_tasks(2), *make_tasks(1)], prompts_per_step=1, seed=0)
