"""`python -m thundersync bench --against trl`: the work from a configuration, a Python that has TRL, and what it found.

TRL needs an environment of its own, for its versions are not ours; it is found, never made.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from thundersync.bench.against.compare import compare, told
from thundersync.bench.report import write
from thundersync.config import BenchConfig, Config
from thundersync.errors import ConfigError
from thundersync.models import resolve_model
from thundersync.placement import cpu_flags, place, usable_cores

WORK = Path(__file__).with_name("work.toml")
"""What is worked without a configuration."""
ENVIRONMENT = ".venv-trl"
HAS_TRL = "import importlib.util as u, sys; sys.exit(not (u.find_spec('trl') and u.find_spec('datasets')))"
HOW = f"""Make an environment for it, once, and name its Python:
  python -m venv {ENVIRONMENT}
  {ENVIRONMENT}/bin/pip install trl datasets torch    # on a CPU: torch from PyTorch's index of CPU builds
  python -m thundersync bench --against trl --trl-python {ENVIRONMENT}/bin/python
Without --trl-python this Python is tried, and then {ENVIRONMENT}/bin/python. Where the same torch and transformers are
wanted, put a .pth file with the path of this environment's site-packages into the other's, and install TRL there with
--no-deps."""


def bench_against(config: Config, *, trl_python: Path | None, json_file: Path | None, console: Console) -> int:
    """Measure TRL's step and ours on `config`'s work, on the CPUs of this machine; returns the exit code.

    Raises: ConfigError, ArmFailed.
    """
    named = [trl_python] if trl_python is not None else [Path(sys.executable), Path(ENVIRONMENT) / "bin" / "python"]
    python = find_trl(named)
    work = work_of(config, say=lambda text: console.print(text, markup=False, highlight=False))
    bench = config.bench or BenchConfig()

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    found = compare({"trl": str(python), "thundersync": sys.executable}, work, bench.repeats, say=say)
    for line in told(found):
        say(line)
    if json_file is not None:
        write(json_file, json.dumps(found, indent=1).encode() + b"\n", "--json")
    return 0


def find_trl(pythons: Sequence[Path]) -> Path:
    """The first of them that can import TRL and its data sets. Raises: ConfigError that says how to make one."""
    for python in pythons:
        try:
            if subprocess.run([python, "-c", HAS_TRL], capture_output=True, check=False).returncode == 0:
                return python
        except OSError:
            continue  # there is none of this name
    raise ConfigError(f"{' and '.join(map(str, pythons))}: no Python that has trl and datasets", remedy=HOW)


def work_of(config: Config, *, say: Any = print) -> dict[str, Any]:
    """What both trainers are told. Raises: ConfigError for what they would not do alike."""
    algo, bench = config.algo, config.bench or BenchConfig()
    if algo.type != "grpo" or config.model.lora is not None or algo.kl_coef or algo.group_size < 2:
        raise ConfigError(
            "against TRL all weights learn by plain GRPO, from groups of two or more",
            remedy='Leave [model.lora] and algo.kl_coef out, with algo.type = "grpo" and algo.group_size = 2 or more.',
        )
    dtype = place(config, cores=usable_cores(), gpus=[], cpu_flags=cpu_flags()).dtype
    return {
        "name": config.model.name,
        "model": str(resolve_model(config.model.name, say=say)),
        "dtype": dtype,
        "prompts": algo.prompts_per_step,
        "replies": algo.group_size,
        "tokens": config.rollout.max_tokens,
        "max_model_len": config.rollout.max_tokens + 128,
        "steps": bench.steps,
        "warmup": bench.warmup,
    }
