"""A task's reference solution, run in a sandbox the way an agent's work would be.

For `tasks check` and for the oracle of an evaluation, so that both mean the same by it. Judges nothing.
"""

import asyncio
from pathlib import Path
from typing import Literal

from sandboxes.base import Command, Result, Sandbox
from thundersync.core.types import Task

SOLUTION_LIMIT_S = 1800.0


def solution_limit_s(task: Task) -> float:
    """Seconds that the solution may take: the agent's, at most half an hour."""
    return min(SOLUTION_LIMIT_S, task.agent_timeout_s or SOLUTION_LIMIT_S)


async def run_solution(sandbox: Sandbox, task: Task, user: Literal["agent", "root"]) -> Result:
    """Put `task.solution` into /solution and run it as `user`. Raises: SandboxError, OSError."""
    solution = Path(task.solution)
    await sandbox.write(f"/solution/{solution.name}", await asyncio.to_thread(solution.read_bytes), mode=0o755)
    if solution.name == "solve.sh":  # Harbor's folder may hold more that the script needs
        await sandbox.put_tree(solution.parent, "/solution")
    return await sandbox.run(
        Command(
            script=f"bash /solution/{solution.name}",
            timeout_s=solution_limit_s(task),
            env={"DEBIAN_FRONTEND": "noninteractive", **task.solution_env},
            user=user,
        )
    )
