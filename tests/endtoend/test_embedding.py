"""A program that brings everything of its own, and what is left in it after an engine has ended: nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.core.test_separability import OwnSpread
from tests.tiny import tiny_model
from thundersync import Config, Engine, Message, Policy, Task, UnscoredRollout, config_from
from thundersync.monitor.events import Event


def small(folder: Path, **changes: Any) -> Config:
    """A tiny model, steps of a second, no sandboxes."""
    model = folder / "model"
    if not model.exists():
        tiny_model(model)
    raw: dict[str, Any] = {
        "max_steps": 2,
        "name": "run",
        "output_dir": str(folder / "runs"),
        "model": {"name": str(model), "dtype": "float32", "max_model_len": 512},
        "algo": {"group_size": 3, "prompts_per_step": 2},
        "rollout": {"max_tokens": 8, "max_turns": 3, "timeout_s": 60},
        "optim": {"lr": 1e-2},
        "engine": {"backend": "transformers", "kv_cache_gib": 0.0625, "max_num_seqs": 8},
        "sandbox": {"runtime": "none"},
    }
    return config_from(raw | changes)


async def twice(task: Task, policy: Policy, sandbox: Any) -> None:
    messages = policy.opening
    for _ in range(2):
        reply = await policy.chat(messages)
        messages += [reply.message, Message(role="user", content="and?")]


async def letters(task: Task, rollout: UnscoredRollout, sandbox: Any) -> float:
    return float(sum(map(str.isalpha, rollout.reply)))


async def without_end() -> AsyncIterator[Task]:
    number = 0
    while True:
        yield Task(task_id=f"task-{number}", instruction=f"Say {number}.")
        number += 1


class Traces:
    """What an engine could leave in its process."""

    def __init__(self) -> None:
        self.children = {child.pid for child in psutil.Process().children(recursive=True)}
        self.threads = set(threading.enumerate())
        self.shared = set(map(str, Path("/dev/shm").glob("*")))
        self.files = {os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()}
        self.sockets = len([each for each in self.files if each.startswith("/proc") and "socket" in each])
        self.tasks = {task for task in asyncio.all_tasks() if not task.done()}
        self.signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        self.affinity = os.sched_getaffinity(0)

    def beyond(self, before: Traces, folder: Path) -> list[str]:
        # The loop's own, for to_thread; and the progress bar's, of the library that wrote the test's model.
        pool = lambda thread: thread.name.startswith(("asyncio_", "tqdm_monitor"))  # noqa: E731
        left = [f"process {pid}" for pid in self.children - before.children]
        left += [f"thread {thread.name}" for thread in self.threads - before.threads if not pool(thread)]
        left += [f"shared memory {path}" for path in self.shared - before.shared if f"-{os.getpid()}-" in path]
        left += [f"task {task.get_name()}" for task in self.tasks - before.tasks]
        left += [f"open {path}" for path in self.files - before.files if str(folder) in path]
        left += [f"socket {path}" for path in folder.rglob("*.sock")]
        left += [f"more sockets: {self.sockets}"] * (self.sockets > before.sockets)
        left += ["signal handlers"] * (self.signals != before.signals)
        left += ["cores"] * (self.affinity != before.affinity)
        return left


@pytest.mark.slow
async def test_a_program_brings_its_own_of_everything_and_stops_when_it_likes(tmp_path: Path) -> None:
    before = Traces()
    seen: list[Event] = []
    steps: list[float] = []

    async def on_step(step: Any) -> None:
        steps.append(step.metrics["grad_norm"])
        engine.stop()

    engine = Engine(
        small(tmp_path, max_steps=9, stream={"verify_every": 1}, eval={}),
        tasks=without_end(),
        eval_tasks=[Task(task_id="held-out", instruction="Say held out.")],
        agent=twice,
        reward=letters,
        objective=OwnSpread(),
        on_step=on_step,
        on_event=seen.append,
    )
    async with engine:
        assert Traces().signals == before.signals
        asked = asyncio.create_task(engine.generate([Message(role="user", content="beside the step")]))
        results = [step async for step in engine.steps()]
        assert isinstance(await asked, str)
        alone = await engine.rollout(engine.tasks[0])
    assert len(results) == len(steps) == 1 and steps[0] > 0
    assert results[0].metrics["audit_relative_l2"] < 1e-4  # the objective's own textbook form
    assert [task.task_id for task in engine.tasks] == ["task-0", "task-1"]
    assert {rollout.task_id for rollout in results[0].rollouts} == {"task-0", "task-1"}
    assert all(len(rollout.turns) == 2 and len(rollout.sequences) == 1 for rollout in results[0].rollouts)
    assert alone.policy_version == 1
    kinds = [event.__struct_config__.tag for event in seen]
    assert kinds.count("step_committed") == 1 and kinds[-1] == "run_finished" and kinds.count("eval_finished") == 1
    assert [e.algo for e in seen if e.__struct_config__.tag == "run_started"] == ["OwnSpread"]  # type: ignore[attr-defined]
    assert (engine.run_dir / "checkpoints" / "step-000001").is_dir()
    assert Traces().beyond(before, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
async def test_engines_follow_each_other_and_a_resumed_one_goes_on(tmp_path: Path, backend: str) -> None:
    def small_one(**changes: Any) -> Config:
        return small(tmp_path, engine={"backend": backend, "kv_cache_gib": 0.0625, "max_num_seqs": 8}, **changes)

    before = Traces()
    taken: list[list[str]] = []

    async def run(config: Config, **own: Any) -> None:
        async with Engine(config, tasks=without_end(), agent=twice, reward=letters, **own) as engine:
            taken.extend([sorted({rollout.task_id for rollout in step.rollouts}) async for step in engine.steps()])

    await run(small_one(max_steps=1))
    if backend == "vllm":
        before = Traces()  # a library may keep what it makes once (a resource tracker); no engine may add to that
    assert Traces().beyond(before, tmp_path) == []
    await run(small_one(max_steps=2), resume=True)
    await run(small_one(max_steps=1, name="another", seed=3))
    assert taken == [["task-0", "task-1"], ["task-2", "task-3"], ["task-0", "task-1"]]
    assert Traces().beyond(before, tmp_path) == []


@pytest.mark.slow
async def test_a_listener_or_a_step_callback_that_raises_ends_the_run_and_leaves_nothing(tmp_path: Path) -> None:
    before = Traces()

    def deaf(event: Event) -> None:
        raise ZeroDivisionError("the listener's own fault")

    tasks = [Task(task_id=f"t{i}", instruction=f"Say {i}.") for i in range(4)]
    with pytest.raises(ZeroDivisionError, match="own fault"):
        async with Engine(small(tmp_path), tasks=tasks, agent=twice, reward=letters, on_event=deaf) as engine:
            async for _ in engine.steps():
                raise AssertionError("the step was not handed over")
    assert (tmp_path / "runs" / "run" / "checkpoints" / "step-000001").is_dir()  # what was committed is kept
    assert Traces().beyond(before, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_any_loop_will_do(tmp_path: Path, loop: str) -> None:
    import uvloop

    async def main() -> int:
        tasks = [Task(task_id=f"t{i}", instruction=f"Say {i}.") for i in range(4)]
        async with Engine(small(tmp_path, max_steps=1), tasks=tasks, agent=twice, reward=letters) as engine:
            return len([step async for step in engine.steps()])

    factory = uvloop.new_event_loop if loop == "uvloop" else None
    with asyncio.Runner(loop_factory=factory) as runner:
        assert runner.run(main()) == 1
