"""Tasks from folders in Harbor's format (Terminal-Bench 2 and later, SETA, and the tasks shipped here).

The first stage of a run: folders in, `Task` values out, all faults told at once. Refuses to know how a task is run:
it opens no sandbox, and keeps tests and solution as host paths that no agent sees.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import msgspec

from thundersync.core.types import Checker, Image, Task
from thundersync.errors import TaskError
from thundersync.tasks.dockerfiles import read_build_file, workdir_of
from thundersync.tasks.found import Found, listed, usable
from thundersync.tasks.harbor_files import checker_command, in_its_stages, read_instruction, read_stages, read_text
from thundersync.tasks.task_toml import TaskToml, parse_task_toml

STARTER = Path(__file__).parent / "starter"
"""The shipped tasks; `starter/train` and `starter/eval` name its two splits wherever a path is asked for."""

_PARTS = ("task.toml", "instruction.md", "environment", "tests", "steps")
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")


def load_tasks(path: str, *, variables: Mapping[str, str] | None = None) -> list[Task]:
    """Every task under `path`: a task folder, a folder of task folders, or `starter/train` and `starter/eval`.

    Sorted by folder name, which is the task id. A `task_filter.txt` beside the folders (one id a line) limits the set
    to the ids it names. `variables` fills `${NAME}` in the tasks' env tables. Reads a few small files per task: call it
    in a thread where the event loop must stay free.

    Raises: TaskError with every fault of every folder, when there is nothing to load or something that cannot be run.
    """
    return usable(path, find_harbor(path, variables=variables))


def find_harbor(path: str, *, variables: Mapping[str, str] | None = None) -> list[Found]:
    """As `load_tasks`, with the folders that cannot be used among the answers. Raises: TaskError with no folder."""
    root = resolve(path)
    folders = [root] if (root / "task.toml").is_file() else _task_folders(root)
    found = []
    for folder in folders:
        suite = _suite(path, folder)
        task, wrong = read_task(folder, suite=suite, variables=variables or {})
        found.append(Found(task_id=folder.name, suite=suite, format="harbor", task=task, faults=wrong))
    return found


def read_task(folder: Path, *, suite: str, variables: Mapping[str, str]) -> tuple[Task | None, list[str]]:
    """One task folder: its task, or None and all that is wrong, each fault beginning with the file it is about."""
    faults: list[str] = []
    toml_text = read_text(folder / "task.toml", faults)
    facts: TaskToml | None = None
    if toml_text is not None:
        facts, wrong = parse_task_toml(toml_text, variables=variables)
        faults += [f"task.toml {fault}" for fault in wrong]
    faults += _environment_faults(folder / "environment", docker_image=facts.docker_image if facts else "")
    in_stages = (folder / "steps").is_dir() or (facts is not None and bool(facts.stages))
    stages = read_stages(folder, facts.stages if facts is not None else [], faults) if in_stages else []
    instruction = "" if in_stages else read_instruction(folder / "instruction.md", faults)
    test = folder / "tests" / "test.sh"
    if not in_stages and not test.is_file():
        faults.append("tests/test.sh is missing: the script that writes /logs/verifier/reward.txt")
    weights = _weights(folder / "weights.json", faults)
    dockerfile = folder / "environment" / "Dockerfile"
    workdir = facts.workdir if facts is not None else ""
    workdir = workdir or read_workdir(dockerfile, faults, remedy="task.toml, environment.workdir")
    if facts is None or faults:
        return None, faults
    world = Task(
        task_id=folder.name,
        suite=suite,
        instruction=instruction,
        image=Image(name=facts.docker_image, context=str(dockerfile.parent) if dockerfile.is_file() else ""),
        checker=Checker(
            tests=str(test.parent), timeout_s=facts.checker_timeout_s, env=facts.checker_env, weights=weights
        ),
        workdir=workdir,
        env=facts.env,
        solution_env=facts.solution_env,
        agent_timeout_s=facts.agent_timeout_s,
        build_timeout_s=facts.build_timeout_s,
        cpus=facts.cpus,
        memory_mib=facts.memory_mib,
        disk_mib=facts.disk_mib,
        network=facts.network,
        stage_rewards=facts.stage_rewards,
    )
    if stages:
        return in_its_stages(world, stages), []
    solution = folder / "solution" / "solve.sh"
    checker = msgspec.structs.replace(world.checker, command=checker_command(test))
    solved = str(solution) if solution.is_file() else ""
    return msgspec.structs.replace(world, checker=checker, solution=solved), []


def resolve(path: str) -> Path:
    """The host path that a configured one means."""
    if path == "starter" or path.startswith("starter/"):
        return STARTER / path.removeprefix("starter").strip("/")
    return Path(path).expanduser().absolute()


def _suite(path: str, folder: Path) -> str:
    return path.rstrip("/") if path.startswith("starter/") else folder.parent.name


def _task_folders(root: Path) -> list[Path]:
    if not root.is_dir():
        raise TaskError(
            f"no folder of tasks at {root}",
            remedy="Give the path of a folder in Harbor's format, or `starter/train` for the tasks shipped here.",
        )
    folders = sorted(
        child
        for child in root.iterdir()
        if child.is_dir() and not child.name.startswith(".") and any((child / part).exists() for part in _PARTS)
    )
    chosen = root / "task_filter.txt"
    if chosen.is_file():
        wanted = {line.strip() for line in chosen.read_text(encoding="utf-8").splitlines() if line.strip()}
        unknown = sorted(wanted - {folder.name for folder in folders})
        if unknown:
            raise TaskError(
                listed(f"{chosen} names tasks that are not there", unknown),
                remedy="Correct the ids: each is the name of a folder beside the file.",
            )
        folders = [folder for folder in folders if folder.name in wanted]
    if not folders:
        raise TaskError(
            f"no tasks in {root}",
            remedy="A task is a folder with task.toml, instruction.md, environment/Dockerfile and tests/test.sh.",
        )
    return folders


def _environment_faults(environment: Path, *, docker_image: str) -> list[str]:
    for name in _COMPOSE:
        if (environment / name).is_file():
            return [f"environment/{name} asks for what cannot be run yet: compose services beside the agent's own"]
    if not docker_image and not (environment / "Dockerfile").is_file():
        return ["environment/Dockerfile is missing, and task.toml names no environment.docker_image"]
    return []


def _weights(path: Path, faults: list[str]) -> dict[str, float]:
    """SETA's weights of single tests; a task without the file has none."""
    if not path.is_file():
        return {}
    try:
        weights = msgspec.json.decode(path.read_bytes(), type=dict[str, float])
    except (OSError, msgspec.DecodeError) as error:
        faults.append(f"weights.json is not an object of numbers: {error}")
        return {}
    if any(not math.isfinite(weight) or weight < 0 for weight in weights.values()) or not sum(weights.values()) > 0:
        faults.append("weights.json needs weights of at least 0, not all of them 0")
        return {}
    return weights


def read_workdir(dockerfile: Path, faults: list[str], *, remedy: str) -> str:
    """Where a task's agent begins, by its Dockerfile, if it has one. `remedy`: where else its author can say so."""
    workdir = workdir_of(read_build_file(dockerfile)) if dockerfile.is_file() else "/"
    if "$" in workdir:
        faults.append(f"Dockerfile has the WORKDIR {workdir}, and does not say what that is: name it in {remedy}")
    return workdir
