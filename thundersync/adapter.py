"""Engines with a model's weights where no trainer publishes any: the model's own files, or an adapter merged into them.

Merging is done by `learn.merged`, a process of its own; this is its owner's end, which hears where the merged weights
lie. Imports no torch.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from sandboxes.shield import finish
from thundersync import fleet
from thundersync.config import Config
from thundersync.errors import EngineFailed
from thundersync.generate.base import Generator, WeightArena
from thundersync.generate.child import child_environment, log_tail
from thundersync.models import base_of
from thundersync.monitor.events import AnyEvent
from thundersync.placement import place_engines_here

MERGE_LIMIT_S = 600.0
END_LIMIT_S = 10.0
LINE_LIMIT_BYTES = 1 << 26
"""Of the map of all tensors."""


async def engines_with(
    config: Config,
    model_path: Path,
    *,
    logs: Path,
    emit: Callable[[AnyEvent], None],
    say: Callable[[str], None],
    stack: AsyncExitStack,
) -> list[Generator]:
    """Started on all that the machine has for engines, as policy version 0; their ends are registered in `stack`.

    Raises: ConfigError, ModelMissing, PublishFailed, and an ExceptionGroup of EngineFailed.
    """
    placement = place_engines_here(config)
    base = await asyncio.to_thread(base_of, model_path)
    generators = fleet.engines(
        config,
        placement.engine,
        base,
        name="engine",
        dtype=placement.dtype,
        logs=logs,
        seed=config.seed,
        max_model_len=config.model.max_model_len,
        max_topk=0,
        emit=emit,
    )
    stack.push_async_callback(fleet.close_all, generators)
    say(f"starting {len(generators)} {generators[0].name} engine{'s' if len(generators) > 1 else ''}")
    await fleet.start_all(generators)
    if base != model_path:
        say(f"merging the adapter {model_path}")
        threads = max(1, len(placement.engine.cpus))
        merged = MergedAdapter(model_path, dtype=placement.dtype, threads=threads, log_path=logs / "merge.log")
        stack.push_async_callback(merged.close)
        arena = await merged.start()
        async with asyncio.TaskGroup() as publishing:
            for generator in generators:
                publishing.create_task(generator.publish(arena, version=0))
    return list(generators)


class MergedAdapter:
    """The merged weights of one adapter, in shared memory until `close`."""

    def __init__(self, adapter: Path, *, dtype: str, threads: int, log_path: Path) -> None:
        self._adapter = adapter
        self._dtype = dtype
        self._threads = threads
        self._log_path = log_path
        self._folder: Path | None = None
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> WeightArena:
        """Merge. Raises: EngineFailed with the last lines of its log."""
        self._folder = _private_folder()
        with self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "thundersync.learn.merged",
                f"--adapter={self._adapter}",
                f"--folder={self._folder}",
                f"--dtype={self._dtype}",
                f"--parent={os.getpid()}",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                limit=LINE_LIMIT_BYTES,
                env=child_environment({"OMP_NUM_THREADS": str(self._threads), "CUDA_VISIBLE_DEVICES": ""}),
            )
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(MERGE_LIMIT_S):
                line = await self._process.stdout.readline()
        except TimeoutError as error:
            raise EngineFailed(f"merging {self._adapter} took longer than {MERGE_LIMIT_S:.0f} s") from error
        if not line.endswith(b"\n"):
            raise EngineFailed(f"{self._adapter} could not be merged into its base:\n{log_tail(self._log_path)}")
        return msgspec.json.decode(line, type=WeightArena)

    async def close(self) -> None:
        """End the process and free the memory. Idempotent."""
        await finish(self._close(), limit_s=2 * END_LIMIT_S)

    async def _close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                async with asyncio.timeout(END_LIMIT_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)


def _private_folder() -> Path:
    """In shared memory where there is one."""
    shared = Path("/dev/shm")
    where = shared if shared.is_dir() and os.access(shared, os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix=f"thundersync-{os.getpid()}-", dir=where))
