"""A worker's share of a checkpoint: the model (or its adapter) in its usual format, the optimizer's shards beside it.
Paths and renames are the coordinator's business."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from thundersync.errors import ResumeError
from thundersync.learn.lora import has_adapter, save_adapter
from thundersync.learn.optimizer import Optimizer

# In a folder of its own: loaders take every safetensors file beside the model for weights.
OPTIMIZER_FOLDER = "optimizer"
SCHEDULE_FILE = Path(OPTIMIZER_FOLDER) / "schedule.json"
SHARD_NAME = re.compile(r"shard-\d{5}-of-(\d{5})\.safetensors")
SLICED = ("master", "exp_avg", "exp_avg_sq")
"""What every rank holds a slice of; the rest of AdamW's state is the same number on all."""


def save_checkpoint(path: Path, policy: Any, optimizer: Optimizer) -> None:
    """Write this rank's share into the existing folder `path`; it is whole when every rank has.

    Master weights are saved in float32, so that a resume loses no bit.
    """
    ranks = optimizer.ranks
    folder = path / OPTIMIZER_FOLDER
    folder.mkdir(exist_ok=True)
    state = optimizer.adamw.state[optimizer.master]
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    save_file({"master": optimizer.master, **tensors}, folder / _shard_name(ranks.rank, ranks.world))
    if ranks.rank == 0:
        (path / SCHEDULE_FILE).write_text(json.dumps(optimizer.schedule.state_dict()))
        if has_adapter(policy):
            save_adapter(policy, path)
        else:
            policy.save_pretrained(path)


@torch.no_grad()
def load_optimizer(path: Path, optimizer: Optimizer) -> None:
    """Take master weights, moments and schedule from a checkpoint folder, whatever number of ranks wrote it.

    All ranks together. Raises: ResumeError when a shard is missing or the parameters are others.
    """
    state = optimizer.adamw.state[optimizer.master]
    for name, value in _own_slices(path, optimizer).items():
        if name == "master":
            optimizer.master.copy_(value)
        else:
            state[name] = value.to(optimizer.master.device)
    optimizer.publish_master()
    # Where the schedule stands comes from the checkpoint, what it is from the configuration: a changed lr counts.
    base_lrs = optimizer.schedule.base_lrs
    optimizer.schedule.load_state_dict(json.loads((path / SCHEDULE_FILE).read_text()) | {"base_lrs": base_lrs})
    optimizer.schedule._last_lr = [
        base * factor(optimizer.schedule.last_epoch)
        for base, factor in zip(base_lrs, optimizer.schedule.lr_lambdas, strict=True)
    ]
    for group, lr in zip(optimizer.adamw.param_groups, optimizer.schedule.get_last_lr(), strict=True):
        group["lr"] = lr


def _own_slices(path: Path, optimizer: Optimizer) -> dict[str, Tensor]:
    """This rank's slice of what all shards together hold; only those bytes are read."""
    size = optimizer.flat.size
    own = optimizer.ranks.own(size)
    pieces: dict[str, list[Tensor]] = {}
    start = 0
    for file in _shards(path / OPTIMIZER_FOLDER):
        with safe_open(file, framework="pt") as shard:
            length = shard.get_slice("master").get_shape()[0]
            low, high = max(own.start - start, 0), min(own.stop - start, length)
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                if name not in SLICED:
                    pieces[name] = [shard.get_tensor(name)]
                elif low < high:
                    pieces.setdefault(name, []).append(shard.get_slice(name)[low:high])
        start += length
    if start != size:
        raise ResumeError(
            f"the optimizer's state in {path} is of {start} parameters, this policy trains {size}",
            remedy="Resume with the model, and the [model.lora] settings, that the checkpoint was made with.",
        )
    return {name: torch.cat(parts) if name in SLICED else parts[0] for name, parts in pieces.items()}


def _shards(folder: Path) -> list[Path]:
    """The shards in the order of their ranks."""
    found = [file for file in sorted(folder.glob("*.safetensors")) if SHARD_NAME.fullmatch(file.name)]
    worlds = {int(match[1]) for file in found if (match := SHARD_NAME.fullmatch(file.name))}
    expected = [folder / _shard_name(rank, world) for world in worlds for rank in range(world)]
    if not found or found != expected:
        missing = sorted({file.name for file in expected} - {file.name for file in found}) or ["all of them"]
        raise ResumeError(
            f"{folder} lacks shards of the optimizer's state: {', '.join(missing)}",
            remedy="Remove this checkpoint's folder to continue from the one before it.",
        )
    return found


def _shard_name(rank: int, world: int) -> str:
    return f"shard-{rank:05d}-of-{world:05d}.safetensors"
