"""What can be told of a Dockerfile without building it: its FROM lines, what it copies, and the folder it ends in.

For those who put something before, after or in the place of a base image, and for the readers of task folders. Refuses
to know its other instructions; but it knows which lines go on from the one before, since SQL has FROM lines, too.
"""

import fnmatch
import posixpath
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from string import Template

import msgspec
from msgspec import Struct

_FROM = re.compile(r"FROM\s+(?P<flags>(?:--\S+\s+)*)(?P<base>\S+)(?:\s+AS\s+(?P<name>\S+))?", re.IGNORECASE)
_COPY = re.compile(r"(?:ONBUILD\s+)?(?:COPY|ADD)\s+(?P<flags>(?:--\S+\s+)*)(?P<paths>.+)", re.IGNORECASE)
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_BOM = "\ufeff"


class From(Struct, frozen=True, kw_only=True):
    """One of them: `text[start:end]`, which may be several lines, without the last one's end."""

    start: int
    end: int
    flags: str
    """`--platform=... `, or empty."""
    base: str
    name: str
    """Empty if it has none."""


def read_build_file(path: Path) -> str:
    """A Dockerfile or .dockerignore; bytes that are no UTF-8 come out again as they were. Raises: OSError."""
    return path.read_text(encoding="utf-8", errors="surrogateescape").removeprefix(_BOM)


def write_build_file(path: Path, text: str) -> None:
    """Never through a link: in a copy of somebody's folder it may lead back there. Raises: OSError."""
    path.unlink(missing_ok=True)
    path.write_text(text, encoding="utf-8", errors="surrogateescape")


def find_froms(text: str) -> list[From]:
    """In their order."""
    found = []
    for start, end, line in _logical_lines(text):
        if match := _FROM.fullmatch(line):
            found.append(From(start=start, end=end, flags=match["flags"], base=match["base"], name=match["name"] or ""))
    return found


def replaced(text: str, froms: list[From], line: Callable[[From], str]) -> str:
    """`text` with `line(each)` in the place of each of `froms`."""
    for each in reversed(froms):
        text = text[: each.start] + line(each) + text[each.end :]
    return text


def takes(text: str, name: str) -> bool:
    """Whether a COPY or ADD may bring the build folder's entry `name` into an image, by itself or with others."""
    copies = filter(None, (_COPY.fullmatch(line) for _, _, line in _logical_lines(text)))
    return any(
        _may_match(source, name)
        for each in copies
        if "--from=" not in each["flags"].lower()
        for source in _sources(each["paths"])
    )


def workdir_of(text: str) -> str:
    """The folder of the last stage. Without any, Docker's own default: base images rarely set another.

    Holds a `$` where a variable is not set here. Source of the rules: docs.docker.com, "Dockerfile reference".
    """
    workdir, name = "/", ""
    ended: dict[str, str] = {}
    variables: dict[str, str] = {}
    for _, _, line in _logical_lines(text):
        word, rest = [*line.split(maxsplit=1), ""][:2]
        if found := _FROM.fullmatch(line):
            ended[name] = workdir
            workdir, name = ended.get(found["base"].lower(), "/"), (found["name"] or "").lower()
        elif word.upper() in ("ENV", "ARG"):
            variables |= {key: Template(value).safe_substitute(variables) for key, value in _assignments(rest)}
        elif word.upper() == "WORKDIR":
            # A relative one continues the one before; joining an absolute one replaces it.
            folder = Template(rest.strip("\"'")).safe_substitute(variables)
            workdir = posixpath.normpath(posixpath.join(workdir, folder))
    return workdir


def _sources(paths: str) -> list[str]:
    """Of a COPY or ADD, in both forms."""
    try:
        return msgspec.json.decode(paths, type=list[str])[:-1]
    except msgspec.DecodeError:
        return [word.strip("\"'") for word in paths.split()[:-1]]


def _may_match(source: str, name: str) -> bool:
    first = posixpath.normpath("/" + source.lstrip("/")).split("/")[1]
    return not first or "$" in first or fnmatch.fnmatchcase(name, first)


def _assignments(rest: str) -> list[tuple[str, str]]:
    """Both forms: `a=1 b="x y"`, and `a the rest of the line`; an ARG without a value is none."""
    key, _, value = rest.partition(" ")
    if "=" not in key:
        return [(key, value.strip())] if value else []
    try:
        words = shlex.split(rest)
    except ValueError:
        return []
    return [(key, value) for key, mark, value in (word.partition("=") for word in words) if mark]


def _logical_lines(text: str) -> Iterator[tuple[int, int, str]]:
    """Start, end, and the line, with those that it goes on in joined, and without the comments between them."""
    at, start, pending = 0, -1, ""
    for raw in _LINE.findall(text):
        body = raw.rstrip()
        at += len(raw)
        if not body or body.lstrip().startswith("#"):
            continue
        if start < 0:
            start = at - len(raw)
        if body.endswith("\\"):
            pending += body[:-1]
            continue
        yield start, at - len(raw) + len(body), (pending + body).strip()
        start, pending = -1, ""
