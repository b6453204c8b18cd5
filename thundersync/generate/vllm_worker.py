"""The part of us that lives inside vLLM's processes: starting them tamely, taking weights, proving they arrived.

vLLM imports this module by name in every worker process. It adds the weight-transfer backend `thundersync_shm` and
two methods that the coordinator calls through `collective_rpc`. Knows vLLM's modules; nothing of policy versions.
"""

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.v1.engine.core import EngineCoreProc

from thundersync.generate.arena import arena_faults, open_arena, tensor_checksum
from thundersync.generate.base import WeightArena
from thundersync.generate.child import end_with_parent, pin
from thundersync.generate.manifest import TIED_HEAD
from thundersync.generate.vllm_names import PID_FILE, SETTINGS_KEY, SHM_BACKEND
from thundersync.generate.vllm_start import route_logs

PROBE_COLUMNS = 8
logger = logging.getLogger("vllm.thundersync")
# Taken at import, before the coordinator puts our entry point in its place (a forked child sees that replacement).
vllm_run_engine_core = EngineCoreProc.run_engine_core


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """Entry point of the EngineCore process, in place of vLLM's: tame the process, then run vLLM's own.

    Its own session keeps Ctrl-C of the terminal for the coordinator, which ends engines in order.
    """
    # A forked child shares its parent's wake-up descriptor: a signal sent to the engine would reach the run's loop.
    signal.set_wakeup_fd(-1)
    settings = kwargs["vllm_config"].additional_config[SETTINGS_KEY]
    folder = Path(settings["folder"])
    end_with_parent(settings["parent_pid"], remove=folder)
    (folder / PID_FILE).write_text(str(os.getpid()))
    # Rendezvous files of torch.distributed would otherwise stay in the machine's temporary folder after a kill.
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    os.setsid()
    log = os.open(settings["log_path"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    route_logs(settings["log_path"])
    pin(settings["cpus"])
    if settings["threads"] != torch.get_num_threads():
        torch.set_num_threads(settings["threads"])
    if not settings["compile"]:
        # Even an eager engine compiles two helpers of its sampler with the machine's C++ compiler, if there is one:
        # half a minute before the first token, for nothing.
        torch.compiler.set_stance("force_eager")
    vllm_run_engine_core(*args, **kwargs)


@dataclass
class ShmInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing to agree on beforehand: every update names its arena."""


@dataclass
class ShmUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    arena: dict[str, Any]
    """A `WeightArena`, as plain values."""


class ShmWeightTransfer(WeightTransferEngine[ShmInit, ShmUpdate]):  # type: ignore[misc]
    """vLLM's weight-transfer interface over the shared arena. Reads host memory, so it serves any device."""

    init_info_cls = ShmInit
    update_info_cls = ShmUpdate
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: ShmInit) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ShmUpdate) -> None:
        arena = msgspec.convert(update_info.arena, WeightArena)
        self.model.load_weights(iter(open_arena(arena).items()))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_heads(self.model)

    def shutdown(self) -> None:
        """Nothing is held between updates."""


def repack_tied_heads(model: torch.nn.Module) -> None:
    """On a CPU the head keeps its own packed copy of a tied embedding, which vLLM's reload leaves stale: pack again."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)


class WorkerExtension:
    """Methods vLLM adds to its worker class; the prefix keeps them apart from vLLM's own."""

    model_runner: Any

    def thundersync_arena_faults(self, arena: dict[str, Any]) -> list[str]:
        """Sentences about bytes in the arena that are not what the trainer wrote; touches no weight."""
        read = msgspec.convert(arena, WeightArena)
        return arena_faults(read, open_arena(read))

    def thundersync_stale_weights(self, arena: dict[str, Any], seed: int) -> list[str]:
        """Names of weights whose value in the engine is not the arena's, after an update.

        Weights kept in plain layout are compared by checksum, all of them. Layers that a CPU keeps only packed for
        its matrix library are asked instead: rows of the identity matrix as input give back columns of the weight
        bit by bit (one product by 1, the rest by 0); PROBE_COLUMNS columns, chosen by `seed`, of every layer.
        """
        read = msgspec.convert(arena, WeightArena)
        return list(_stale(self.model_runner.model, read, seed))


def _stale(model: torch.nn.Module, arena: WeightArena, seed: int) -> Iterator[str]:
    views = open_arena(arena)
    checksums = {spec.name: spec.checksum for spec in arena.tensors}
    packed = getattr(model, "packed_modules_mapping", {})
    columns = torch.Generator().manual_seed(seed)
    seen: set[int] = set()
    compared: set[str] = set()
    with torch.inference_mode():
        for path, module in model.named_modules():
            for kind, tensor in module.named_parameters(recurse=False, remove_duplicate=False):
                names = _checkpoint_names(path, kind, packed)
                if names == [TIED_HEAD] and TIED_HEAD not in views:
                    names = [name for name in views if name.endswith("embed_tokens.weight")]
                if not all(name in views for name in names):
                    continue  # not from the checkpoint under a name we can derive (e.g. a fused expert)
                compared.update(names)
                if kind == "weight" and hasattr(module, "cpu_linear"):
                    yield from _stale_packed(module, {name: views[name] for name in names}, columns)
                if tensor.numel() and tensor.data_ptr() not in seen:  # tied tensors appear twice
                    seen.add(tensor.data_ptr())
                    yield from _stale_plain(tensor, {name: views[name] for name in names}, checksums)
    if apart := sorted(set(views) - compared):
        logger.warning("%d weights lie in a layout that is not compared after a publish: %s", len(apart), apart[:5])


def _checkpoint_names(path: str, kind: str, packed: dict[str, list[str]]) -> list[str]:
    """The checkpoint's names of a parameter, several where vLLM fuses layers (q, k, v into qkv), in fused order."""
    parent, _, last = path.rpartition(".")
    prefix = f"{parent}." if parent else ""
    return [f"{prefix}{name}.{kind}" for name in packed.get(last, [last])]


def _stale_plain(tensor: torch.Tensor, parts: dict[str, torch.Tensor], checksums: dict[str, str]) -> Iterator[str]:
    if tensor.shape[0] < sum(part.shape[0] for part in parts.values()):
        return  # a tensor-parallel shard: its rows are not the checkpoint's
    start = 0
    for name, part in parts.items():
        rows = tensor.data[start : start + part.shape[0]]
        start += part.shape[0]
        if rows.shape != part.shape:
            return
        if rows.dtype == part.dtype and tensor_checksum(rows) == checksums[name]:
            continue
        if rows.dtype != part.dtype and torch.equal(rows.to(part.dtype).cpu(), part):
            continue
        yield name


def _stale_packed(module: Any, parts: dict[str, torch.Tensor], columns: torch.Generator) -> Iterator[str]:
    width = next(iter(parts.values())).shape[1]
    chosen = torch.randperm(width, generator=columns)[:PROBE_COLUMNS]
    one_hot = torch.zeros(len(chosen), width, dtype=next(iter(parts.values())).dtype)
    one_hot[torch.arange(len(chosen)), chosen] = 1
    answer = module.quant_method.apply(module, one_hot, bias=None).T  # [outputs, columns]
    start = 0
    for name, part in parts.items():
        if not torch.equal(answer[start : start + part.shape[0]], part[:, chosen]):
            yield name
        start += part.shape[0]


# vLLM's workers find a backend only in this registry, and importing this module is the one thing they do for us.
if SHM_BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(SHM_BACKEND, ShmWeightTransfer)
