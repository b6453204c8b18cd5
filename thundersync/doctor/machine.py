"""Checks of the machine itself: Python, cores, memory, disk, limits. Standard library and psutil only."""

import contextlib
import os
import platform
import resource
import shutil
import sys
from pathlib import Path

import psutil

from thundersync.doctor.check import GIB, Check

# The starter model's engine and trainer together stay below this on a CPU, with room for the tools' own processes.
MEMORY_GIB = 6.0
DISK_GIB = 5.0
SHM_GIB = 1.0
OPEN_FILES = 4096


def check_python() -> Check:
    running = platform.python_version()
    found = f"{running} ({sys.executable})"
    if (3, 11) <= sys.version_info[:2] <= (3, 14):
        return Check(name="Python", state="ok", found=found)
    return Check(name="Python", state="fail", found=found, remedy="thundersync and vLLM need Python 3.11 to 3.14.")


def check_cores() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores >= 2:
        return Check(name="cores", state="ok", found=f"{cores} usable")
    remedy = "Engine and trainer will share one core, so nothing overlaps; the results stay the same."
    return Check(name="cores", state="warn", found="1 usable", remedy=remedy)


def check_memory() -> Check:
    """Physical memory, or the container's limit where that is smaller."""
    total = psutil.virtual_memory().total
    limits = [total]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(Path(file).read_text()))
    usable = min(limits) / GIB
    free = min(psutil.virtual_memory().available / GIB, usable)
    found = f"{free:.1f} of {usable:.1f} GiB free"
    if free >= MEMORY_GIB:
        return Check(name="memory", state="ok", found=found)
    remedy = f"The quickstart wants about {MEMORY_GIB:.0f} GiB; close something, or lower engine.kv_cache_gib."
    return Check(name="memory", state="warn", found=found, remedy=remedy)


def check_shared_memory(folder: Path) -> Check:
    """Weights travel from the trainer to the engines through it."""
    if not folder.is_dir():
        return Check(name="shared memory", state="warn", found=f"{folder} is missing", remedy="Mount a tmpfs there.")
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free in {folder}"
    if usage.free >= SHM_GIB * GIB:
        return Check(name="shared memory", state="ok", found=found)
    remedy = "In a Docker container, start it with --shm-size=8g; elsewhere: sudo mount -o remount,size=8g /dev/shm"
    return Check(name="shared memory", state="warn", found=found, remedy=remedy)


def check_disk(output_dir: Path) -> Check:
    """Free space where runs are written; the folder need not exist yet."""
    folder = output_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / GIB
    found = f"{free:.1f} GiB free for {output_dir}"
    if not os.access(folder, os.W_OK):
        remedy = "Set output_dir to a folder that this user can write."
        return Check(name="disk", state="fail", found=f"{folder} is not writable", remedy=remedy)
    if free >= DISK_GIB:
        return Check(name="disk", state="ok", found=found)
    remedy = "Checkpoints and rollouts need room: free some, lower ckpt.keep_last, or set output_dir to another disk."
    return Check(name="disk", state="fail" if free < 1.0 else "warn", found=found, remedy=remedy)


def check_open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = "no limit" if soft == resource.RLIM_INFINITY else f"limit {soft}"
    if soft == resource.RLIM_INFINITY or soft >= OPEN_FILES:
        return Check(name="open files", state="ok", found=found)
    reachable = hard == resource.RLIM_INFINITY or hard >= OPEN_FILES
    remedy = f"ulimit -n {OPEN_FILES}" if reachable else f"Raise the hard limit ({hard}) in /etc/security/limits.conf."
    return Check(name="open files", state="warn", found=found, remedy=f"For many sandboxes at once: {remedy}")
