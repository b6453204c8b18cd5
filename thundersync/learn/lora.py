"""Low-rank adapters: added to a policy in place, published as merged weights, taken away for the reference, saved.

The layers are peft's, the model keeps its class and its paths, so whatever calls it need not know. Adapters are
float32 whatever the base's dtype: nothing of a small step is rounded away, and the masters need no copy. Knows nothing
of optimizers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from thundersync.errors import ConfigError, ResumeError
from thundersync.learn.settings import LoraSettings

ALL_LINEAR = "all-linear"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
SAVED_PREFIX = "base_model.model."
"""What peft's own wrapper puts before every name in an adapter's file."""
NAME = "default"
FOREIGN = ("use_dora", "use_rslora", "modules_to_save", "target_parameters", "rank_pattern", "alpha_pattern")
"""Settings of an adapter's file that change what it means, and that this trainer does not have."""


def add_adapter(policy: Any, settings: LoraSettings, *, seed: int) -> None:
    """Freeze `policy` and give the named linear layers an adapter: A drawn from `seed`, B zero, both float32.

    Equal seeds give equal adapters in every process. Raises: ConfigError when a name matches no linear layer.
    """
    _inject(policy, _targets(policy, settings.target_modules), settings.rank, settings.alpha)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in _layers(policy).values():
            a, b = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
            drawn = torch.empty(a.shape)  # on the CPU: the same numbers whatever the device
            a.copy_(nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator))
            b.zero_()


def has_adapter(policy: Any) -> bool:
    return bool(_layers(policy))


@torch.no_grad()
def published_parameters(policy: Any) -> Iterator[tuple[str, Tensor]]:
    """The parameters as an engine must have them: the base model's names and order, adapters merged in.

    A merged weight, W + scale x B @ A, is made in float32 and rounded once to W's dtype, when its turn comes; each
    lives as long as its taker keeps it.
    """
    layers = _layers(policy)
    for name, parameter in policy.named_parameters():
        if ".lora_" in name:
            continue
        layer = layers.get(name.removesuffix(".base_layer.weight")) if name.endswith(".base_layer.weight") else None
        if layer is None:
            yield name.replace(".base_layer.", "."), parameter
        else:
            a, b = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
            merged = torch.addmm(parameter.float(), b, a, alpha=layer.scaling[NAME])
            yield name.replace(".base_layer.", "."), merged.to(parameter.dtype)


@contextmanager
def without_adapter(policy: Any) -> Iterator[None]:
    """Within the block, `policy` is its frozen base: the reference of a KL term, at no memory.

    Only for forwards without gradients. Raises: ValueError for a policy that has no adapter.
    """
    layers = _layers(policy)
    if not layers:
        raise ValueError("a policy without an adapter is not its own reference")
    for layer in layers.values():
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers.values():
            layer.enable_adapters(True)


def save_adapter(policy: Any, path: Path) -> None:
    """Write the adapter into the existing folder `path`, in the format of `peft.PeftModel.from_pretrained`.

    What peft cannot load is an adapter on the dense layers of a mixture-of-experts model: it means experts by them.
    """
    from peft import LoraConfig

    layers = _layers(policy)
    first = next(iter(layers.values()))
    config = LoraConfig(
        r=first.r[NAME],
        lora_alpha=first.lora_alpha[NAME],
        base_model_name_or_path=policy.config._name_or_path,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    config.target_modules = _short_names(policy, layers)  # given above, it would become a set, in any order
    config.save_pretrained(path)
    tensors = {
        _saved_name(name): parameter.detach() for name, parameter in policy.named_parameters() if ".lora_" in name
    }
    save_file(tensors, path / WEIGHTS_FILE, metadata={"format": "pt"})


def load_adapter(policy: Any, path: Path, expected: LoraSettings | None = None) -> None:
    """Put the adapter of the folder `path` into `policy`: added, if it has none yet.

    Raises: ResumeError when it is for another model, of a kind that is not trained here, or not as `expected`.
    """
    config = json.loads((path / CONFIG_FILE).read_text())
    odd = [name for name in FOREIGN if config.get(name)] + (["bias"] if config.get("bias", "none") != "none" else [])
    if config.get("peft_type") != "LORA" or odd:
        raise ResumeError(
            f"the adapter in {path} is not plain LoRA ({', '.join(odd) or config.get('peft_type')})",
            remedy="Merge it into its base model with peft's merge_and_unload, and train the result.",
        )
    tensors = load_file(path / WEIGHTS_FILE)
    if not has_adapter(policy):
        modules = {name.removeprefix(SAVED_PREFIX).rpartition(".lora_")[0]: None for name in tensors}
        unknown = sorted(modules.keys() - _linear_layers(policy).keys())
        if unknown:
            raise ResumeError(f"the adapter in {path} is for another model: it has {', '.join(unknown[:5])}")
        if expected is not None:
            wanted = (expected.rank, expected.alpha, set(_targets(policy, expected.target_modules)))
            if wanted != (config["r"], config["lora_alpha"], set(modules)):
                raise ResumeError(
                    f"the adapter in {path} has other settings: rank {config['r']}, alpha {config['lora_alpha']}, "
                    f"on {', '.join(sorted({module.rpartition('.')[2] for module in modules}))}",
                    remedy="Resume with the [model.lora] settings that the checkpoint was made with.",
                )
        _inject(policy, list(modules), config["r"], config["lora_alpha"])
    own = {_saved_name(name): p for name, p in policy.named_parameters() if ".lora_" in name}
    odd = sorted(name for name in own.keys() | tensors.keys() if not _same_shape(own.get(name), tensors.get(name)))
    if odd:
        raise ResumeError(f"the adapter in {path} does not fit the policy's: {', '.join(odd[:5])}")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])


