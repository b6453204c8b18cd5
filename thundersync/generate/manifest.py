"""What a model folder says about itself, read without torch: its tensors and the tokens that end a reply.

Both engines refuse a publish that does not match the manifest, before it touches a weight.
"""

import json
import struct
from pathlib import Path
from typing import Any

from msgspec import Struct

from thundersync.errors import ModelMissing
from thundersync.generate.base import WeightArena

TIED_HEAD = "lm_head.weight"


class Manifest(Struct, frozen=True, kw_only=True):
    """The tensors a publish must bring and the ids that end a reply."""

    shapes: dict[str, list[int]]
    """By name in the checkpoint; a tied head is left out."""
    tied: bool
    """The output head shares the embedding's weights."""
    end_ids: tuple[int, ...]
    """From the generation config, else the model's config."""
    layer_types: tuple[str, ...] = ()
    """Kinds of the model's layers where its config names them."""
    long_from: int = 0
    """Context length beyond which an engine gives the rotary positions other factors (LongRoPE); 0 = it has one set."""

    def faults(self, arena: WeightArena, *, dtype: str) -> list[str]:
        """Why `arena` is not this model's weights in `dtype`, as sentences; empty when it is."""
        given = {spec.name: spec for spec in arena.tensors}
        faults = [f"{name} is missing" for name in self.shapes if name not in given]
        for name, spec in given.items():
            if name in self.shapes and spec.shape != self.shapes[name]:
                faults.append(f"{name} has shape {spec.shape}, the model's is {self.shapes[name]}")
            elif name not in self.shapes:
                faults.append(f"{name} is not a tensor of this model")
            elif spec.dtype != dtype:
                faults.append(f"{name} is {spec.dtype}, the engine runs {dtype}")
        return faults


def read_manifest(model_path: Path) -> Manifest:
    """Read the headers of the folder's safetensors files and its configs.

    Raises: ModelMissing when the folder is not a whole model.
    """
    config = _json(model_path / "config.json")
    text = config.get("text_config", config)
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    shapes: dict[str, list[int]] = {}
    for file in sorted(model_path.glob("*.safetensors")):
        shapes.update(_header(file))
    if not shapes:
        raise ModelMissing(f"{model_path} has no weights in safetensors format")
    if tied:
        shapes.pop(TIED_HEAD, None)
    generation = model_path / "generation_config.json"
    ends = _json(generation).get("eos_token_id") if generation.is_file() else None
    ends = text.get("eos_token_id") if ends is None else ends
    return Manifest(
        shapes=shapes,
        tied=tied,
        end_ids=tuple(ends) if isinstance(ends, list) else (() if ends is None else (int(ends),)),
        layer_types=tuple(text.get("layer_types") or ()),
        long_from=_long_from(text),
    )


def _long_from(text: dict[str, Any]) -> int:
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if (rope.get("rope_type") or rope.get("type")) not in ("longrope", "su"):
        return 0
    return int(rope.get("original_max_position_embeddings") or text.get("original_max_position_embeddings") or 0)


def _json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelMissing(f"{path} cannot be read: {error}") from error
    return content


def _header(path: Path) -> dict[str, list[int]]:
    """Names and shapes from a safetensors file: 8 bytes of length, then a JSON object."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    # Old checkpoints carry rotary tables, which are computed, not learned.
    return {
        name: entry["shape"]
        for name, entry in header.items()
        if name != "__metadata__" and not name.endswith("rotary_emb.inv_freq")
    }
