"""The shared weight arena: one file in shared memory through which the trainer hands its weights to every engine.

The trainer creates and fills it, engines map and read it, and both compute the same per-tensor checksum, so that a
torn write or a stale layer is named. Knows the layout and the checksum; who may write when is the coordinator's.
"""

import hashlib
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import torch

from thundersync.errors import PublishFailed
from thundersync.generate.base import TensorSpec, WeightArena

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Cache lines, and every dtype's alignment.
ALIGN_BYTES = 64
# Words per row of the checksum's two-way sums: small enough for the cache, large enough to keep the sums short.
CHECKSUM_ROW = 1024


def create_arena(path: str | Path, named_tensors: Iterable[tuple[str, torch.Tensor]], dtype: str) -> WeightArena:
    """Make the file at `path` (best in /dev/shm), lay out `named_tensors` as `dtype` and fill it; returns its map.

    Names are those of the Hugging Face state dict, a tied head left out (as `named_parameters()` gives them). The
    caller owns the file and removes it. Raises: PublishFailed when `path` exists already.
    """
    specs: list[TensorSpec] = []
    try:
        with Path(path).open("xb") as file:
            # One at a time: merged weights are made as they are asked for, and together would be a second model.
            for name, tensor in named_tensors:
                laid = tensor.detach().to(device="cpu", dtype=DTYPES[dtype]).contiguous()
                checksum = tensor_checksum(laid)
                specs.append(
                    TensorSpec(name=name, dtype=dtype, shape=list(laid.shape), offset=file.tell(), checksum=checksum)
                )
                file.write(laid.view(-1).view(torch.uint8).numpy().data)
                file.truncate(_aligned(file.tell()))
                file.seek(0, os.SEEK_END)
    except FileExistsError as error:
        raise PublishFailed(
            f"the weight arena {path} exists already", remedy="Remove the file; another run may have left it."
        ) from error
    return WeightArena(path=str(path), tensors=specs, checksum=combined_checksum(specs))


def fill_arena(arena: WeightArena, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightArena:
    """Copy `named_tensors` (any device, cast to the arena's dtype) into the file; returns `arena` with new checksums.

    Raises: PublishFailed unless names, order and shapes are the arena's.
    """
    views = open_arena(arena)
    specs: list[TensorSpec] = []
    for name, tensor in named_tensors:
        spec = arena.tensors[len(specs)] if len(specs) < len(arena.tensors) else None
        if spec is None or name != spec.name:
            raise PublishFailed(
                f"the weights to publish are not those of the arena: {name} comes in the place of "
                f"{spec.name if spec else 'nothing'}"
            )
        if list(tensor.shape) != spec.shape:
            raise PublishFailed(f"{name} has shape {list(tensor.shape)}, the arena's is {spec.shape}")
        views[name].copy_(tensor.detach())
        specs.append(msgspec.structs.replace(spec, checksum=tensor_checksum(views[name])))
    if missing := [spec.name for spec in arena.tensors[len(specs) :]]:
        raise PublishFailed(f"the weights to publish are not those of the arena: {', '.join(missing[:5])} did not come")
    return msgspec.structs.replace(arena, tensors=specs, checksum=combined_checksum(specs))


def open_arena(arena: WeightArena) -> dict[str, torch.Tensor]:
    """Views of every tensor in the file, by name, in order; they keep the file mapped as long as they live.

    Raises: PublishFailed when the file is missing or shorter than its map says.
    """
    path = Path(arena.path)
    end = max((spec.offset + _nbytes(spec) for spec in arena.tensors), default=0)
    # from_file would silently create or grow the file, so its size is checked first.
    if not path.is_file() or path.stat().st_size < end:
        raise PublishFailed(f"the weight arena {path} is missing or shorter than {end} bytes")
    raw = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
    return {
        spec.name: raw[spec.offset : spec.offset + _nbytes(spec)].view(DTYPES[spec.dtype]).view(spec.shape)
        for spec in arena.tensors
    }


def tensor_checksum(tensor: torch.Tensor) -> str:
    """16 hex digits over the tensor's bytes and shape, equal on every device; about 3 GB/s on one core.

    The bytes, as a matrix of 64-bit words, are summed (modulo 2^64) along both axes and the sums hashed: a changed
    word changes its row's and its column's sum, a moved one at least one of them.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = data.numel() // (8 * CHECKSUM_ROW) * (8 * CHECKSUM_ROW)
    digest = hashlib.blake2b(struct.pack(f"<{tensor.dim()}q", *tensor.shape), digest_size=8)
    if whole:
        if data.storage_offset() % 8:  # a view as words needs their alignment
            data = data.clone()
        rows = data[:whole].view(torch.int64).view(-1, CHECKSUM_ROW)
        digest.update(_bytes(torch.cat((rows.sum(0), rows.sum(1)))))
    digest.update(_bytes(data[whole:]))
    return digest.hexdigest()


def combined_checksum(specs: Iterable[TensorSpec]) -> str:
    """One digest over the names and checksums of all tensors, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for spec in specs:
        digest.update(f"{spec.name} {spec.dtype} {spec.checksum}\n".encode())
    return digest.hexdigest()


def arena_faults(arena: WeightArena, views: Mapping[str, torch.Tensor]) -> list[str]:
    """What is wrong with the bytes in the file, as sentences; empty when every tensor has its checksum."""
    faults = [
        f"{spec.name} in the arena does not have its checksum"
        for spec in arena.tensors
        if tensor_checksum(views[spec.name]) != spec.checksum
    ]
    if not faults and combined_checksum(arena.tensors) != arena.checksum:
        faults.append("the arena's map does not have its checksum")
    return faults


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _nbytes(spec: TensorSpec) -> int:
    return torch.Size(spec.shape).numel() * DTYPES[spec.dtype].itemsize


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
