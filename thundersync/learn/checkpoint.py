"""A worker's share of a checkpoint: the model in Hugging Face format, the optimizer beside it. Paths and renames are
the coordinator's business."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from thundersync.learn.optimizer import Optimizer

# In a folder of its own: loaders take every safetensors file beside the model for weights.
OPTIMIZER_FILE = Path("optimizer") / "shard-00000-of-00001.safetensors"
SCHEDULE_FILE = Path("optimizer") / "schedule.json"


def save_checkpoint(path: Path, policy: Any, optimizer: Optimizer) -> None:
    """Write into the existing folder `path`. Master weights are saved in float32, so that a resume loses no bit."""
    policy.save_pretrained(path)
    (path / OPTIMIZER_FILE).parent.mkdir(exist_ok=True)
    state = optimizer.adamw.state[optimizer.master]
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    save_file({"master": optimizer.master, **tensors}, path / OPTIMIZER_FILE)
    (path / SCHEDULE_FILE).write_text(json.dumps(optimizer.schedule.state_dict()))


def load_optimizer(path: Path, optimizer: Optimizer) -> None:
    """Take master weights, moments and schedule from a checkpoint folder."""
    tensors = load_file(path / OPTIMIZER_FILE)
    with torch.no_grad():
        optimizer.master.copy_(tensors.pop("master"))
        optimizer.publish_master()
    if tensors:
        optimizer.adamw.state[optimizer.master].update(
            {name: value.to(optimizer.master.device) for name, value in tensors.items()}
        )
    # Where the schedule stands comes from the checkpoint, what it is from the configuration: a changed lr counts.
    base_lrs = optimizer.schedule.base_lrs
    optimizer.schedule.load_state_dict(json.loads((path / SCHEDULE_FILE).read_text()) | {"base_lrs": base_lrs})
    optimizer.schedule._last_lr = [
        base * factor(optimizer.schedule.last_epoch)
        for base, factor in zip(base_lrs, optimizer.schedule.lr_lambdas, strict=True)
    ]
    for group, lr in zip(optimizer.adamw.param_groups, optimizer.schedule.get_last_lr(), strict=True):
        group["lr"] = lr
