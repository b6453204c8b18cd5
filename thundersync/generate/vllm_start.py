"""Starting a vLLM engine from inside the coordinator without leaving traces in it. Blocking: runs in a thread.

vLLM is steered and steers others through environment variables; both are confined to the start here. Knows vLLM's
options; nothing of requests or publishing.
"""

import logging
import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

from thundersync.config import EngineConfig
from thundersync.generate.vllm_names import EXTENSION, SETTINGS_KEY, SHM_BACKEND

READY_LIMIT_S = 600
# A multiple of 32 (CPU attention's unit), and as small as that allows: the prefix cache shares whole blocks.
CPU_BLOCK_TOKENS = 32
# vLLM's own default.
VLLM_MAX_LOGPROBS = 20
# The environment belongs to the whole process, so only one engine may start at a time.
_environment_lock = threading.Lock()


class VllmSettings(Struct, frozen=True, kw_only=True):
    """Everything one engine is started with."""

    model_path: str
    engine: EngineConfig
    max_model_len: int
    dtype: str
    seed: int
    max_topk: int
    """Alternatives per token that a score may ask for."""
    cpus: Sequence[int]
    threads: int
    log_path: str
    folder: str
    """For sockets and everything temporary; short, since a Unix address holds 107 bytes. The caller removes it."""


class VllmStart:
    """One start of an engine: `run` in a thread, `cancel` from anywhere."""

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._cancelled = False
        self._others: set[int | None] | None = None
        """While the start runs: this process's children that are not its."""

    def run(self) -> Any:
        """Start the engine's process and return vLLM's `AsyncLLM`; takes 3 s (fork) to 10 s (spawn).

        Forks when that is safe: on a CPU, and only if torch in this process has had one thread from the beginning,
        since a fork after a multi-threaded region hangs for ever in the child. The caller wraps whatever this raises.
        """
        # Torch sizes its thread pool when it is first loaded, so what counts is the environment of that moment.
        one_thread = "torch" not in sys.modules or os.environ.get("OMP_NUM_THREADS") == "1"
        with _environment_lock, borrowed_environment(_environment(self._settings)), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.platforms import current_platform
            from vllm.v1.engine.async_llm import AsyncLLM

            route_logs(self._settings.log_path)
            on_cpu = current_platform.is_cpu()
            config = AsyncEngineArgs(**_arguments(self._settings, on_cpu)).create_engine_config()
            if on_cpu:
                # vLLM has set `spawn` while it made the config.
                method = "fork" if one_thread and torch.get_num_threads() == 1 else "spawn"
                os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = method
                logging.getLogger("vllm").info("thundersync starts the engine by %s", method)
            self._others = {child.pid for child in multiprocessing.active_children()}
            try:
                with _own_entry_point():
                    if self._cancelled:
                        raise RuntimeError("the start was cancelled")
                    return AsyncLLM.from_vllm_config(config, disable_log_stats=True)
            finally:
                self._others = None

    def cancel(self) -> None:
        """Kill the engine's process if there is one yet, so that `run` raises soon; call again until it has."""
        self._cancelled = True
        others = self._others
        if others is not None:  # only one engine starts at a time, so every new EngineCore is ours
            for child in multiprocessing.active_children():
                if child.pid not in others and child.name.startswith("EngineCore"):
                    child.kill()


@contextmanager
def borrowed_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set `values` for the block; afterwards the environment is exactly what it was, whoever changed it meanwhile.

    vLLM leaves LD_PRELOAD and a dozen others behind, which would reach the trainer and every sandbox.
    """
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def route_logs(path: str) -> None:
    """Send vLLM's log records to the file at `path`, and nowhere else."""
    logger = logging.getLogger("vllm")
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def close_logs(path: str) -> None:
    """Let go of the file at `path`, unless another engine's has taken its place. What vLLM still says is not kept."""
    logger = logging.getLogger("vllm")
    for handler in list(logger.handlers):
        if isinstance(handler, logging.FileHandler) and handler.baseFilename == path:
            logger.addHandler(logging.NullHandler())  # without any, Python would print warnings
            logger.removeHandler(handler)
            handler.close()


@contextmanager
def _own_entry_point() -> Iterator[None]:
    """Let vLLM's process manager start `vllm_worker.run_engine_core`, which tames the process and calls vLLM's own."""
    from vllm.v1.engine.core import EngineCoreProc

    from thundersync.generate.vllm_worker import run_engine_core

    original = EngineCoreProc.run_engine_core
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
    try:
        yield
    finally:
        EngineCoreProc.run_engine_core = staticmethod(original)


def _environment(settings: VllmSettings) -> dict[str, str]:
    values = {
        # The worker lives inside the EngineCore process: one process less, 6 s and 580 MB less.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CONFIGURE_LOGGING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_RPC_BASE_PATH": settings.folder,
        # The context is one token longer than what is computed, see `VllmGenerator`.
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(READY_LIMIT_S),
        # Before torch is imported: later vLLM's CPU worker forbids changing it, and all cores would spin.
        "OMP_NUM_THREADS": str(settings.threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if settings.engine.gpus:
        values["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in settings.engine.gpus)
    return values


def _arguments(settings: VllmSettings, on_cpu: bool) -> dict[str, Any]:
    engine = settings.engine
    memory = (
        {"kv_cache_memory_bytes": int(engine.kv_cache_gib * 2**30), "block_size": CPU_BLOCK_TOKENS}
        if on_cpu
        else {"gpu_memory_utilization": engine.gpu_memory_utilization}
    )
    return memory | {
        "model": settings.model_path,
        "dtype": settings.dtype,
        "seed": settings.seed,
        "max_model_len": settings.max_model_len,
        "max_logprobs": max(settings.max_topk, VLLM_MAX_LOGPROBS),
        "max_num_seqs": engine.max_num_seqs,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "enforce_eager": engine.enforce_eager,
        "enable_prefix_caching": True,
        # Log-probabilities of the distribution that was sampled from, that is after temperature.
        "logprobs_mode": "processed_logprobs",
        # No sampling defaults out of the model's folder: they would change the policy.
        "generation_config": "vllm",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": EXTENSION,
        "weight_transfer_config": {"backend": SHM_BACKEND},
        "additional_config": {
            SETTINGS_KEY: {
                "parent_pid": os.getpid(),
                "log_path": settings.log_path,
                "folder": settings.folder,
                "cpus": list(settings.cpus),
                "threads": settings.threads,
                "compile": not (on_cpu and engine.enforce_eager),
            }
        },
    }