def adapter_base(path: Path) -> str:
    """The base model that the adapter folder `path` names; empty when `path` is no adapter folder."""
    file = path / CONFIG_FILE
    return str(json.loads(file.read_text())["base_model_name_or_path"]) if file.is_file() else ""


def _inject(policy: Any, modules: list[str], rank: int, alpha: float) -> None:
    # Imported here: it costs seconds, which a worker that trains every weight need not spend.
    from peft import LoraConfig
    from peft.tuners.lora import Linear

    # Not by peft's own injection: in mixture-of-experts models that takes the names of dense layers for experts'.
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, bias="none")
    with torch.random.fork_rng(devices=[]):  # peft draws from the global generator; what it draws is not used
        for name in modules:
            parent, _, child = name.rpartition(".")
            layer = Linear(policy.get_submodule(name), NAME, config, r=rank, lora_alpha=alpha)
            setattr(policy.get_submodule(parent), child, layer.eval())
    for name, parameter in policy.named_parameters():
        adapter = ".lora_" in name
        parameter.requires_grad_(adapter)
        if adapter:
            parameter.data = parameter.data.float()


def _layers(policy: Any) -> dict[str, Any]:
    """The layers that carry an adapter, by the name they have in the base model."""
    return {name: module for name, module in policy.named_modules() if hasattr(module, "lora_A")}


def _linear_layers(policy: Any) -> dict[str, nn.Linear]:
    """All but the head (where its weight is the embedding's, that would have to change too), and but routers: some
    are subclasses, with more to them than a matrix."""
    head = policy.get_output_embeddings()
    return {n: m for n, m in policy.named_modules() if type(m) is nn.Linear and m is not head}


def _targets(policy: Any, names: tuple[str, ...]) -> list[str]:
    layers = list(_linear_layers(policy))
    if names == (ALL_LINEAR,) and layers:
        return layers
    idle = [name for name in names if not any(_is_named(layer, name) for layer in layers)]
    if idle or not names:
        kinds = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers})) or "(none)"
        raise ConfigError(
            f"model.lora.target_modules names no linear layer: {', '.join(idle) or '(empty)'}",
            remedy=f'Use ["{ALL_LINEAR}"], or some of this model\'s linear layers: {kinds}.',
        )
    return [layer for layer in layers if any(_is_named(layer, name) for name in names)]


def _is_named(layer: str, name: str) -> bool:
    return layer == name or layer.endswith(f".{name}")


def _short_names(policy: Any, modules: Iterable[str]) -> list[str]:
    """`modules` by their last parts, if those mean no other module of the model."""
    wanted = set(modules)
    short = {module.rpartition(".")[2] for module in wanted}
    meant = {name for name, _ in policy.named_modules() if name.rpartition(".")[2] in short}
    return sorted(short if meant == wanted else wanted)


def _saved_name(name: str) -> str:
    return SAVED_PREFIX + name.replace(f".{NAME}.", ".")


def _same_shape(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.shape == other.shape
