from pathlib import Path

import pytest

from thundersync.checkpoints import Checkpoints, CheckpointState
from thundersync.errors import CheckpointFailed, ResumeError


def state(step: int) -> CheckpointState:
    return CheckpointState(step=step, policy_version=step, seed=1, model="m", prompts_per_step=2, tasks="t")


async def save(checkpoints: Checkpoints, step: int, tokenizer: Path) -> Path:
    async def write(draft: str) -> None:
        (Path(draft) / "model.safetensors").write_text(f"weights of {step}")

    return await checkpoints.save(state(step), tokenizer_from=tokenizer, write=write)


async def test_the_latest_is_found_and_old_ones_go(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=2)
    for step in (1, 2, 10):
        await save(checkpoints, step, tmp_path / "model")
    found = checkpoints.latest()
    assert found is not None
    path, latest = found
    assert latest == state(10)
    assert (path / "tokenizer.json").is_file()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-000002", "step-000010"]


async def test_a_checkpoint_that_was_cut_short_does_not_count(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    await save(checkpoints, 1, tmp_path)

    async def fail(draft: str) -> None:
        (Path(draft) / "half").write_text("")
        raise OSError("disk full")

    with pytest.raises(CheckpointFailed, match=r"disk full\n  -> Free space"):
        await checkpoints.save(state(2), tokenizer_from=tmp_path, write=fail)
    found = checkpoints.latest()
    assert found is not None
    assert found[1].step == 1
    await save(checkpoints, 2, tmp_path)  # what the failed one left does not disturb the next


async def test_an_unreadable_state_names_the_folder_to_remove(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    path = await save(checkpoints, 1, tmp_path)
    (path / "state.json").write_text("{")
    with pytest.raises(ResumeError, match="step-000001"):
        checkpoints.latest()


def test_without_checkpoints_there_is_nothing_to_find(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "none", keep_last=2).latest() is None
