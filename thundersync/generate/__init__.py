"""Generation engines: exact token ids in, sampled ids and logprobs out, weights by shared memory.

`make_generator` picks between two that pass the same contract tests: vLLM, and plain transformers for machines
where vLLM has no wheel. Importing this package imports neither.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from thundersync.config import EngineConfig
from thundersync.errors import EngineFailed
from thundersync.generate.base import Generator

Backend = Literal["vllm", "transformers"]


def choose_backend(wanted: Literal["auto", "vllm", "transformers"]) -> Backend:
    """The backend a run will use: what is asked for, and under `auto` vLLM where it is installed.

    Raises: EngineFailed when the one asked for is not installed.
    """
    # Only looked for: importing vLLM takes seconds and belongs to the start of an engine.
    has_vllm = importlib.util.find_spec("vllm") is not None
    if wanted == "vllm" and not has_vllm:
        raise EngineFailed(
            'engine.backend is "vllm", but vLLM is not installed',
            remedy='pip install "thundersync[cpu]" (or [gpu]), or set engine.backend = "auto".',
        )
    return "transformers" if wanted == "transformers" or not has_vllm else "vllm"


def make_generator(
    model_path: Path,
    *,
    config: EngineConfig,
    max_model_len: int,
    dtype: str,
    log_path: Path,
    cpus: Sequence[int] = (),
    seed: int = 0,
    max_topk: int = 0,
) -> Generator:
    """One engine replica, not yet started, on the model folder `model_path`.

    `max_model_len` counts prompt and reply tokens; `dtype` is float32 or bfloat16; `cpus` pins the engine to cores.
    `max_topk` is the most alternatives per token that `score` may be asked for.
    Raises: EngineFailed when the backend is not installed.
    """
    if choose_backend(config.backend) == "vllm":
        from thundersync.generate.vllm import VllmGenerator

        return VllmGenerator(
            model_path,
            config=config,
            max_model_len=max_model_len,
            dtype=dtype,
            log_path=log_path,
            cpus=cpus,
            seed=seed,
            max_topk=max_topk,
        )
    from thundersync.generate.transformers import TransformersGenerator

    return TransformersGenerator(
        model_path, config=config, max_model_len=max_model_len, dtype=dtype, log_path=log_path, cpus=cpus, seed=seed
    )
