"""What a program that embeds the engine brings of its own: tasks, an agent, a reward, an objective, an ear.

Each stands in the place of a part that the configuration would have chosen, and is refused here, before anything
starts, where it cannot. Knows what they are and nothing of what is done with them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from msgspec import Struct

from thundersync.config import DISTILLING, Config
from thundersync.core.objective import SeparableObjective
from thundersync.core.separability import check_separable
from thundersync.core.types import Message, Task
from thundersync.errors import ConfigError, TaskError
from thundersync.monitor.events import Event
from thundersync.rollout.functions import AgentFunction
from thundersync.rollout.prompts import load_prompt
from thundersync.score.judge import CheckerJudge, FunctionJudge, Judge, RewardFunction, refuse_plain
from thundersync.score.reward import RewardChecker
from thundersync.tasks.own import OwnTasks

__all__ = ["AgentFunction", "Own", "OwnTasks", "RewardFunction"]

SHELL_PROMPT = "shell"
"""The built-in agent's, which means nothing to an agent function."""


class Own(Struct, frozen=True, kw_only=True):
    """None: as the configuration says."""

    tasks: OwnTasks | None = None
    eval_tasks: Sequence[Task] | None = None
    agent: AgentFunction | None = None
    reward: RewardFunction | None = None
    objective: SeparableObjective | None = None
    on_event: Callable[[Event], None] | None = None

    def check(self, config: Config) -> None:
        """Raises: ConfigError, NotSeparable."""
        for function, what in ((self.agent, "agent"), (self.reward, "reward")):
            if function is not None:
                refuse_plain(function, what)
        if self.tasks is None and not config.env.path:
            raise ConfigError(
                "there are no tasks: env.path is missing",
                remedy="Give env.path a folder or file of tasks, or give the engine its own: Engine(tasks=...).",
            )
        if config.eval is not None and self.eval_tasks is None and not config.eval.env.path:
            raise ConfigError(
                "there are no evaluation tasks: eval.env.path is missing",
                remedy="Give it a folder or file of tasks, or give the engine Engine(eval_tasks=...).",
            )
        if config.eval is None and self.eval_tasks is not None:
            raise ConfigError("eval_tasks without [eval]", remedy="Say in [eval] when they are to be evaluated.")
        if config.serve is not None and self.agent is not None:
            raise ConfigError(
                "[serve] and Engine(agent=...) are two agents", remedy="Leave out one: programs outside, or a function."
            )
        if config.sandbox.runtime == "none" and self.agent is None and config.serve is None:
            raise ConfigError(
                'sandbox.runtime = "none" leaves the built-in agent without a shell',
                remedy='Use "auto", "docker" or "process", or give the engine an agent of its own: Engine(agent=...).',
            )
        if self.agent is not None and config.rollout.agent != "auto":
            raise ConfigError(
                f'rollout.agent = "{config.rollout.agent}" and an agent function: one of them works on the tasks',
                remedy="Leave rollout.agent out, or leave Engine(agent=...) out.",
            )
        if config.algo.type == "opsd" and self.agent is not None:
            raise ConfigError(
                'algo.type = "opsd" shows the teacher the built-in agents\' prompt with the solution in it',
                remedy='Use algo.type = "opd" with a teacher of its own, or leave Engine(agent=...) out.',
            )
        if config.algo.type == "opsd" and not isinstance(self.tasks, Collection | None):
            raise ConfigError(
                'algo.type = "opsd" needs all tasks and their solutions before it starts',
                remedy="Give Engine(tasks=...) a list.",
            )
        if self.objective is not None:
            check_separable(self.objective)
            _refuse_other_terms(self.objective, config)

    def check_tasks(self, tasks: Sequence[Task], runtime: str) -> None:
        """Tasks that nobody could judge. Raises: TaskError."""
        if self.reward is not None or self.agent is not None:
            return
        unjudged = [task.task_id for task in tasks if not task.checker.tests and not task.checker.script]
        if unjudged:
            raise TaskError(
                f"{len(unjudged)} tasks have no checker: {', '.join(unjudged[:3])}",
                remedy="Give Task(checker=Checker(tests=...)), or a reward function: Engine(reward=...).",
            )

    def judge(self, checker: RewardChecker) -> Judge:
        return FunctionJudge(self.reward) if self.reward is not None else CheckerJudge(checker)

    def prompt(self, config: Config) -> list[Message]:
        """What stands before a task's instruction."""
        if self.agent is not None and not config.rollout.system_prompt:
            return []
        return load_prompt(config.rollout.system_prompt or SHELL_PROMPT)

    def named(self, config: Config) -> str:
        """Of the objective, for viewers."""
        return config.algo.type if self.objective is None else type(self.objective).__name__


def _refuse_other_terms(objective: SeparableObjective, config: Config) -> None:
    """A term needs what the configuration prepares for it: a reference, the entropy, a teacher."""
    algo = config.algo
    weights = objective.weights(100)
    prepared: dict[str, tuple[Any, str]] = {
        "kl": (algo.kl_coef and algo.kl_type != "k1", "algo.kl_coef"),
        "entropy": (algo.entropy_coef, "algo.entropy_coef"),
        "teacher": (algo.type in DISTILLING, 'algo.type = "opd"'),
    }
    for term, (ready, key) in prepared.items():
        if bool(getattr(weights, term)) != bool(ready):
            has = "weighs" if getattr(weights, term) else "does not weigh"
            raise ConfigError(
                f"{type(objective).__name__} {has} the {term} term, and {key} says otherwise",
                remedy=f"Set {key} where the objective has that term (how much is the objective's), else leave it out.",
            )
