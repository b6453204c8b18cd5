"""Puts one local image in the place of the base images that tasks name, to check tasks where no registry is reached.

What is so checked is the task's own text, not the image that it names: the report says so. Refuses to know how images
are built.
"""

from pathlib import Path

import msgspec

from thundersync.core.types import Image, Task
from thundersync.tasks.dockerfiles import From, find_froms, read_build_file, replaced, write_build_file
from thundersync.tasks.kept import copy_folder


def base_images(dockerfile: Path) -> list[str]:
    """The images that a Dockerfile starts from, its own stages left out."""
    text = read_build_file(dockerfile) if dockerfile.is_file() else ""
    return list(dict.fromkeys(each.base for each in _from_outside(text)))


class StandIn:
    """Copies of tasks' build folders below `folder`, whose Dockerfiles begin with `image`."""

    def __init__(self, image: str, folder: Path) -> None:
        self._image = image
        self._folder = folder

    def place(self, task: Task) -> Task:
        """The task on the stand-in: its own Dockerfile where it has one, else the bare image."""
        if task.checker.verdict in ("repair", "swebench_results"):
            return task  # their base is a repository of its own, which nothing stands in for
        if not task.image.context:
            return msgspec.structs.replace(task, image=Image(name=self._image))
        source = Path(task.image.context)
        target = self._folder / f"{task.suite.replace('/', '_')}-{task.task_id}"
        if not target.exists():
            copy_folder(source, target)
            dockerfile = target / "Dockerfile"
            write_build_file(dockerfile, self.rewritten(read_build_file(dockerfile)))
        return msgspec.structs.replace(task, image=Image(context=str(target)))

    def rewritten(self, dockerfile: str) -> str:
        """The same file on the stand-in; a stage that starts from an earlier stage still does."""
        froms = _from_outside(dockerfile)
        return replaced(dockerfile, froms, lambda each: f"FROM {self._image}" + (each.name and f" AS {each.name}"))


def _from_outside(dockerfile: str) -> list[From]:
    """Those that start from an image, not from nothing or an earlier one of them."""
    stages, found = {"scratch"}, []
    for each in find_froms(dockerfile):
        if each.base.lower() not in stages:
            found.append(each)
        stages.add(each.name.lower())
    return found
