"""The samples of an evaluation on disk: each is one line of one file the moment it is finished.

So a killed evaluation loses what was in flight and nothing else. Holds whole rollouts, without their tokens (nothing
is learned from them); knows nothing of how they are made, or of what they come to.
"""

import asyncio
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from msgspec import Struct

from thundersync.core.types import Rollout, RolloutId, Scored
from thundersync.errors import ResumeError
from thundersync.rundir import write_whole

SAMPLES, ASKED = "samples.jsonl", "asked.json"


class SuiteAsked(Struct, frozen=True, kw_only=True):
    """A suite by name, and which tasks it had."""

    name: str
    task_ids: list[str]


class Asked(Struct, frozen=True, kw_only=True):
    """What an evaluation asks. Samples may be put together only if they answer the same."""

    agent: str
    model: str
    files: str
    """Digest over names, sizes and times of the model's files."""
    suites: list[SuiteAsked]
    settings: str
    """The [rollout] table that samples are made with, as JSON."""


class SampleFile:
    """`samples.jsonl` of one evaluation's folder; a later line of the same sample replaces an earlier one."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / SAMPLES
        self._asked = folder / ASKED
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="samples")

    def begin(self, asked: Asked) -> dict[RolloutId, Rollout]:
        """Start, or go on with, this question; returns the scored samples that are there. Reads a file.

        Failed samples are not returned: what broke them may be mended now. A line that a killed run left torn is cut
        off. Raises: ResumeError when the folder's samples answer another question.
        """
        if self._asked.exists():
            _refuse_other(self._asked.parent, msgspec.json.decode(self._asked.read_bytes(), type=Asked), asked)
        else:
            write_whole(self._asked, msgspec.json.format(msgspec.json.encode(asked)))
        known: dict[RolloutId, Rollout] = {}
        whole = 0
        for line in self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else ():
            if not line.endswith(b"\n"):
                break
            rollout = msgspec.json.decode(line, type=Rollout)
            known[rollout.rollout_id] = rollout
            whole += len(line)
        if self._path.exists():
            os.truncate(self._path, whole)
        return {name: rollout for name, rollout in known.items() if isinstance(rollout.outcome, Scored)}

    async def add(self, rollout: Rollout) -> None:
        """Append one; it is in the file when this returns."""
        line = msgspec.json.encode(msgspec.structs.replace(rollout, sequences=[])) + b"\n"
        await asyncio.get_running_loop().run_in_executor(self._writer, _append, self._path, line)

    async def close(self) -> None:
        await asyncio.to_thread(self._writer.shutdown)


def files_digest(model: Path) -> str:
    """12 hex digits over names, sizes and times of a model's files: another checkpoint under the same path is told
    apart."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted([*model.glob("*.safetensors"), *model.glob("*config.json")]):
        found = path.stat()
        digest.update(f"{path.name} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _refuse_other(folder: Path, before: Asked, now: Asked) -> None:
    changed = [name for name in Asked.__struct_fields__ if getattr(before, name) != getattr(now, name)]
    if changed:
        raise ResumeError(
            f"the samples in {folder} are of another evaluation: {', '.join(changed)} changed",
            remedy="Resume with the same model, suites and settings (--samples may grow), or begin anew without "
            "--resume.",
        )


def _append(path: Path, line: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(line)
