"""Where a box starts: a Dockerfile's instructions carried out once in a box, its files kept for all that follow.

Built once and laid over every box of a task, so that all rollouts of a group begin in the very same world. Knows
nothing of how boxes are made.
"""

import asyncio
import hashlib
import os
import posixpath
import time
from pathlib import Path

from msgspec import Struct

from sandboxes.base import Command
from sandboxes.channel import Field
from sandboxes.dockerfile import NEEDS_DOCKER, Copy, Env, Instruction, Run, Workdir
from sandboxes.errors import BuildFailed, FileRefused
from sandboxes.session import AgentSandbox
from sandboxes.tree import FIELDS_PER_ENTRY, entry, pack_tree

LIMIT_BYTES = 1 << 26
"""A start state is kept in memory: what is larger belongs in an image."""


class StartState(Struct, frozen=True):
    """Files as entries for the agent's `unpack`, and variables for every command."""

    entries: list[bytes] = []
    env: dict[str, str] = {}
    digest: str = ""
    """`sha256:...` over both, without times; empty if nothing was built."""


async def build_state(
    box: AgentSandbox, context: Path, instructions: list[Instruction], *, timeout_s: float
) -> StartState:
    """Carry out `instructions` in a fresh box. Raises: BuildFailed; SandboxGone."""
    deadline = time.monotonic() + timeout_s
    folder, env = "/", dict[str, str]()
    try:
        for instruction in instructions:
            match instruction:
                case Workdir(path):
                    folder = posixpath.normpath(posixpath.join(folder, path))
                    await _run(box, ["mkdir", "-p", "--", folder], "/", env, deadline)
                case Env(values):
                    env.update(values)
                case Copy(sources, target):
                    await _copy(box, context, sources, target, folder)
                case Run(argv):
                    await _run(box, argv, folder, env, deadline)
        await box.kill_all()
        entries = await box.pack(limit_bytes=LIMIT_BYTES)
        return StartState(entries, env, await asyncio.to_thread(_digest, entries, env))
    except FileRefused as error:
        raise BuildFailed(f"{context / 'Dockerfile'}: {error.message}", remedy=NEEDS_DOCKER) from error


def _digest(entries: list[bytes], env: dict[str, str]) -> str:
    digest = hashlib.sha256()
    for at in range(0, len(entries), FIELDS_PER_ENTRY):
        kind, name, mode, _, content = entries[at : at + FIELDS_PER_ENTRY]
        # Length first, so that no two different states write the same bytes.
        digest.update(b"%s %s %d %d " % (kind, mode, len(name), len(content)) + name + content)
    for key, value in sorted(env.items()):
        digest.update(f"{len(key)} {len(value)} {key}{value}".encode("utf-8", "surrogateescape"))
    return f"sha256:{digest.hexdigest()}"


async def _run(box: AgentSandbox, argv: list[str], folder: str, env: dict[str, str], deadline: float) -> None:
    left = max(1.0, deadline - time.monotonic())
    result = await box.execute(argv, Command(script="", cwd=folder, env=env, user="root", timeout_s=left))
    if result.exit_code != 0:
        said = (result.stdout + result.stderr).decode("utf-8", "replace").strip()[-1500:]
        how = "ran out of time" if result.timed_out else f"ended with {result.exit_code}"
        raise BuildFailed(
            f"`{argv[-1][:200]}` {how} in a process sandbox (no network, the host's /usr read-only):\n{said}",
            remedy=NEEDS_DOCKER,
        )


async def _copy(box: AgentSandbox, context: Path, sources: list[str], target: str, folder: str) -> None:
    path = posixpath.normpath(posixpath.join(folder, target))
    found = await asyncio.to_thread(_found, context, sources)
    into = target.endswith("/") or len(found) > 1 or any(source.is_dir() for source in found)
    if not into:
        into = (await box.execute(["test", "-d", path], Command(script="", cwd="/", user="root"))).exit_code == 0
    entries = await asyncio.to_thread(_entries, found, path, into)
    await box.unpack([field if isinstance(field, bytes) else str(field).encode() for field in entries])


def _found(context: Path, sources: list[str]) -> list[Path]:
    """The files and folders that `sources` name, links followed. Raises: BuildFailed."""
    found: list[Path] = []
    for source in sources:
        wild = any(mark in source for mark in "*?[")
        matches = sorted(context.glob(source)) if wild else [context / source]
        real = [match.resolve() for match in matches if match.exists()]
        if not real or not all(path.is_relative_to(context.resolve()) for path in real):
            raise BuildFailed(
                f"{context / 'Dockerfile'}: COPY {source}: no such file in the context",
                remedy="Put the file into the task's environment folder.",
            )
        # A wildcard's names are the links' own names, so the link stays where it is a file.
        found += [match if path.is_file() else path for match, path in zip(matches, real, strict=False)]
    return found


def _entries(found: list[Path], path: str, into: bool) -> list[Field]:
    """Entries relative to the root of the box."""
    inside = path.lstrip("/")
    fields: list[Field] = []
    left = LIMIT_BYTES
    for source in found:
        if source.is_dir():
            packed = pack_tree(source, limit_bytes=left)
            packed = _below(packed, inside) if inside else packed
        else:
            name = posixpath.join(inside, source.name) if into else inside
            packed = entry(source.resolve(), os.fsencode(name), source.stat(), limit_bytes=left)
        left -= sum(len(field) for field in packed if isinstance(field, bytes))
        fields += packed
    return fields


def _below(entries: list[Field], folder: str) -> list[Field]:
    """The same entries with `folder` before their names."""
    moved: list[Field] = []
    for at in range(0, len(entries), FIELDS_PER_ENTRY):
        kind, name, *rest = entries[at : at + FIELDS_PER_ENTRY]
        assert isinstance(name, bytes)
        moved += [kind, os.fsencode(folder) + b"/" + name, *rest]
    return moved
