"""A run on disk: one folder with its config, events, metrics, rollouts, logs and checkpoints, owned by one process.

The engine makes it first and closes it last. Writes run in one thread, in the order they were asked for, and a file
is whole or absent. It knows nothing of what the numbers mean, nor how checkpoints are made.
"""

import asyncio
import contextlib
import fcntl
import os
import re
import shlex
import time
import tomllib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zstandard

from thundersync.core.types import Rollout
from thundersync.errors import ConfigError, ResumeError, ThundersyncError

T = TypeVar("T")

_CONFIG, _METRICS, _LOCK = "config.toml", "metrics.jsonl", "run.lock"


class RunExists(ThundersyncError):
    """A folder of this name holds a run, and resuming was not asked for."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path} already holds a run",
            remedy="Continue it with --resume, choose another `name`, or remove the folder: "
            f"rm -r {shlex.quote(str(path))}",
        )


class RunLocked(ThundersyncError):
    """A live process owns the run."""

    def __init__(self, path: Path, owner: str) -> None:
        super().__init__(
            f"{path} belongs to a run that is still going (process {owner or 'unknown'})",
            remedy=f"Watch it with `python -m thundersync monitor {path}`, stop it, or choose another `name`.",
        )


class RunFolder:
    """The folder of one run, locked for this process until `close`. Make it with `create`."""

    def __init__(self, path: Path, lock: "_Lock") -> None:
        self.path = path
        self.name = path.name
        self.events = path / "events.jsonl"
        self.metrics = path / _METRICS
        self.rollouts = path / "rollouts"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self._lock = lock
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="run-folder")

    @classmethod
    def create(
        cls, output_dir: str | Path, name: str, resolved_config_toml: str, resume: bool, *, now_s: float | None = None
    ) -> "RunFolder":
        """Make the folder of a new run, or take over the folder of one to resume.

        Without a `name` a new run gets one like `20261129-1624-smollm2`, and a resumed one is the newest of that form
        for the same model. A resumed run's config stays what it was until `take_config`.

        Raises: RunExists, RunLocked, ResumeError (nothing to resume), ConfigError (the folder cannot be written).
        """
        try:
            return cls._create(Path(output_dir), name, resolved_config_toml, resume, now_s)
        except OSError as error:
            raise ConfigError(
                f"the run's folder cannot be made in {output_dir}: {error}", remedy="Choose another output_dir."
            ) from error

    @classmethod
    def _create(
        cls, output: Path, name: str, resolved_config_toml: str, resume: bool, now_s: float | None
    ) -> "RunFolder":
        slug = _slug(resolved_config_toml)
        if resume:
            path = output / name if name else _newest(output, slug)
            if not (path / _CONFIG).is_file():
                raise ResumeError(f"{path} holds no run to resume", remedy="Run once without --resume; check `name`.")
        elif name:
            path = output / name
            path.mkdir(parents=True, exist_ok=True)
        else:
            path = _make_unique(output, f"{time.strftime('%Y%m%d-%H%M', time.localtime(now_s))}-{slug}")
        lock = _Lock(path)
        try:
            config = path / _CONFIG
            if config.is_file() and not resume:
                raise RunExists(path)
            (path / "feed.json").unlink(missing_ok=True)  # a killed run leaves it, and nobody answers there
            if not resume:
                write_whole(config, resolved_config_toml.encode())
            for folder in ("rollouts", "checkpoints", "logs"):
                (path / folder).mkdir(exist_ok=True)
        except BaseException:
            lock.release()
            raise
        return cls(path, lock)

    def take_config(self, resolved_config_toml: str) -> None:
        """A resumed run goes on with this configuration; a different old one is kept as `config-1.toml`, and so on."""
        config = self.path / _CONFIG
        if config.read_text() != resolved_config_toml:
            config.replace(self.path / f"config-{len(list(self.path.glob('config-*.toml'))) + 1}.toml")
            write_whole(config, resolved_config_toml.encode())

    def free_name(self) -> None:
        """A run that could not start is no run: its logs stay, its name may be used again."""
        (self.path / _CONFIG).unlink(missing_ok=True)

    async def write_metrics(self, row: Mapping[str, Any]) -> None:
        """Append one row, durable when this returns. `step` is the row's step; JSON turns NaN into null."""
        line = msgspec.json.encode(row) + b"\n"
        await self._do(lambda: _append(self.metrics, line))

    async def write_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> Path:
        """Write a step's rollouts, one JSON object a line, as `rollouts/step-000012.jsonl.zst`; returns its path."""
        path = self.rollouts / f"step-{step:06d}.jsonl.zst"
        await self._do(lambda: write_whole(path, _compressed(rollouts)))
        return path

    def has_evaluation(self, policy_version: int) -> bool:
        """Whether this policy version has been evaluated in this run."""
        return self._evaluation(policy_version).is_file()

    def _evaluation(self, policy_version: int) -> Path:
        return self.rollouts / f"eval-{policy_version:06d}.jsonl.zst"

    async def write_evaluation(self, policy_version: int, rollouts: Sequence[Rollout]) -> Path:
        """The same for an evaluation, as `rollouts/eval-000010.jsonl.zst`, named by the policy version it judged."""
        path = self._evaluation(policy_version)
        await self._do(lambda: write_whole(path, _compressed(rollouts)))
        return path

    async def rewind(self, steps: int, policy_version: int) -> int:
        """Forget what came after the checkpoint a run resumes from; returns the metrics rows kept.

        Rows and rollouts of steps from `steps` on go (the first step is 0), evaluations of later policies than
        `policy_version`, and a torn last row.
        Events stay: they are the history of what happened, and a viewer sees the run start again.
        """
        return await self._do(lambda: _rewind(self.metrics, self.rollouts, steps, policy_version))

    async def close(self) -> None:
        """Wait for the writes asked for, then let another process have the run. Idempotent."""
        await asyncio.to_thread(self._writer.shutdown)
        self._lock.release()

    async def __aenter__(self) -> "RunFolder":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _do(self, write: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, write)


