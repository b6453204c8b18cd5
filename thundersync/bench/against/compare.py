"""A step of TRL's GRPOTrainer beside one of ours: both measured on the same work, each time in a process of its own.

The model is the same folder, and the work is the same: the prompts, as many replies each, of exactly as many tokens,
one optimizer step of all weights (AdamW). TRL generates with transformers, because on CPUs its vLLM mode cannot bring
its weights to the engine. The arms take turns (A B B A); the first steps are left out. What is told was measured in
this run, and belongs to this machine and its load.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from thundersync.bench.processes import machine
from thundersync.bench.statistics import spread, turns_taken
from thundersync.errors import ThundersyncError
from thundersync.placement import QUIET_THREADS

ARM = Path(__file__).with_name("arm.py")
LIMIT_S = 3600.0
"""Of one process."""


class ArmFailed(ThundersyncError):
    """A process of the comparison ended without a measurement."""


def measure(arm: str, python: str, work: Mapping[str, Any]) -> dict[str, Any]:
    """One process of one arm. Raises: ArmFailed with its last words."""
    # TRL's environment has only TRL, so there the arm is a file; here it is a module, wherever the package lies.
    program = [str(ARM), arm] if arm == "trl" else ["-m", "thundersync.bench.against.arm", arm]
    try:
        ran = subprocess.run(
            [python, *program],
            input=json.dumps(work),
            capture_output=True,
            text=True,
            env=environment_of(arm, os.environ),
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ArmFailed(f"{arm} was not done after {LIMIT_S:.0f} s", remedy="Give both less work.") from error
    if ran.returncode:
        raise ArmFailed(
            f"{arm} ended with {ran.returncode}:\n{ran.stderr[-3000:]}", remedy=f"Mend that, or give {arm} less work."
        )
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def environment_of(arm: str, base: Mapping[str, str]) -> dict[str, str]:
    """TRL's as its users have it; ours with what a run gives its own processes."""
    ours = QUIET_THREADS if arm == "thundersync" else {}
    environment = {**ours, **base, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("OMP_NUM_THREADS", None)  # each arm says how many threads it wants
    return environment


def compare(
    pythons: Mapping[str, str], work: Mapping[str, Any], rounds: int, *, say: Callable[[str], None]
) -> dict[str, Any]:
    """Both arms, `rounds` times each; `pythons` are theirs. Raises: ArmFailed."""
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in pythons}
    load = []
    for order in turns_taken(list(pythons), rounds):
        for arm in order:
            load.append(os.getloadavg()[0])
            runs[arm].append(measure(arm, pythons[arm], work))
            steps = ", ".join(f"{seconds:.2f}" for seconds in runs[arm][-1]["step_s"])
            say(f"{arm}: {steps} s a step (load before: {load[-1]:.1f})")
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


def told(found: Mapping[str, Any]) -> list[str]:
    """The work, the machine, each arm's seconds and tokens, and what they come to, as lines."""
    work = found["work"]
    prompts = ", ".join(f"{tokens:.1f} ({arm})" for arm, tokens in found["prompt_tokens"].items())
    ratio = spread(found["ratios"])
    return [
        "",
        f"work     a step of {work['prompts']} prompts x {work['replies']} replies x {work['tokens']} tokens, "
        f"{work['name']} in {work['dtype']}, all weights trained; mean tokens of a prompt: {prompts}",
        f"machine  {found['machine']}; load before each process {min(found['load_before']):.1f} to "
        f"{max(found['load_before']):.1f}",
        *[_arm(found, arm) for arm in found["who"]],
        f"ratio    TRL takes {ratio.median:.2f} x as long a step (median over {len(ratio.values)} rounds of the ratio "
        f"of medians; {min(ratio.values):.2f} to {max(ratio.values):.2f})",
    ]


def _arm(found: Mapping[str, Any], arm: str) -> str:
    seconds, cpu = spread(found["step_s"][arm]), spread(found["cpu_s"][arm])
    return (
        f"{arm:<12} {seconds.median:.2f} s a step (median of {len(seconds.values)}; quartiles {seconds.low:.2f} to "
        f"{seconds.high:.2f}, all {min(seconds.values):.2f} to {max(seconds.values):.2f}), "
        f"{statistics.median(found['sampled_tokens'][arm]) / seconds.median:.0f} sampled tokens/s, "
        f"{cpu.median:.1f} processor seconds a step; {found['who'][arm]}"
    )


def _values(runs: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [value for run in runs for value in run[name]]
