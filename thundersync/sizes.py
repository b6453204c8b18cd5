"""How much a model weighs, told from its files: parameters in all, those that are trained, and a decoder's sizes.

For estimates before anything is loaded. Linear layers are recognised by their shape, so adapters are counted nearly.
"""

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

from thundersync.config import LoraConfig
from thundersync.forecast.memory import Decoder, decoder_of

ALL_LINEAR = "all-linear"
_NO_ADAPTER = ("embed_tokens", "lm_head")


def parameters(shapes: Mapping[str, Sequence[int]]) -> int:
    """All weights; `shapes` by name, as in a manifest."""
    return sum(prod(shape) for shape in shapes.values())


def trainable(shapes: Mapping[str, Sequence[int]], lora: LoraConfig | None) -> int:
    """Weights that learn: all of them, or each adapter's rank x (in + out)."""
    if lora is None:
        return parameters(shapes)
    return sum(lora.rank * sum(shape) for name, shape in shapes.items() if _adapted(name, shape, lora.target_modules))


def decoder_in(folder: Path) -> Decoder | None:
    """None: its config.json is not of a decoder that is known here. Raises: OSError."""
    try:
        return decoder_of(json.loads((folder / "config.json").read_bytes()))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _adapted(name: str, shape: Sequence[int], targets: Sequence[str]) -> bool:
    layer = name.removesuffix(".weight")
    if len(shape) != 2 or layer == name:
        return False
    last = layer.rpartition(".")[2]
    if ALL_LINEAR in targets:
        return last not in _NO_ADAPTER
    return last in targets or layer in targets