def is_running(path: Path) -> bool:
    """Whether a live process owns the run in this folder. A killed owner does not count."""
    try:
        descriptor = os.open(path / _LOCK, os.O_RDONLY)
    except OSError:  # no such folder, or no folder at all
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def read_rollouts(path: Path) -> Iterator[Rollout]:
    """The rollouts of one file, in the order they were written."""
    decoder = msgspec.json.Decoder(Rollout)
    with path.open("rb") as file:
        content = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read()
    for line in content.splitlines():
        yield decoder.decode(line)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that every reader, even after a power cut, finds the old content or all of the new."""
    draft = path.with_name(f".{path.name}.tmp")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


class _Lock:
    """An exclusive flock on `run.lock`: the kernel frees it when its owner dies, however it dies."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _LOCK
        self._descriptor = self._take(folder)
        # A forked child shares the lock, and would hold it beyond its dead parent: it lets go at birth.
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _let_go(this()))

    def _take(self, folder: Path) -> int:
        for _ in range(25):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._path.exists() and os.fstat(descriptor).st_ino == self._path.stat().st_ino:
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, str(os.getpid()).encode())
                    return descriptor
                # Its last owner removed the file between our open and our lock: what we locked is no longer it.
            except BlockingIOError:
                time.sleep(0.01)  # a viewer that asks `is_running` holds a shared lock for an instant
            os.close(descriptor)
        raise RunLocked(folder, self._path.read_text() if self._path.exists() else "")

    def release(self) -> None:
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            self.forget()

    def forget(self) -> None:
        """Close our descriptor only: a parent's lock stays the parent's."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _let_go(lock: _Lock | None) -> None:
    if lock is not None:
        lock.forget()


def _slug(resolved_config_toml: str) -> str:
    model = str(tomllib.loads(resolved_config_toml).get("model", {}).get("name", "run"))
    last = re.split(r"[/\\]", model.rstrip("/\\"))[-1].removeprefix("package:").removeprefix("llm-")
    return re.sub(r"[^a-z0-9.]+", "-", last.lower()).strip("-.") or "run"


def _newest(output: Path, slug: str) -> Path:
    form = re.compile(rf"\d{{8}}-\d{{4}}-{re.escape(slug)}(-\d+)?")
    runs = [config for config in output.glob(f"*/{_CONFIG}") if form.fullmatch(config.parent.name)]
    if not runs:
        raise ResumeError(f"{output} holds no run of {slug} to resume", remedy="Give its `name`, or drop --resume.")
    return max(runs, key=lambda config: config.stat().st_mtime_ns).parent


def _make_unique(output: Path, name: str) -> Path:
    output.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, 1000):
        path = output / (name if attempt == 1 else f"{name}-{attempt}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise RunExists(output / name)


def _append(path: Path, line: bytes) -> None:
    with path.open("ab") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def _compressed(rollouts: Sequence[Rollout]) -> bytes:
    compressor = zstandard.ZstdCompressor(level=3).compressobj()
    parts = [compressor.compress(msgspec.json.encode(rollout) + b"\n") for rollout in rollouts]
    return b"".join([*parts, compressor.flush()])


def _rewind(metrics: Path, rollouts: Path, steps: int, policy_version: int) -> int:
    files = {int(file.name[5:11]): file for file in rollouts.glob("step-??????.jsonl.zst")}
    rows: dict[bytes, int] = {}
    for line in metrics.read_bytes().splitlines() if metrics.is_file() else ():
        with contextlib.suppress(msgspec.DecodeError):  # only a torn line: rows are appended whole
            rows[line] = int(msgspec.json.decode(line)["step"])
    kept = [line for line, step in rows.items() if step < steps]
    write_whole(metrics, b"".join(line + b"\n" for line in kept))
    for step, file in files.items():
        if step >= steps:
            file.unlink()
    for file in rollouts.glob("eval-??????.jsonl.zst"):
        if int(file.name[5:11]) > policy_version:
            file.unlink()
    return len(kept)
