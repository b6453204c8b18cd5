"""How much a model weighs, told from the shapes in its files: parameters in all, and those that are trained.

For estimates before anything is loaded. Linear layers are recognised by their shape, so adapters are counted nearly.
"""

from collections.abc import Mapping, Sequence
from math import prod

from thundersync.config import LoraConfig

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


def _adapted(name: str, shape: Sequence[int], targets: Sequence[str]) -> bool:
    layer = name.removesuffix(".weight")
    if len(shape) != 2 or layer == name:
        return False
    last = layer.rpartition(".")[2]
    if ALL_LINEAR in targets:
        return last not in _NO_ADAPTER
    return last in targets or layer in targets
