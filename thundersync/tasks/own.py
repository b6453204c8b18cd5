"""Tasks of the program that embeds the engine: a collection, or something that makes each step's tasks as it goes.

What a program gives goes in, a `TaskSource` comes out. Collections are shuffled by the seed as any other tasks are;
everything else is taken in its own order, and says what a checkpoint has to keep. Refuses to know what a task is.
"""

import asyncio
import inspect
import itertools
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from thundersync.core.types import Task
from thundersync.errors import ConfigError, ResumeError, TaskError
from thundersync.tasks.source import TaskSource


@runtime_checkable
class TaskStream(Protocol):
    """A source with a memory, e.g. a curriculum."""

    async def step(self, step: int, *, count: int, seed: int) -> Sequence[Task]:
        """The `count` tasks of a step, counted from 0; fewer (or none) end the run before this step."""

    def state(self) -> Any:
        """What JSON can carry and `restore` needs; asked after each step, kept in its checkpoint."""

    def restore(self, state: Any) -> None:
        """Called once before the first step of a resumed run."""


TaskFunction: TypeAlias = Callable[[int, int, int], Awaitable[Sequence[Task]]]
"""`async def tasks(step, count, seed) -> Sequence[Task]`: without a memory, so that a resumed run needs no state."""

OwnTasks: TypeAlias = Collection[Task] | Iterator[Task] | AsyncIterable[Task] | TaskFunction | TaskStream
"""A collection: shuffled by the run's seed, in epochs. An iterator, sync or async: taken in order until it ends; a
resumed run needs a fresh one and skips what was taken. A function of the step, or a `TaskStream`: asked each step."""


def source_of(
    given: OwnTasks, *, prompts_per_step: int, seed: int, accept: Callable[[Sequence[Task]], list[Task]]
) -> TaskSource:
    """What a program gave, as a source. `accept` gives tasks as this run works them, and refuses those
    it cannot.

    Raises: ConfigError for what gives no tasks, TaskError for a collection that is empty or repeats an id.
    """
    if isinstance(given, TaskStream):
        return StreamedTasks(given, prompts_per_step=prompts_per_step, seed=seed, accept=accept)
    if isinstance(given, Collection):
        tasks = list(given)
        _refuse_strangers(tasks)
        return TaskSource(accept(tasks), prompts_per_step=prompts_per_step, seed=seed)
    stream: TaskStream
    if isinstance(given, AsyncIterable):
        stream = _Drawn(aiter(given))
    elif isinstance(given, Iterator):
        stream = _Drawn(_in_threads(given))
    elif inspect.iscoroutinefunction(given):
        stream = _Asked(given)
    else:
        raise ConfigError(
            f"tasks = {given!r} gives no tasks",
            remedy="Give a list of Task, an iterator of them, `async def tasks(step, count, seed)`, or a TaskStream.",
        )
    name = getattr(given, "__qualname__", type(given).__qualname__)
    return StreamedTasks(stream, prompts_per_step=prompts_per_step, seed=seed, accept=accept, name=name)


class StreamedTasks(TaskSource):
    """Tasks that are not known before their step. `tasks` and `step` know those that were taken last: a stream may be
    without an end."""

    def __init__(
        self,
        stream: TaskStream,
        *,
        prompts_per_step: int,
        seed: int,
        accept: Callable[[Sequence[Task]], list[Task]],
        name: str = "",
    ) -> None:
        self._stream = stream
        self._prompts_per_step = prompts_per_step
        self._seed = seed
        self._accept = accept
        self._name = name or type(stream).__qualname__
        self._by_id: dict[str, Task] = {}
        self._taken: dict[int, list[Task]] = {}

    @property
    def digest(self) -> str:
        """Names the source: what it will give is not known."""
        return f"stream:{self._name}"

    def step(self, step_index: int) -> list[Task]:
        return self._taken.get(step_index, [])

    async def take(self, step_index: int) -> list[Task]:
        """None if the stream has too few left. Raises: TaskError for tasks that cannot be worked, and whatever the
        stream raises."""
        if step_index not in self._taken:
            tasks = list(await self._stream.step(step_index, count=self._prompts_per_step, seed=self._seed))
            _refuse_strangers(tasks)
            if len(tasks) > self._prompts_per_step:
                raise TaskError(
                    f"{self._name} gave {len(tasks)} tasks for step {step_index}, which has {self._prompts_per_step}",
                    remedy="Give as many as were asked for (`count`).",
                )
            if len(tasks) < self._prompts_per_step:
                return []
            tasks = await asyncio.to_thread(self._accept, tasks)
            self._taken = {step_index: tasks}
            self._by_id = {task.task_id: task for task in tasks}
        return self._taken[step_index]

    def state(self) -> Any:
        return self._stream.state()

    def restore(self, state: Any) -> None:
        try:
            self._stream.restore(state)
        except (TypeError, ValueError, KeyError) as error:
            raise ResumeError(
                f"{self._name} cannot go on from what the checkpoint kept of it: {type(error).__name__}: {error}",
                remedy="Resume with the source that the run began with, or start a new run under another name.",
            ) from error


class _Asked:
    """A function of the step."""

    def __init__(self, function: TaskFunction) -> None:
        self._function = function

    async def step(self, step: int, *, count: int, seed: int) -> Sequence[Task]:
        return await self._function(step, count, seed)

    def state(self) -> Any:
        return None

    def restore(self, state: Any) -> None:
        """It has no memory."""


class _Drawn:
    """An iterator, taken in order."""

    def __init__(self, tasks: AsyncIterator[Task]) -> None:
        self._tasks = tasks
        self._drawn = 0
        self._skip = 0

    async def step(self, step: int, *, count: int, seed: int) -> Sequence[Task]:
        for _ in range(self._skip):
            await anext(self._tasks, None)
        self._skip = 0
        found: list[Task] = []
        while len(found) < count and (task := await anext(self._tasks, None)) is not None:
            found.append(task)
        self._drawn += len(found)
        return found

    def state(self) -> Any:
        return self._drawn

    def restore(self, state: Any) -> None:
        self._drawn = self._skip = int(state)


async def _in_threads(tasks: Iterator[Task]) -> AsyncIterator[Task]:
    """A plain iterator may read files: never on the event loop."""
    while found := await asyncio.to_thread(lambda: list(itertools.islice(tasks, 1))):
        yield found[0]


def _refuse_strangers(tasks: Sequence[Any]) -> None:
    for each in tasks:
        if not isinstance(each, Task):
            raise TaskError(
                f"a task source gave {type(each).__name__}: {each!r:.80}", remedy="Give values of thundersync.Task."
            )
