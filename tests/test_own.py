"""What a program brings of its own is refused before anything starts, where it cannot work."""

from typing import Any

import pytest

from tests.core.test_separability import OwnSpread, Ranked
from tests.fakes import a_task
from thundersync import Engine
from thundersync.config import Config
from thundersync.config_file import config_from
from thundersync.core.objective import Objective
from thundersync.core.separability import NotSeparable
from thundersync.core.types import Task
from thundersync.errors import ConfigError, TaskError
from thundersync.own import Own


def config(**sections: Any) -> Config:
    return config_from({"model": {"name": "m"}} | sections)


async def fine(*_: Any) -> None:
    return None


class Callable_:
    async def __call__(self, *_: Any) -> None:
        return None


SELF_TAUGHT = {"algo": {"type": "opsd"}, "teacher": {"privileged": "solution"}}


def plain(*_: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("own", "sections", "said"),
    [
        (Own(), {}, "env.path is missing"),
        (Own(tasks=[]), {"eval": {}}, "eval.env.path is missing"),
        (Own(tasks=[], eval_tasks=[]), {}, r"without \[eval\]"),
        (Own(tasks=[], agent=plain), {}, "agent plain is not a coroutine function"),
        (Own(tasks=[], reward=plain), {}, "reward plain is not a coroutine function"),
        (Own(tasks=[]), {"sandbox": {"runtime": "none"}}, "without a shell"),
        (Own(tasks=[], agent=fine), {"rollout": {"agent": "terminal"}}, "one of them works on the tasks"),
        (Own(tasks=[], agent=fine), SELF_TAUGHT, "the built-in agents' prompt"),
        (Own(tasks=iter([])), SELF_TAUGHT, "before it starts"),
        (Own(tasks=[], objective=OwnSpread(kl_coef=0.1)), {}, "weighs the kl term"),
        (Own(tasks=[], objective=OwnSpread()), {"algo": {"entropy_coef": 0.1}}, "does not weigh the entropy term"),
        (Own(tasks=[], objective=Objective(distils=True)), {}, "weighs the teacher term"),
    ],
)
def test_what_cannot_work_is_told(own: Own, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        own.check(config(**sections))


def test_what_can_work_passes() -> None:
    Own(tasks=[], agent=fine, reward=Callable_(), objective=OwnSpread()).check(config())
    Own(tasks=[], agent=fine).check(config(sandbox={"runtime": "none"}))
    Own(tasks=[], objective=OwnSpread(kl_coef=0.3)).check(config(algo={"kl_coef": 0.1}))
    with pytest.raises(NotSeparable):
        Own(tasks=[], objective=Ranked()).check(config())


def test_tasks_that_nobody_judges_are_told() -> None:
    unjudged = Task(task_id="t", instruction="Do it.")
    with pytest.raises(TaskError, match="1 tasks have no checker: t"):
        Own().check_tasks([a_task(), unjudged], "process")
    Own(reward=fine).check_tasks([unjudged], "process")


async def test_an_engine_is_refused_whole_and_entered_once(tmp_path: Any) -> None:
    engine = Engine(config(output_dir=str(tmp_path / "runs")), agent=plain)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not a coroutine function"):
        await engine.__aenter__()
    with pytest.raises(RuntimeError, match="entered once"):
        await engine.__aenter__()
    assert not (tmp_path / "runs").exists()


def test_every_public_name_is_there_and_says_what_it_is() -> None:
    import thundersync

    assert set(thundersync.__all__) <= set(dir(thundersync))
    for name in thundersync.__all__:
        value = getattr(thundersync, name)
        assert (value.__doc__ or "").strip(), f"{name} has no docstring"
        assert f"`{name}`" in str(thundersync.__doc__) or issubclass(value, Exception), f"{name} is not in the overview"
