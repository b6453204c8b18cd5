"""Sandboxes: file trees in which commands run with limits. Stands alone; knows nothing of tasks or training.

`choose` gives a `Runtime`, a runtime starts sandboxes, and a sandbox runs commands and moves files.
"""

from collections.abc import Callable, Mapping
from typing import Literal

from sandboxes.base import Command, Origin, Result, Runtime, Sandbox, SandboxSpec
from sandboxes.docker import DockerRuntime
from sandboxes.errors import (
    BuildFailed,
    CloseFailed,
    DaemonGone,
    DiskFull,
    FileMissing,
    FileRefused,
    FileTooLarge,
    ImageMissing,
    RuntimeUnavailable,
    SandboxError,
    SandboxGone,
    StartFailed,
)
from sandboxes.latency import Latency
from sandboxes.pool import Pool, PoolState
from sandboxes.process import BOX_MIB, ProcessRuntime
from sandboxes.shell import ShellSession
from sandboxes.terminal import Terminal

__all__ = [
    "BOX_MIB",
    "BuildFailed",
    "CloseFailed",
    "Command",
    "DaemonGone",
    "DiskFull",
    "DockerRuntime",
    "FileMissing",
    "FileRefused",
    "FileTooLarge",
    "ImageMissing",
    "Latency",
    "Origin",
    "Pool",
    "PoolState",
    "ProcessRuntime",
    "Result",
    "Runtime",
    "RuntimeUnavailable",
    "Sandbox",
    "SandboxError",
    "SandboxGone",
    "SandboxSpec",
    "ShellSession",
    "StartFailed",
    "Terminal",
    "choose",
]


async def choose(
    kind: Literal["auto", "docker", "process"],
    *,
    docker_host: str = "",
    labels: Mapping[str, str] | None = None,
    images_bytes: int = 0,
    box_mib: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Runtime:
    """A checked runtime of this kind. `auto`: Docker if it answers, else boxes if they work, else an error.

    `images_bytes` (disk for images that are built, 0 = no limit) and `say` (progress, and limits that the daemon cannot
    keep) are Docker's; `box_mib` is the process runtime's.
    The caller closes it. Raises: RuntimeUnavailable with every reason and remedy; never anything weaker instead.
    """
    candidates: list[Runtime] = []
    if kind in ("auto", "docker"):
        candidates.append(DockerRuntime(docker_host, labels=labels, images_bytes=images_bytes, say=say))
    if kind in ("auto", "process"):
        candidates.append(ProcessRuntime(box_mib=box_mib))
    reasons: list[RuntimeUnavailable] = []
    for runtime in candidates:
        try:
            await runtime.check()
        except RuntimeUnavailable as error:
            await runtime.close()
            reasons.append(error)
        except BaseException:
            await runtime.close()
            raise
        else:
            return runtime
    if len(reasons) == 1:
        raise reasons[0]
    raise RuntimeUnavailable(
        "no sandbox runs here: " + "; ".join(error.message for error in reasons),
        remedy=" Or: ".join(error.remedy for error in reasons),
    )
