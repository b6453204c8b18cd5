"""The weight arena: what is written is what is read, and every difference has a tensor's name."""

from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thundersync.errors import PublishFailed
from thundersync.generate.arena import arena_faults, create_arena, fill_arena, open_arena, tensor_checksum
from thundersync.generate.base import WeightArena


def tensors(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(seed)
    shapes = {"wide": (40, 300), "odd": (7, 3), "row": (1,), "deep": (2, 3, 5)}
    return [(name, torch.randn(shape, generator=random)) for name, shape in shapes.items()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_written_is_read_back_in_the_arenas_dtype(dtype: str, tmp_path: Path) -> None:
    arena = create_arena(tmp_path / "arena", tensors(), dtype)
    views = open_arena(arena)
    for name, tensor in tensors():
        assert torch.equal(views[name], tensor.to(getattr(torch, dtype)))
    assert arena_faults(arena, views) == []
    assert all(spec.offset % 64 == 0 for spec in arena.tensors)


def test_the_map_survives_the_wire(tmp_path: Path) -> None:
    arena = create_arena(tmp_path / "arena", tensors(), "bfloat16")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(arena), type=WeightArena) == arena
    assert msgspec.convert(msgspec.to_builtins(arena), WeightArena) == arena


def test_filling_again_changes_the_file_and_the_checksums(tmp_path: Path) -> None:
    old = create_arena(tmp_path / "arena", tensors(0), "float32")
    views = open_arena(old)
    new = fill_arena(old, tensors(1))
    assert torch.equal(views["wide"], tensors(1)[0][1])
    assert new.checksum != old.checksum
    assert arena_faults(new, views) == []
    assert "wide in the arena does not have its checksum" in arena_faults(old, views)


def test_only_the_arenas_own_tensors_fill_it(tmp_path: Path) -> None:
    arena = create_arena(tmp_path / "arena", tensors(), "float32")
    with pytest.raises(PublishFailed, match="row"):
        fill_arena(arena, [item for item in tensors() if item[0] != "row"])
    with pytest.raises(PublishFailed, match="in the place of"):
        fill_arena(arena, tensors()[::-1])
    with pytest.raises(PublishFailed, match="shape"):
        fill_arena(arena, [(name, tensor.T if name == "wide" else tensor) for name, tensor in tensors()])


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    create_arena(tmp_path / "arena", tensors(), "float32")
    with pytest.raises(PublishFailed, match="exists"):
        create_arena(tmp_path / "arena", tensors(), "float32")


def test_a_short_or_missing_file_is_told_and_not_created(tmp_path: Path) -> None:
    arena = create_arena(tmp_path / "arena", tensors(), "float32")
    path = Path(arena.path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(PublishFailed, match="shorter"):
        open_arena(arena)
    path.unlink()
    with pytest.raises(PublishFailed, match="missing"):
        open_arena(arena)
    assert not path.exists()


@given(size=st.integers(1, 40_000), data=st.data())
def test_a_changed_or_moved_element_changes_the_checksum(size: int, data: st.DataObject) -> None:
    tensor = torch.arange(size, dtype=torch.int32).view(torch.float32)
    checksum = tensor_checksum(tensor)
    assert tensor_checksum(tensor.clone()) == checksum
    words = tensor.clone().view(torch.int32)
    first = data.draw(st.integers(0, size - 1))
    words[first] ^= 1 << data.draw(st.integers(0, 30))
    assert tensor_checksum(words.view(torch.float32)) != checksum
    second = data.draw(st.integers(0, size - 1))
    swapped = tensor.clone()
    swapped[[first, second]] = tensor[[second, first]]
    assert (tensor_checksum(swapped) == checksum) == (first == second)


def test_the_checksum_depends_on_shape_and_not_on_memory_layout() -> None:
    tensor = torch.randn(64, 128)
    assert tensor_checksum(tensor) != tensor_checksum(tensor.view(128, 64))
    assert tensor_checksum(tensor) != tensor_checksum(tensor.T)
    assert tensor_checksum(tensor.T.contiguous().T) == tensor_checksum(tensor)
    shifted = torch.cat((torch.zeros(1), torch.randn(3000)))[1:]  # not aligned to eight bytes
    assert tensor_checksum(shifted) == tensor_checksum(shifted.clone())
