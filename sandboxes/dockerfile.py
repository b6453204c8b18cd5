"""The part of the Dockerfile language that needs no Docker: text in, instructions out. Runs nothing.

Supported: FROM (its image is replaced by the host's programs), WORKDIR, COPY and ADD of context files, ENV, RUN,
USER root, comments. Anything else is refused by name rather than skipped: a start state that is silently not the
task's own would be trained on. Source of the rules: docs.docker.com, "Dockerfile reference".
"""

import json
import re
import shlex
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from sandboxes.errors import BuildFailed

NEEDS_DOCKER = 'This task needs Docker: start it and use `sandbox.runtime = "docker"`.'


class Workdir(Struct, frozen=True):
    """Make a folder and go there."""

    path: str


class Copy(Struct, frozen=True):
    """Copy context files. `sources` are relative to the context and may hold wildcards."""

    sources: list[str]
    target: str
    """As written: relative to the working folder; a trailing `/` means a folder."""


class Env(Struct, frozen=True):
    """Set variables for what follows and for every command."""

    values: dict[str, str]


class Run(Struct, frozen=True):
    """Run a command as root."""

    argv: list[str]


Instruction: TypeAlias = Workdir | Copy | Env | Run

_VARIABLE = re.compile(r"\\\$|\$(?:(\w+)|\{(\w+)(?::-([^}$]*))?\}|)")
_ADDRESS_OR_ARCHIVE = re.compile(r"^\w+://|^git@|\.(tar|tgz|tbz2?|txz|gz|xz|bz2|zst)$")
_HEREDOC = re.compile(r"(?<!<)<<-?\s*[\"']?[A-Za-z_]")


def load_dockerfile(context: Path, *, path: str) -> list[Instruction]:
    """The instructions of `context`/Dockerfile, in order. Raises: BuildFailed where it needs Docker."""
    file = context / "Dockerfile"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BuildFailed(f"cannot read {file}: {error}", remedy="Give a context folder with a Dockerfile.") from error
    if (context / ".dockerignore").exists():
        raise BuildFailed(f"{context} has a .dockerignore, which needs Docker", remedy=NEEDS_DOCKER)
    try:
        return parse_dockerfile(text, path=path)
    except BuildFailed as error:
        raise BuildFailed(f"{file}: {error.message}", remedy=error.remedy) from error


def parse_dockerfile(text: str, *, path: str) -> list[Instruction]:
    """Instructions in order, variables filled in; `path` is what $PATH means at first.

    Raises: BuildFailed, with the line, where it needs Docker.
    """
    instructions: list[Instruction] = []
    env = {"PATH": path}
    stages = 0
    for number, line in _logical_lines(text):
        keyword, rest = (*line.split(maxsplit=1), "")[:2]
        keyword = keyword.upper()
        if keyword != "FROM" and stages == 0:
            raise _refused(number, f"{keyword} before FROM")
        match keyword:
            case "FROM":
                stages += 1
                if stages > 1:
                    raise _refused(number, "a second FROM")
            case "WORKDIR":
                instructions.append(Workdir(_filled(rest, env, number)))
            case "ENV":
                values = {key: _filled(value, env, number) for key, value in _assignments(rest, number).items()}
                env.update(values)
                instructions.append(Env(values))
            case "COPY" | "ADD":
                instructions.append(_copy(keyword, rest, env, number))
            case "RUN":
                instructions.append(_run(rest, number))
            case "USER" if rest in ("root", "0", "root:root", "0:0"):
                pass
            case _:
                raise _refused(number, f"{keyword} {rest}".strip())
    if stages == 0:
        raise BuildFailed("no FROM", remedy="A Dockerfile starts with FROM.")
    return instructions


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """(number of its first line, continuations joined). Comments and empty lines vanish, even inside a continuation."""
    lines: list[tuple[int, str]] = []
    pending, first = "", 0
    for number, raw in enumerate(text.splitlines(), start=1):
        body = raw.rstrip()
        if re.match(r"\s*#\s*escape\s*=\s*`", body, re.IGNORECASE):
            raise _refused(number, body.strip())
        if not body or body.lstrip().startswith("#"):
            continue
        first = first or number
        if body.endswith("\\"):
            pending += body[:-1]
            continue
        lines.append((first, (pending + body).strip()))
        pending, first = "", 0
    return [*lines, (first, pending.strip())] if pending.strip() else lines


def _copy(keyword: str, rest: str, env: dict[str, str], number: int) -> Copy:
    if rest.startswith("--") or _HEREDOC.search(rest):
        raise _refused(number, f"{keyword} {rest}")
    parts = _json_list(rest) or rest.split()
    parts = [_filled(part, env, number) for part in parts]
    if len(parts) < 2:
        raise _refused(number, f"{keyword} {rest}")
    *sources, target = parts
    for source in sources:
        if ".." in source.split("/"):
            raise _refused(number, f"{keyword} from outside the context ({source})")
        if keyword == "ADD" and _ADDRESS_OR_ARCHIVE.search(source):
            raise _refused(number, f"ADD of an address or archive ({source})")
    return Copy([source.lstrip("/") for source in sources], target)


def _run(rest: str, number: int) -> Run:
    if rest.startswith("--") or _HEREDOC.search(rest):
        raise _refused(number, f"RUN {rest}")
    return Run(_json_list(rest) or ["/bin/sh", "-c", rest])


def _assignments(rest: str, number: int) -> dict[str, str]:
    """Both forms: `a=1 b="x y"`, and `a the rest of the line`."""
    key, _, value = rest.partition(" ")
    if "=" not in key:
        return {key: value.strip()}
    if "$" in rest and ("'" in rest or "\\$" in rest):
        raise _refused(number, f"ENV {rest}")  # a quoted dollar is literal, and is not told apart after splitting
    try:
        pairs = [part.partition("=") for part in shlex.split(rest)]
    except ValueError as error:
        raise _refused(number, f"ENV {rest}") from error
    if any(not mark for _, mark, _ in pairs):
        raise _refused(number, f"ENV {rest}")
    return {name: text for name, _, text in pairs}


def _filled(text: str, env: dict[str, str], number: int) -> str:
    def value(match: re.Match[str]) -> str:
        if match[0] == "\\$":
            return "$"
        name = match[1] or match[2]
        if name is None:
            raise _refused(number, f"the variable in {text!r}")
        return env.get(name) or match[3] or ""

    return _VARIABLE.sub(value, text)


def _json_list(rest: str) -> list[str]:
    """The exec form, `["a", "b"]`; empty if it is not one."""
    if not rest.startswith("["):
        return []
    try:
        parts = json.loads(rest)
    except ValueError:
        return []
    return parts if isinstance(parts, list) and all(isinstance(part, str) for part in parts) else []


def _refused(number: int, what: str) -> BuildFailed:
    return BuildFailed(f"line {number}: `{what[:200]}` needs Docker", remedy=NEEDS_DOCKER)
