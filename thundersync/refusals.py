"""What a run refuses before an engine starts: tasks it cannot run, prompts too long, another run's checkpoint.

Told at once and in one sentence, instead of by every rollout. Looks at values only; starts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from thundersync.checkpoints import CheckpointState
from thundersync.config import Config
from thundersync.core.types import Task
from thundersync.errors import ResumeError, TaskError
from thundersync.tasks.source import TaskSource

PROMPTS_CHECKED = 100


def refuse_network(runtime: str, tasks: Sequence[Task]) -> None:
    """Told now, not by every rollout."""
    asking = [task.task_id for task in tasks if task.network]
    if runtime == "process" and asking:
        raise TaskError(
            f"{len(asking)} tasks ask for network, which process sandboxes never have: {', '.join(asking[:3])}, ...",
            remedy='Use sandbox.runtime = "docker", or sandbox.network = "off" if they do without.',
        )


def refuse_long_prompts(tasks: Sequence[Task], prompt_ids: Callable[[Task], list[int]], limit: int) -> None:
    """A prompt that leaves no room for a reply is known before an engine starts; the longest instructions tell."""
    for task in sorted(tasks, key=lambda task: -len(task.instruction))[:PROMPTS_CHECKED]:
        length = len(prompt_ids(task))
        if length >= limit:
            raise TaskError(
                f"the prompt of task {task.task_id} has {length} tokens, model.max_model_len is {limit}: no reply fits",
                remedy="Raise model.max_model_len, or shorten rollout.system_prompt.",
            )


def refuse_overlap(tasks: Sequence[Task], eval_tasks: Sequence[Task]) -> None:
    """Evaluation on training tasks would measure memory."""
    both = set(map(_same, tasks)) & set(map(_same, eval_tasks))
    if both:
        raise TaskError(
            f"{len(both)} tasks are training and evaluation tasks at once",
            remedy="Give the evaluation a folder of its own, e.g. starter/eval beside starter/train.",
        )


def _same(task: Task) -> str:
    """What makes two tasks one: the checker, or the instruction where a reward function judges."""
    return task.checker.tests or task.instruction


def run_state(
    config: Config, source: TaskSource, *, step: int, policy_version: int, tasks_state: Any = None
) -> CheckpointState:
    """`tasks_state` is what the source asked to keep after the last step."""
    return CheckpointState(
        step=step,
        policy_version=policy_version,
        seed=config.seed,
        model=config.model.name,
        prompts_per_step=config.algo.prompts_per_step,
        tasks=source.digest,
        tasks_state=tasks_state,
    )


def refuse_other_run(state: CheckpointState, fresh: CheckpointState) -> None:
    """A resumed run works on the same tasks in the same order, or not at all."""
    changed = [
        f"{name}: the checkpoint has {getattr(state, name)}, the configuration {getattr(fresh, name)}"
        for name in ("model", "seed", "prompts_per_step", "tasks")
        if getattr(state, name) != getattr(fresh, name)
    ]
    if changed:
        raise ResumeError(
            "the checkpoint is of another run: " + "; ".join(changed),
            remedy="Resume with the run's own config.toml and tasks, or start a new run under another name.",
        )
