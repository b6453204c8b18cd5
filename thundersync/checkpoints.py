"""Checkpoints as folders: found, made whole by one rename, pruned. What is inside a model folder is the worker's."""

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from thundersync.errors import CheckpointFailed, ResumeError

STATE_FILE = "state.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)


class CheckpointState(Struct, frozen=True, kw_only=True):
    """`state.json`: where a run stands. The task order follows from seed and step alone."""

    step: int
    """Steps done, empty ones included: the next step has this index."""
    policy_version: int
    seed: int
    model: str
    prompts_per_step: int
    tasks: str
    """Digest of the task ids."""
    tasks_state: Any = None
    """What a task source with a memory keeps."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, *, keep_last: int) -> None:
        self._folder = folder
        self._keep_last = keep_last

    async def save(
        self, state: CheckpointState, *, tokenizer_from: Path, write: Callable[[str], Awaitable[object]]
    ) -> Path:
        """Make `step-000010`: `write` fills a draft folder, then one rename makes it count. Returns its path.

        Raises: CheckpointFailed, and what `write` raises.
        """
        target = self._folder / f"step-{state.step:06d}"
        draft = self._folder / f".{target.name}.tmp"
        if (target / STATE_FILE).is_file():
            return target
        # Nothing is awaited before `write`: the worker gets the request ahead of whatever the run asks of it next, so
        # that what is saved is what `state` says.
        for cut_short in self._folder.glob(".step-*.tmp"):
            shutil.rmtree(cut_short, ignore_errors=True)
        try:
            draft.mkdir(parents=True)
            await write(str(draft))
            await asyncio.to_thread(self._complete, draft, target, state, tokenizer_from)
        except BaseException as error:
            shutil.rmtree(draft, ignore_errors=True)  # half a checkpoint would keep a full disk full
            if isinstance(error, OSError):
                raise CheckpointFailed(str(error)) from error
            raise
        return target

    def latest(self) -> tuple[Path, CheckpointState] | None:
        """The newest whole checkpoint. Raises: ResumeError when its state cannot be read."""
        whole = sorted(path for path in self._folder.glob("step-*") if (path / STATE_FILE).is_file())
        if not whole:
            return None
        try:
            return whole[-1], msgspec.json.decode((whole[-1] / STATE_FILE).read_bytes(), type=CheckpointState)
        except msgspec.DecodeError as error:
            raise ResumeError(
                f"{whole[-1] / STATE_FILE} cannot be read: {error}",
                remedy=f"Remove the folder {whole[-1]} to continue from the checkpoint before it.",
            ) from error

    def _complete(self, draft: Path, target: Path, state: CheckpointState, tokenizer_from: Path) -> None:
        for name in TOKENIZER_FILES:
            if (tokenizer_from / name).is_file():
                shutil.copy2(tokenizer_from / name, draft / name)
        (draft / STATE_FILE).write_bytes(msgspec.json.encode(state))
        for file in (path for path in draft.rglob("*") if path.is_file()):
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        draft.rename(target)
        for old in sorted(self._folder.glob("step-*"))[: -self._keep_last]:
            shutil.rmtree(old)
