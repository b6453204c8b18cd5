"""The files of a Harbor task folder: instructions, tests, and the folders of its stages.

Between the folder and `harbor.py`, which puts a task together. Refuses to know the tables of task.toml but for what
they say of stages. Every fault is a sentence that begins with the file it is about.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from thundersync.core.types import Checker, Stage, Task
from thundersync.tasks.task_toml import StageToml

_CANARY = re.compile(r"\s*(#|<!--).*canary[ _-](guid|string)", re.IGNORECASE)


def read_text(path: Path, faults: list[str], *, name: str = "") -> str | None:
    """`name`: of the file in faults, where it is not its own."""
    name = name or path.name
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        faults.append(f"{name} is missing")
    except (OSError, UnicodeDecodeError) as error:
        faults.append(f"{name} cannot be read: {error}")
    return None


def read_instruction(path: Path, faults: list[str], *, name: str = "instruction.md") -> str:
    text = strip_canary(read_text(path, faults, name=name) or "")
    if not text and path.is_file():
        faults.append(f"{name} is empty: write what the agent should do")
    return text


def strip_canary(text: str) -> str:
    """The instruction without the comment lines at its top that mark benchmark data, and without outer blanks."""
    lines = text.strip().splitlines()
    while lines and (not lines[0].strip() or _CANARY.match(lines[0])):
        del lines[0]
    return "\n".join(lines).strip()


def checker_command(test: Path) -> str:
    """Harbor executes test.sh; its first line may name another interpreter than a shell."""
    with test.open("rb") as file:
        first = file.readline(256).decode("utf-8", "replace").strip()
    if first.startswith("#!") and not re.search(r"\b(ba|da)?sh\b", first):
        return f"{first.removeprefix('#!').strip()} /tests/test.sh"
    return "bash /tests/test.sh"


def read_stages(folder: Path, tables: Sequence[StageToml], faults: list[str]) -> list[Stage]:
    """What [[steps]] names, with its folders below `steps`; a stage's tests lie over those of the task."""
    shared = folder / "tests"
    stages = []
    names = [table.name for table in tables]
    if not names and not any("steps" in fault for fault in faults):
        faults.append("steps has no [[steps]] in task.toml, which say what comes when")
    if len(set(names)) < len(names):
        faults.append("task.toml [[steps]] names a step twice")
    for table in tables:
        own = folder / "steps" / table.name
        if Path(table.name).name != table.name or not own.is_dir():
            faults.append(f"steps/{table.name} is missing, and task.toml names it")
            continue
        instruction = read_instruction(own / "instruction.md", faults, name=f"steps/{table.name}/instruction.md")
        test = own / "tests" / "test.sh"
        if not test.is_file():
            test = shared / "test.sh"
        if not test.is_file():
            faults.append(f"steps/{table.name}/tests/test.sh is missing: the script that writes the step's reward")
            continue
        solution, files = own / "solution" / "solve.sh", own / "workdir"
        stages.append(
            Stage(
                name=table.name,
                instruction=instruction,
                checker=Checker(
                    tests=str(own / "tests") if (own / "tests").is_dir() else str(shared),
                    shared=str(shared) if shared.is_dir() else "",
                    command=checker_command(test),
                    timeout_s=table.checker_timeout_s,
                    env=table.checker_env,
                ),
                solution=str(solution) if solution.is_file() else "",
                agent_timeout_s=table.agent_timeout_s,
                files=str(files) if files.is_dir() else "",
                healthcheck=table.healthcheck,
                min_reward=table.min_reward,
            )
        )
    return stages


def in_its_stages(world: Task, stages: list[Stage]) -> Task:
    """A task whose parts are `stages`; the rest of it is `world`."""
    first = stages[0]
    limits = [stage.agent_timeout_s for stage in stages]
    return msgspec.structs.replace(
        world,
        instruction=first.instruction,
        checker=first.checker,
        # One that has not every stage's cannot solve the task.
        solution=first.solution if all(stage.solution for stage in stages) else "",
        agent_timeout_s=math.fsum(limit for limit in limits if limit) if all(limits) else None,
        stages=stages,
    )
