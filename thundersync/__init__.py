"""Gradient streaming for LLM agents.

The names a program needs to embed a run; docs/embedding.md shows them at work. They are looked up when used, so that
importing this package imports nothing else.

- A run: `Engine`, `StepResult`, `EvalResult`; `Config`, `load_config`, `config_from`.
- Tasks: `Task`, `Image`, `Checker`, `load_tasks`, `TaskStream`.
- Agents: `Policy`, `Reply`, `Message`, `Scored`, `Failed`, `LimitReached`.
- Rewards: `UnscoredRollout`. Rollouts: `Rollout`.
- Objectives: `Objective`, `SeparableObjective`, `JoinScalars`, `check_separable`.
- Errors: `ThundersyncError` and its kinds, each with a remedy.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thundersync.config import Config
    from thundersync.config_file import config_from, load_config
    from thundersync.core.advantage import JoinScalars
    from thundersync.core.objective import Objective, SeparableObjective
    from thundersync.core.separability import NotSeparable, check_separable
    from thundersync.core.types import (
        Checker,
        Failed,
        Image,
        Message,
        Rollout,
        Scored,
        Task,
        UnscoredRollout,
    )
    from thundersync.engine import Engine
    from thundersync.errors import ConfigError, ThundersyncError
    from thundersync.evaluate.evaluator import EvalResult
    from thundersync.rollout.policy import Policy, Reply
    from thundersync.rollout.sampler import LimitReached
    from thundersync.step import StepResult
    from thundersync.tasks.harbor import load_tasks
    from thundersync.tasks.own import TaskStream

__version__ = "0.1.0"

__all__ = [
    "Checker",
    "Config",
    "ConfigError",
    "Engine",
    "EvalResult",
    "Failed",
    "Image",
    "JoinScalars",
    "LimitReached",
    "Message",
    "NotSeparable",
    "Objective",
    "Policy",
    "Reply",
    "Rollout",
    "Scored",
    "SeparableObjective",
    "StepResult",
    "Task",
    "TaskStream",
    "ThundersyncError",
    "UnscoredRollout",
    "check_separable",
    "config_from",
    "load_config",
    "load_tasks",
]

_HOMES = {
    "Checker": "core.types",
    "Config": "config",
    "ConfigError": "errors",
    "Engine": "engine",
    "EvalResult": "evaluate.evaluator",
    "Failed": "core.types",
    "Image": "core.types",
    "JoinScalars": "core.advantage",
    "LimitReached": "rollout.sampler",
    "Message": "core.types",
    "NotSeparable": "core.separability",
    "Objective": "core.objective",
    "Policy": "rollout.policy",
    "Reply": "rollout.policy",
    "Rollout": "core.types",
    "Scored": "core.types",
    "SeparableObjective": "core.objective",
    "StepResult": "step",
    "Task": "core.types",
    "TaskStream": "tasks.own",
    "ThundersyncError": "errors",
    "UnscoredRollout": "core.types",
    "check_separable": "core.separability",
    "config_from": "config_file",
    "load_config": "config_file",
    "load_tasks": "tasks.harbor",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
