"""Engines begin, die and end without leaving anything behind: processes, files, sockets, environment."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.generate.conftest import BACKENDS
from tests.generate.rig import TOLERANCE, Rig, new_generator, prompt
from tests.tiny import tiny_model
from thundersync.errors import EngineFailed, PublishFailed
from thundersync.generate import choose_backend

GONE_LIMIT_S = 20.0


@pytest.fixture
def temporary_files(tiny: Path) -> Iterator[Path]:
    """A short folder that the engines under test use for everything temporary (`tiny` has imported the libraries)."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        tempfile.tempdir = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = before


def shared_memory_of(process: psutil.Process) -> list[str]:
    return [entry.path for entry in process.memory_maps() if entry.path.startswith("/dev/shm/")]


def processes() -> set[psutil.Process]:
    """Every process below this one, but for Python's own resource tracker, which it keeps to its end once spawned."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            if not any("resource_tracker" in word for word in child.cmdline()):
                found.add(child)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def entries(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def existing(paths: list[str]) -> list[str]:
    return [path for path in paths if Path(path).exists()]


def truncated_copy(model: Path, folder: Path) -> Path:
    """A model folder whose weights file lacks its end, as after a full disk."""
    shutil.copytree(model, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    return folder


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_closed_engine_leaves_nothing_and_an_untied_head_is_published_exactly(
    backend: str, tmp_path: Path, temporary_files: Path
) -> None:
    model = tiny_model(tmp_path / "untied", seed=3, tie=False)
    generator = new_generator(backend, model, tmp_path / "engine.log")
    environment = dict(os.environ)
    children = processes()
    await generator.start()
    assert dict(os.environ) == environment
    rig = Rig(generator, model, tmp_path)
    rig.change_weights(7)
    await rig.publish()
    ids = prompt(1, 40)
    assert rig.worst_error(ids, await rig.generate(ids, max_tokens=10)) < TOLERANCE
    assert "not compared" not in (tmp_path / "engine.log").read_text()
    mine = processes() - children
    shared = [path for process in mine for path in shared_memory_of(process)]
    assert mine
    await generator.close()
    await generator.close()  # idempotent
    assert processes() <= children
    assert entries(temporary_files) == []
    assert existing(shared) == []
    with pytest.raises(EngineFailed):
        await rig.generate(ids)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_killed_engine_fails_its_requests_with_the_end_of_its_log(
    backend: str, tiny: Path, tmp_path: Path, temporary_files: Path
) -> None:
    generator: Any = new_generator(backend, tiny, tmp_path / "engine.log")
    await generator.start()
    rig = Rig(generator, tiny, tmp_path)
    pending = [asyncio.create_task(rig.generate(prompt(i, 30), max_tokens=400)) for i in range(16)]
    await rig.generate(prompt(20, 5), max_tokens=1)
    with (tmp_path / "engine.log").open("a") as log:
        log.write("the last words\n")
    os.kill(generator.process_id, signal.SIGKILL)
    async with asyncio.timeout(GONE_LIMIT_S):
        outcomes = await asyncio.gather(*pending, return_exceptions=True)
    failed = [outcome for outcome in outcomes if isinstance(outcome, EngineFailed)]
    assert failed
    written = [line for line in (tmp_path / "engine.log").read_text().splitlines() if line.strip()]
    assert any(line.strip() in str(failed[0]) for line in written[-60:])
    assert not [outcome for outcome in outcomes if isinstance(outcome, BaseException) and outcome not in failed]
    with pytest.raises(EngineFailed):
        await rig.generate(prompt(1, 5))
    with pytest.raises(EngineFailed):
        await rig.publish()
    await generator.close()
    assert entries(temporary_files) == []


@pytest.mark.parametrize("backend", BACKENDS)
async def test_an_engine_that_cannot_start_says_why_and_leaves_nothing(
    backend: str, tiny: Path, tmp_path: Path, temporary_files: Path
) -> None:
    broken = truncated_copy(tiny, tmp_path / "broken")
    children = processes()
    generator = new_generator(backend, broken, tmp_path / "engine.log")
    with pytest.raises(EngineFailed, match="log"):
        await generator.start()
    assert processes() <= children
    assert entries(temporary_files) == []


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_cancelled_start_leaves_nothing(
    backend: str, tiny: Path, tmp_path: Path, temporary_files: Path
) -> None:
    children = processes()
    generator = new_generator(backend, tiny, tmp_path / "engine.log")
    starting = asyncio.create_task(generator.start())
    while not starting.done() and not processes() - children:
        await asyncio.wait([starting], timeout=0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert processes() <= children
    assert entries(temporary_files) == []


COORDINATOR = """
import asyncio, sys
from pathlib import Path
from tests.generate.rig import new_generator

async def main():
    generator = new_generator(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    await generator.start()
    print(generator.process_id, flush=True)
    await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_ends_when_its_coordinator_is_killed(backend: str, tiny: Path, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        coordinator = subprocess.Popen(
            [sys.executable, "-c", COORDINATOR, backend, str(tiny), str(tmp_path / "engine.log")],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "TMPDIR": folder, "OMP_NUM_THREADS": "1"},
        )
        try:
            assert coordinator.stdout is not None
            engine = psutil.Process(int(coordinator.stdout.readline()))
        finally:
            coordinator.kill()
            coordinator.wait()
        engine.wait(GONE_LIMIT_S)
        assert entries(Path(folder)) == []


@pytest.mark.vllm
async def test_a_tied_head_left_stale_is_told_by_name_and_refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    # Without the repacking, vLLM's own reload leaves the head's packed copy behind; a forked engine inherits the patch.
    from thundersync.generate import vllm_worker

    monkeypatch.setattr(vllm_worker, "repack_tied_heads", lambda model: None)
    generator = new_generator("vllm", tiny, tmp_path / "engine.log")
    await generator.start()
    try:
        if "starts the engine by fork" not in (tmp_path / "engine.log").read_text():
            pytest.skip("the engine was not forked: torch has more than one thread here (OMP_NUM_THREADS=1 is not set)")
        rig = Rig(generator, tiny, tmp_path)
        rig.change_weights(5)
        with pytest.raises(PublishFailed, match=r"model\.embed_tokens\.weight is stale"):
            await rig.publish()
        with pytest.raises(EngineFailed, match="not whole"):
            await rig.generate(prompt(1, 5))
    finally:
        await generator.close()


def test_auto_is_vllm_where_it_is_installed_and_transformers_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert choose_backend("auto") == "vllm"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose_backend("auto") == "transformers"
    assert choose_backend("transformers") == "transformers"
    with pytest.raises(EngineFailed, match="not installed"):
        choose_backend("vllm")


def test_importing_the_engines_package_imports_neither_torch_nor_vllm() -> None:
    code = "import sys, thundersync.generate, thundersync.generate.vllm, thundersync.generate.transformers as t;"
    code += "print({'torch', 'transformers', 'vllm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
