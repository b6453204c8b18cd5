"""Which agent works on which task: the prompt it begins with, and the hands it acts with.

Between the configuration (`rollout.agent`, `rollout.system_prompt`) and `agent.ShellAgent`. Knows nothing of turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from sandboxes.base import Sandbox
from thundersync.config import RolloutConfig
from thundersync.core.types import Message, Task
from thundersync.rollout.dialogue import Tool
from thundersync.rollout.hands import Hands, RepairHands, ShellHands
from thundersync.rollout.prompts import load_prompt
from thundersync.rollout.protocol import BASH_TOOL
from thundersync.rollout.terminal_hands import TerminalHands

AgentName: TypeAlias = Literal["shell", "repair", "terminal"]


class Manners:
    """Under `auto`, repairs have the repair agent, and everything else the shell agent."""

    def __init__(self, rollout: RolloutConfig) -> None:
        """Raises: ConfigError for a prompt that is not there, or not one."""
        self._agent = rollout.agent
        self._limit_chars = rollout.output_limit_chars
        names: tuple[AgentName, ...] = ("shell", "repair") if rollout.agent == "auto" else (rollout.agent,)
        self._prompts = {name: load_prompt(_source(rollout.system_prompt, name)) for name in names}

    @property
    def tools(self) -> list[Tool]:
        """What is declared to a model whose template has tools. A terminal is typed into."""
        return [] if self._agent == "terminal" else [BASH_TOOL]

    def name(self, task: Task) -> AgentName:
        if self._agent != "auto":
            return self._agent
        return "repair" if task.checker.verdict == "repair" else "shell"

    def opening(self, task: Task) -> list[Message]:
        """The conversation before the first reply."""
        return [*self._prompts[self.name(task)], Message(role="user", content=task.instruction)]

    def hands(self, task: Task, sandbox: Sandbox, *, tools: bool) -> Hands:
        """For one rollout. `tools`: they were declared to the model."""
        match self.name(task):
            case "repair":
                return RepairHands(sandbox, tools=tools, limit_chars=self._limit_chars)
            case "terminal":
                return TerminalHands(sandbox, limit_chars=self._limit_chars)
            case _:
                return ShellHands(sandbox, tools=tools, limit_chars=self._limit_chars)


class OnePrompt(Manners):
    """The shell agent for every task, with a prompt that is given as messages."""

    def __init__(self, prompt: Sequence[Message], *, limit_chars: int) -> None:
        self._agent = "shell"
        self._limit_chars = limit_chars
        self._prompts = {"shell": list(prompt)}


def _source(system_prompt: str, name: AgentName) -> str:
    """Where an agent's prompt is read: what was configured for all, its file in a configured folder, or its own."""
    if not system_prompt:
        return name
    folder = Path(system_prompt).expanduser()
    if not folder.is_dir():
        return system_prompt
    file = folder / f"{name}.md"
    return str(file) if file.is_file() else name
