"""Puts one local image in the place of the base images that tasks name, to check tasks where no registry is reached.

What is so checked is the task's own text, not the image that it names: the report says so. Refuses to know how images
are built.
"""

import re
import shutil
from pathlib import Path

import msgspec

from thundersync.core.types import Image, Task

_AS = re.compile(r"\s+AS\s+(\S+)", re.IGNORECASE)
_FROM = re.compile(r"^(\s*FROM\s+)((?:--\S+\s+)*)(\S+)(.*)$", re.IGNORECASE | re.MULTILINE)


def base_images(dockerfile: Path) -> list[str]:
    """The images that a Dockerfile starts from, its own stages left out."""
    text = dockerfile.read_text(encoding="utf-8", errors="replace") if dockerfile.is_file() else ""
    stages, found = set[str](), dict[str, None]()
    for match in _FROM.finditer(text):
        if match[3] not in stages and match[3] != "scratch":
            found[match[3]] = None
        if name := _AS.search(match[4]):
            stages.add(name[1])
    return list(found)


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
            shutil.copytree(source, target, symlinks=True)
            dockerfile = target / "Dockerfile"
            dockerfile.write_text(self.rewritten(dockerfile.read_text(encoding="utf-8", errors="replace")))
        return msgspec.structs.replace(task, image=Image(context=str(target)))

    def rewritten(self, dockerfile: str) -> str:
        """The same file on the stand-in; a stage that starts from an earlier stage still does."""
        stages: set[str] = set()

        def swap(match: re.Match[str]) -> str:
            base = match[3] if match[3] in stages or match[3] == "scratch" else self._image
            if name := _AS.search(match[4]):
                stages.add(name[1])
            return f"{match[1]}{base}{match[4]}"

        return _FROM.sub(swap, dockerfile)
