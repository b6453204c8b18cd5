"""Gradient streaming for LLM agents.

The names a program needs to embed a run. They are looked up when used, so that importing this package imports
nothing else.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thundersync.config import Config
    from thundersync.config_file import config_from, load_config
    from thundersync.core.types import Message, Rollout, Task
    from thundersync.engine import Engine
    from thundersync.errors import ThundersyncError
    from thundersync.evaluation import EvalResult
    from thundersync.step import StepResult
    from thundersync.tasks.harbor import load_tasks

__version__ = "0.1.0"

__all__ = [
    "Config",
    "Engine",
    "EvalResult",
    "Message",
    "Rollout",
    "StepResult",
    "Task",
    "ThundersyncError",
    "config_from",
    "load_config",
    "load_tasks",
]

_HOMES = {
    "Config": "config",
    "Engine": "engine",
    "EvalResult": "evaluation",
    "Message": "core.types",
    "Rollout": "core.types",
    "StepResult": "step",
    "Task": "core.types",
    "ThundersyncError": "errors",
    "config_from": "config_file",
    "load_config": "config_file",
    "load_tasks": "tasks.harbor",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
