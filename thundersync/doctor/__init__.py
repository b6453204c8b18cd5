"""What this machine has for a run, and what to do about what it lacks: the `doctor` command's knowledge.

Stands before everything else and changes nothing: no model is loaded, torch and vLLM are not imported, each probe has
a deadline. Knows nothing of a run's configuration.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import platformdirs
from rich.markup import escape
from rich.table import Table

from sandboxes import DockerRuntime, ProcessRuntime, Runtime
from sandboxes.base import isolation_of
from thundersync.doctor.check import Check, State
from thundersync.doctor.isolation import (
    DEFAULT_DOCKER_HOST,
    check_bubblewrap,
    check_docker,
    check_user_namespaces,
    limits_remedy,
)
from thundersync.doctor.machine import (
    check_cores,
    check_disk,
    check_memory,
    check_open_files,
    check_python,
    check_shared_memory,
)
from thundersync.doctor.packages import check_gpu, check_starter_model, check_torch, check_vllm

RUNTIMES: Mapping[str, Callable[[], Runtime]] = {"Docker": DockerRuntime, "bubblewrap": ProcessRuntime}
"""What a check of this name stands for, in the order in which a run takes them."""

__all__ = ["Check", "State", "checks", "render", "worst"]


def checks(*, output_dir: Path = Path("runs"), model_cache: Path | None = None, docker_host: str = "") -> list[Check]:
    """Every check, in the order a person reads them; takes a few seconds at most, and never raises.

    `output_dir` is where runs would be written, `model_cache` the folder of unpacked models (default: the user's cache
    folder), `docker_host` an address as in DOCKER_HOST (empty: the default socket).
    """
    model_cache = model_cache or Path(platformdirs.user_cache_dir("thundersync")) / "models"
    rootless = [Path(f"/run/user/{os.getuid()}/docker.sock"), Path.home() / ".docker/run/docker.sock"]
    probes: list[tuple[str, Callable[[], Check]]] = [
        ("Python", check_python),
        ("torch", check_torch),
        ("vLLM", check_vllm),
        ("GPU", check_gpu),
        ("Docker", lambda: check_docker(docker_host or DEFAULT_DOCKER_HOST, rootless)),
        ("bubblewrap", check_bubblewrap),
        ("user namespaces", check_user_namespaces),
        ("cores", check_cores),
        ("memory", check_memory),
        ("shared memory", lambda: check_shared_memory(Path("/dev/shm"))),
        ("disk", lambda: check_disk(output_dir)),
        ("open files", check_open_files),
        ("starter model", lambda: check_starter_model(model_cache)),
    ]
    with ThreadPoolExecutor(max_workers=len(probes)) as pool:
        found = list(pool.map(lambda probe: guarded(*probe), probes))
    return with_isolation(with_any_sandbox(found))


def worst(found: Sequence[Check]) -> State:
    """`fail` if anything fails, else `warn` if anything warns, else `ok`."""
    order: list[State] = ["ok", "warn", "fail"]
    return max((check.state for check in found), key=order.index, default="ok")


def render(found: Sequence[Check]) -> Table:
    """A table for `rich.print`; remedies stand below what they mend."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    marks = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[bold red]fail[/]"}
    for check in found:
        table.add_row(marks[check.state], check.name, escape(check.found))
        if check.remedy:
            table.add_row("", "", f"[dim]->[/] {escape(check.remedy)}")
    return table


def guarded(name: str, probe: Callable[[], Check]) -> Check:
    """A probe that breaks is a finding too: the other checks must still be shown."""
    try:
        return probe()
    except Exception as error:
        return Check(name=name, state="warn", found=f"could not be checked: {type(error).__name__}: {error}")


def with_isolation(found: Sequence[Check]) -> list[Check]:
    """What stands between tools and the machine in a run with `sandbox.runtime = "auto"`, in the run's own words."""
    told = list(found)
    working = [check.name for check in found if check.state == "ok" and check.name in RUNTIMES]
    if working:
        after = max(at for at, check in enumerate(found) if check.name in (*RUNTIMES, "user namespaces"))
        runtime = RUNTIMES[working[0]]()
        remedy = limits_remedy() if runtime.name == "process" else ""
        told.insert(after + 1, Check(name="isolation", state="ok", found=isolation_of(runtime), remedy=remedy))
    return told


def with_any_sandbox(found: Sequence[Check]) -> list[Check]:
    """Docker and bubblewrap are each dispensable, but not both: then no tool can run."""
    working = [check.state for check in found if check.name in ("Docker", "bubblewrap")]
    if any(status == "ok" for status in working):
        return list(found)
    return [
        Check(name=check.name, state="fail", found=check.found, remedy=check.remedy)
        if check.name in ("Docker", "bubblewrap")
        else check
        for check in found
    ]
