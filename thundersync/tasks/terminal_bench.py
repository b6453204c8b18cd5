"""Tasks from folders in Terminal-Bench 1's format: task.yaml, Dockerfile, docker-compose.yaml, run-tests.sh, tests/.

The same stage as `harbor.py`, for the older format. Refuses to know how a task is run or how its output is read.
"""

from pathlib import Path

import msgspec
import yaml
from msgspec import Struct

from thundersync.core.types import Checker, Image, Task, VerdictKind
from thundersync.tasks.compose import read_compose
from thundersync.tasks.dockerfiles import read_build_file, takes
from thundersync.tasks.found import Found
from thundersync.tasks.harbor import read_workdir
from thundersync.tasks.harbor_files import strip_canary
from thundersync.tasks.kept import KeptFiles

_VERDICTS: dict[str, VerdictKind] = {"pytest": "test_summary", "swebench": "swebench_results"}


class TaskYaml(Struct, frozen=True, kw_only=True):
    """What is read of task.yaml; unknown keys are tolerated, as the format asks."""

    instruction: str
    parser_name: str = "pytest"
    max_agent_timeout_sec: float = 360.0
    max_test_timeout_sec: float = 60.0
    run_tests_in_same_shell: bool = False


class Step(Struct, frozen=True, kw_only=True):
    """One line of a solution.yaml: what is typed into the terminal."""

    command: str
    append_enter: bool = True


def find_terminal_bench(root: Path, *, keep: KeptFiles) -> list[Found]:
    """The task at `root`, or every task folder in it; sorted by folder name, which is the id."""
    folders = [root] if (root / "task.yaml").is_file() else sorted(each.parent for each in root.glob("*/task.yaml"))
    found = []
    for folder in folders:
        task, faults = read_terminal_bench(folder, keep=keep)
        found.append(
            Found(task_id=folder.name, suite=folder.parent.name, format="terminal_bench", task=task, faults=faults)
        )
    return found


def read_terminal_bench(folder: Path, *, keep: KeptFiles) -> tuple[Task | None, list[str]]:
    """One folder: its task, or None and all that is wrong with it."""
    faults: list[str] = []
    facts = _facts(folder / "task.yaml", faults)
    service = read_compose(folder, faults)
    script = folder / "run-tests.sh"
    if not script.is_file():
        faults.append("run-tests.sh is missing: the script that runs the tests and prints their summary")
    dockerfile = folder / "Dockerfile"
    if not service.image:
        faults += _dockerfile_faults(dockerfile)
    workdir = service.workdir or read_workdir(dockerfile, faults, remedy="docker-compose.yaml, working_dir")
    solution = _solution(folder, keep, faults)
    if facts is None or faults:
        return None, faults
    return (
        Task(
            task_id=folder.name,
            suite=folder.parent.name,
            instruction=strip_canary(facts.instruction),
            image=Image(name=service.image, context="" if service.image else str(folder)),
            checker=Checker(
                tests=str(folder / "tests") if (folder / "tests").is_dir() else "",
                script=str(script),
                command="bash /tests/run-tests.sh",
                timeout_s=facts.max_test_timeout_sec,
                env={**service.env, "TEST_DIR": "/tests"},
                verdict=_VERDICTS[facts.parser_name],
            ),
            workdir=workdir,
            env=service.env,
            solution=solution,
            agent_timeout_s=facts.max_agent_timeout_sec,
            cpus=service.cpus,
            memory_mib=service.memory_mib,
            network=service.network,
        ),
        [],
    )


def _facts(path: Path, faults: list[str]) -> TaskYaml | None:
    try:
        facts = msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), TaskYaml)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, msgspec.ValidationError) as error:
        faults.append(f"task.yaml cannot be read: {error}")
        return None
    if not strip_canary(facts.instruction):
        faults.append("task.yaml has an empty instruction")
    if facts.parser_name not in _VERDICTS:
        known = ", ".join(_VERDICTS)
        faults.append(f"task.yaml has parser_name {facts.parser_name!r}; results are read of: {known}")
    if facts.run_tests_in_same_shell:
        faults.append("task.yaml asks for what cannot be run yet: tests in the agent's own shell")
    return facts


def _dockerfile_faults(dockerfile: Path) -> list[str]:
    if not dockerfile.is_file():
        return ["Dockerfile is missing, and docker-compose.yaml names no image"]
    text = read_build_file(dockerfile)
    if takes(text, "tests") and takes(text, "run-tests.sh") and not (dockerfile.parent / ".dockerignore").is_file():
        return ["Dockerfile copies its whole folder into the image, tests and solution too: the agent would see them"]
    return []


def _solution(folder: Path, keep: KeptFiles, faults: list[str]) -> str:
    script, typed = folder / "solution.sh", folder / "solution.yaml"
    if script.is_file():
        return str(script)
    if not typed.is_file():
        return ""
    try:
        steps = msgspec.convert(yaml.safe_load(typed.read_text(encoding="utf-8")), list[Step])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, msgspec.ValidationError) as error:
        faults.append(f"solution.yaml cannot be read: {error}")
        return ""
    lines = [step.command + ("\n" if step.append_enter else "") for step in steps]
    return str(keep.keep({"solve.sh": "#!/bin/bash\n" + "".join(lines)}) / "solve.sh")
