"""Tasks from rows of prompt and checker: the format for whoever has a question and a way to tell whether it is solved.

{"prompt": "...", "checker": "<bash>"} is enough; the checker writes /logs/verifier/reward.txt as Harbor's do.
Rows in, `Found` out. Refuses to know how a task is run.
"""

import hashlib
from pathlib import Path

import msgspec
from msgspec import Struct

from thundersync.core.types import Checker, Image, Task
from thundersync.tasks.found import Found
from thundersync.tasks.kept import KeptFiles
from thundersync.tasks.rows import Row


class PromptRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row. Every text that is a script is run by bash."""

    prompt: str
    checker: str
    """Runs as root in `workdir` after the agent has ended, in a sandbox that has `files` in /tests."""
    id: str = ""
    """Empty: made of the row's content."""
    files: dict[str, str] = {}
    """What the checker needs: names to texts, in /tests, where no agent sees them."""
    solution: str = ""
    image: str = ""
    dockerfile: str = ""
    """The text of one, built without other files; without this and `image` the sandbox is the runtime's own."""
    workdir: str = "/workspace"
    env: dict[str, str] = {}
    timeout_s: float = 600.0
    agent_timeout_s: float | None = None
    cpus: float = 1.0
    memory_mib: int = 2048
    network: bool = False


def looks_like_prompt(row: Row) -> bool:
    return {"prompt", "checker"} <= row.keys()


def prompt_task(row: Row, *, suite: str, keep: KeptFiles) -> Found:
    """One row."""
    named = str(row.get("id") or f"prompt-{hashlib.sha256(msgspec.json.encode(row)).hexdigest()[:12]}")
    try:
        facts = msgspec.convert(row, PromptRow)
        faults = _faults(facts)
    except msgspec.ValidationError as error:
        facts, faults = None, [str(error)]
    if facts is None or faults:
        return Found(task_id=named, suite=suite, format="prompts", task=None, faults=faults)
    tests = keep.keep({**facts.files, "test.sh": facts.checker})
    context = str(keep.keep({"Dockerfile": facts.dockerfile})) if facts.dockerfile else ""
    task = Task(
        task_id=named,
        suite=suite,
        instruction=facts.prompt.strip(),
        image=Image(name=facts.image, context=context),
        checker=Checker(tests=str(tests), timeout_s=facts.timeout_s),
        workdir=facts.workdir,
        env=facts.env,
        solution=str(keep.keep({"solve.sh": facts.solution}) / "solve.sh") if facts.solution else "",
        agent_timeout_s=facts.agent_timeout_s,
        cpus=facts.cpus,
        memory_mib=facts.memory_mib,
        network=facts.network,
    )
    return Found(task_id=named, suite=suite, format="prompts", task=task)


def _faults(facts: PromptRow) -> list[str]:
    faults = []
    if not facts.prompt.strip():
        faults.append("prompt is empty")
    if not facts.checker.strip():
        faults.append("checker is empty")
    if facts.image and facts.dockerfile:
        faults.append("image and dockerfile are both given: one of them says where the sandbox starts")
    if not facts.workdir.startswith("/"):
        faults.append(f"workdir {facts.workdir!r} is not absolute")
    faults += [
        f"files: {name!r} is not a plain name below /tests"
        for name in facts.files
        if name.startswith("/") or ".." in Path(name).parts or name == "test.sh" or not name
    ]
    return faults
