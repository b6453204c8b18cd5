"""Which tasks a step works on: a pure function of seed and step, so that a resumed run needs no state.

Stands between the loaded tasks and the step driver. Refuses to know what a task is, how it went, and what ran before.
"""

import functools
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from thundersync.core.types import Task
from thundersync.errors import TaskError


class TaskSource:
    """Shuffled epochs: every task once before any task again, in an order drawn anew for each epoch.

    The order depends on seed, epoch and the set of task ids alone: not on how the tasks were listed, and not on the
    random module of some Python version.
    """

    def __init__(self, tasks: Sequence[Task], *, prompts_per_step: int, seed: int) -> None:
        """Raises: TaskError without tasks, or when two share an id."""
        by_id = {task.task_id: task for task in tasks}
        if not by_id:
            raise TaskError("there are no tasks to draw from", remedy="Give a task folder that holds at least one.")
        if len(by_id) < len(tasks):
            raise TaskError(
                f"{len(tasks) - len(by_id)} tasks share the id of another",
                remedy="Task ids are folder names: load one folder of tasks, or rename.",
            )
        self._by_id = by_id
        self._prompts_per_step = prompts_per_step
        self._seed = seed
        # A step reads one epoch, or the end of one and the start of the next.
        self._order = functools.lru_cache(maxsize=2)(self._draw)

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def tasks(self) -> list[Task]:
        """All of them, by id."""
        return [self._by_id[task_id] for task_id in sorted(self._by_id)]

    @property
    def digest(self) -> str:
        """12 hex digits over the task ids: equal digests, seeds and group counts give equal orders."""
        return blake2b("\n".join(sorted(self._by_id)).encode(), digest_size=6).hexdigest()

    def step(self, step_index: int) -> list[Task]:
        """The `prompts_per_step` tasks of a step, counted from 0; one may come twice only across an epoch's end."""
        first = step_index * self._prompts_per_step
        return [self._at(position) for position in range(first, first + self._prompts_per_step)]

    async def take(self, step_index: int) -> list[Task]:
        """The same for whoever works them now; a source that makes its tasks as it goes makes them here."""
        return self.step(step_index)

    def state(self) -> Any:
        """What a checkpoint keeps of it: nothing, because the order follows from seed and step."""
        return None

    def restore(self, state: Any) -> None:
        """Go on from a checkpoint's `state`."""

    def _at(self, position: int) -> Task:
        epoch, index = divmod(position, len(self._by_id))
        return self._by_id[self._order(epoch)[index]]

    def _draw(self, epoch: int) -> list[str]:
        def key(task_id: str) -> bytes:
            return blake2b(f"{self._seed}/{epoch}/{task_id}".encode(), digest_size=16).digest()

        return sorted(self._by_id, key=key)
