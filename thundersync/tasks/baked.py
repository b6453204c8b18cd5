"""Puts the tools that a task's checker downloads into the task's image, so that scoring needs no network.

Most published terminal tasks install uv, and pytest through it, each time they score. Here the checker runs once while
the image is built, with the build's network, in a stage of its own; of that stage only uv and its cache are taken over,
into root's home. So neither the tests nor what they did to the world are in the image that agents, who are not root,
work in. Sits between the loaders and whoever starts sandboxes. Refuses to know what is built how.
"""

import errno
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from thundersync.core.types import Checker, Image, Task, TaskId
from thundersync.errors import TaskError
from thundersync.score.missing_tools import wants_network
from thundersync.tasks.dockerfiles import find_froms, read_build_file, replaced, takes, write_build_file
from thundersync.tasks.kept import KeptFiles, copy_folder

_FOLDER = "thundersync-bake"
_HOME = "/root"
"""Of the checker, who is root inside."""
_STAGES = """
FROM {name} AS thundersync-tools
USER root
COPY {folder}/tests/ /tests/
COPY {folder}/bake.sh /thundersync-bake.sh
WORKDIR {workdir}
RUN ["bash", "/thundersync-bake.sh"]

FROM {name}
COPY --from=thundersync-tools {home}/.local/ {home}/.local/
COPY --from=thundersync-tools {home}/.cache/uv/ {home}/.cache/uv/
COPY --from=thundersync-tools {home}/.config/uv/ {home}/.config/uv/
"""
# What the checker says of the untouched world is of no interest, and may well be that all has failed.
_SCRIPT = """export HOME={home} {env}
mkdir -p {home}/.local {home}/.cache/uv {home}/.config/uv /logs/verifier
timeout {timeout_s:.0f} bash -c {command}
if [ -z "$(ls {home}/.cache/uv)" ]; then
  echo 'the checker could not install its tools while the image was built: is there a network?'
  exit 1
fi
echo 'offline = true' >{home}/.config/uv/uv.toml
"""


def baked(task: Task, keep: KeptFiles) -> Task:
    """The task on an image with its checker's tools in it, or as it is where the checker installs nothing with uv.

    Copies the task's build folder: call it in a thread. Stages and repairs stay as they are, and so does a task whose
    Dockerfile copies the whole folder: the tests lie in it meanwhile, and would be in the agent's image.
    Raises: TaskError; OSError where this machine's disk is full.
    """
    image, checker = task.image, task.checker
    if task.stages or checker.verdict in ("repair", "swebench_results") or not (image.name or image.context):
        return task
    try:
        if not _uses_uv(checker):
            return task
        text = read_build_file(Path(image.context) / "Dockerfile") if not image.name else f"FROM {image.name}\n"
        if takes(text, _FOLDER):
            return task
        folder = keep.keep_folder(_filler(task, text))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise TaskError(
            f"the files of {task.task_id} cannot be copied: {error}",
            remedy="Plain files that can be read, folders and links are what an image is built from.",
        ) from error
    # The checker runs while it is built, and may take as long as whenever it scores.
    limit_s = task.build_timeout_s + checker.timeout_s
    return msgspec.structs.replace(task, image=Image(context=str(folder)), build_timeout_s=limit_s)


def _uses_uv(checker: Checker) -> bool:
    scripts = [Path(checker.script)] if checker.script else []
    for folder in filter(None, (checker.shared, checker.tests)):
        scripts += sorted(Path(folder).glob("*.sh"))
    return any("uv" in wants_network(each.read_text(encoding="utf-8", errors="replace")) for each in scripts)


def _filler(task: Task, dockerfile: str) -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        if not task.image.name:
            copy_folder(Path(task.image.context), folder)
        ignored = folder / ".dockerignore"
        if ignored.exists():
            write_build_file(ignored, f"{read_build_file(ignored).rstrip()}\n!{_FOLDER}\n")
        tests, checker = folder / _FOLDER / "tests", task.checker
        tests.mkdir(parents=True)
        for source in filter(None, (checker.shared, checker.tests)):
            copy_folder(Path(source), tests)
        if checker.script:
            shutil.copy(checker.script, tests)
        env = " ".join(f"{key}={shlex.quote(value)}" for key, value in {**task.env, **checker.env}.items())
        script = _SCRIPT.format(home=_HOME, env=env, timeout_s=checker.timeout_s, command=shlex.quote(checker.command))
        (folder / _FOLDER / "bake.sh").write_text(script, encoding="utf-8")
        text, name = _named(dockerfile, task.task_id)
        text += _STAGES.format(home=_HOME, name=name, folder=_FOLDER, workdir=task.workdir)
        write_build_file(folder / "Dockerfile", text)

    return fill


def _named(dockerfile: str, task_id: TaskId) -> tuple[str, str]:
    """The file with its last stage named, and that name. Raises: TaskError."""
    froms = find_froms(dockerfile)
    if not froms:
        raise TaskError(f"the Dockerfile of {task_id} has no line FROM", remedy="A Dockerfile starts with FROM.")
    last = froms[-1]
    if last.name:
        return dockerfile.rstrip() + "\n", last.name
    name = "thundersync-task"
    named = replaced(dockerfile, [last], lambda each: f"FROM {each.flags}{each.base} AS {name}")
    return named.rstrip() + "\n", name
