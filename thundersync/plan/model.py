"""The model of a configuration, as far as its files tell without loading a weight: shapes, and what each device holds.

Looks at this machine only, the hub's cache included: nothing is downloaded for a plan.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from thundersync.budget import PartBudget, part_budget
from thundersync.config import DISTILLING, Config
from thundersync.core.ready_queue import PARTS_PER_COHORT
from thundersync.errors import ThundersyncError
from thundersync.forecast.memory import (
    Decoder,
    Item,
    activation_bytes,
    engine_items,
    learning_items,
    parts_items,
    shapes_of,
)
from thundersync.generate.manifest import read_manifest
from thundersync.models import base_of, resolve_model
from thundersync.placement import Dtype
from thundersync.recipe import objective_of
from thundersync.sizes import decoder_in, parameters, trainable


class Model(Struct, frozen=True, kw_only=True):
    """What its folder says."""

    whole: int
    """Parameters."""
    learning: int
    """Those that are trained."""
    decoder: Decoder | None
    """None: its config.json is not of a decoder that is known here."""

    def parts_allowed(self, config: Config, *, dtype: Dtype, workers: int, on_gpus: bool) -> PartBudget:
        """Of open groups, in each worker."""
        width = 2 if dtype == "bfloat16" else 4
        return part_budget(
            config,
            whole=self.whole,
            learning=self.learning,
            width=width,
            workers=workers,
            on_gpus=on_gpus,
            decoder=self.decoder,
        )


class Memory(Struct, frozen=True, kw_only=True):
    """Bytes of one trainer worker and of one engine device."""

    trainer: list[Item]
    engine: list[Item]
    kv_token: int
    """Bytes of K/V of one token; 0: not known."""


def find_model(config: Config) -> Model | None:
    """None: it is not on this machine, or its files do not say."""
    try:
        folder = _base(config.model.name)
        described: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    except (ThundersyncError, OSError, ValueError):
        return None
    shapes = _shapes(folder, described)
    if shapes is None:
        return None
    return Model(
        whole=parameters(shapes), learning=max(1, trainable(shapes, config.model.lora)), decoder=decoder_in(folder)
    )


def memory_of(config: Config, model: Model, *, dtype: Dtype, workers: int, on_gpus: bool) -> Memory:
    """If groups close as late as they can: as many parts as are allowed, or as all groups of a step need."""
    width = 2 if dtype == "bfloat16" else 4
    learning = learning_items(
        whole=model.whole,
        learning=model.learning,
        width=width,
        adapter=config.model.lora is not None,
        reference=bool(config.algo.kl_coef) and config.model.lora is None,
        sums=objective_of(config).sums.count,
        workers=workers,
        offload=config.optim.offload and on_gpus,
    )
    allowed = model.parts_allowed(config, dtype=dtype, workers=workers, on_gpus=on_gpus)
    # Parts that take the place of activations add nothing to them.
    most = 0 if allowed.room.tokens else min(_wanted_parts(config), allowed.room.most)
    learning += parts_items(learning=model.learning, most=most, resident=allowed.resident)
    engine = [Item(name="weights", size=model.whole * width // config.engine.tensor_parallel_size)]
    if model.decoder is not None:
        longest = config.algo.group_size * config.model.max_model_len  # a pass serves one group
        tokens = min(config.trainer.micro_batch_tokens, longest)
        size = activation_bytes(
            model.decoder, tokens=tokens, width=width, checkpointing=config.trainer.activation_checkpointing
        )
        learning.append(Item(name=f"activations of a pass of {tokens} tokens", size=size, estimated=True))
        engine = engine_items(
            model.decoder,
            whole=model.whole,
            width=width,
            shards=config.engine.tensor_parallel_size,
            sequences=config.engine.max_num_seqs,
            tokens=config.model.max_model_len,
        )
    kv_token = model.decoder.kv_bytes(width) if model.decoder is not None else 0
    return Memory(trainer=learning, engine=engine, kv_token=kv_token)


def _wanted_parts(config: Config) -> int:
    if config.algo.type in DISTILLING:
        return 0
    return PARTS_PER_COHORT * (1 if objective_of(config).cohort == "step" else config.algo.prompts_per_step)


def _base(name: str) -> Path:
    """The folder of its weights; of one without weights (a bare config.json), that folder. Raises: OSError, ValueError,
    ModelMissing."""
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file() and not any(folder.glob("*.safetensors")):
        return folder
    if folder.is_dir() or name.startswith("package:"):
        return base_of(resolve_model(name))
    from huggingface_hub import snapshot_download  # only who names a model of the hub pays for it

    return Path(snapshot_download(name, local_files_only=True))


def _shapes(folder: Path, described: Mapping[str, Any]) -> Mapping[str, Sequence[int]] | None:
    """From the weights' headers; of a folder without weights, from what its config says."""
    try:
        return read_manifest(folder).shapes
    except ThundersyncError:
        try:
            return shapes_of(described)
        except (KeyError, TypeError, ValueError):
            return None
