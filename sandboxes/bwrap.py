"""The command line of one bubblewrap box, and whether this machine can run it. Starts nothing itself.

A box sees the host's programs (/usr, read-only) and nothing else of it: its root is a sized tmpfs of its own that ends
with it, so a box has a disk limit and leaves no file behind, however it or its owner ends.
"""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from sandboxes.errors import RuntimeUnavailable

HOST_UID = 65534
"""Who boxes run as when we are root: nobody."""
BOX_UID = 1000
INSTALL = "Install bubblewrap 0.8 or newer (Debian and Ubuntu: apt install bubblewrap), or use Docker."
BOX_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LAUNCH_ENV = {"PATH": BOX_PATH, "LANG": "C.UTF-8"}
"""Everything the launcher gets: a box could read more of our environment from its process list."""

# Host files that programs need and that hold no secret. Never /, /run, /root, /home or /var: a socket of a daemon is
# reachable through a read-only bind, and as root so is every file.
_HOST_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/etc/ssl/certs", "/etc/terminfo")


def box_argv(
    command: list[str],
    *,
    python_prefix: str,
    disk_bytes: int,
    shown: Mapping[str, str] = MappingProxyType({}),
    filter_fds: Sequence[int] = (),
) -> list[str]:
    """`command` as process 1 of a new box: own user, process, network, IPC and mount namespaces, no capability.

    `python_prefix` is bound too where it is not below /usr, and so are the files `shown`, by their path inside; all
    read-only. `filter_fds`: what the filter of system calls is read from, if there is one. Raises: RuntimeUnavailable.
    """
    bwrap = _program("bwrap")
    argv = []
    if os.geteuid() == 0:
        nobody = ["--reuid", str(HOST_UID), "--regid", str(HOST_UID), "--clear-groups"]
        argv = [_program("setpriv"), *nobody, "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
    argv += [bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"]
    argv += ["--as-pid-1", "--cap-drop", "ALL", "--uid", str(BOX_UID), "--gid", str(BOX_UID), "--hostname", "sandbox"]
    argv += ["--perms", "0755", "--size", str(disk_bytes), "--tmpfs", "/", "--ro-bind", "/usr", "/usr"]
    for top in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        path = Path(top)
        if path.is_symlink():
            argv += ["--symlink", str(path.readlink()), top]
        elif path.is_dir():
            argv += ["--ro-bind", top, top]
    for file in _HOST_FILES:
        argv += ["--ro-bind-try", file, file]
    if python_prefix and not Path(python_prefix).is_relative_to("/usr"):
        argv += ["--ro-bind", python_prefix, python_prefix]
    shared = str(min(64 << 20, disk_bytes // 4))
    argv += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", shared, "--tmpfs", "/dev/shm"]
    argv += ["--remount-ro", "/dev", "--chdir", "/", "--clearenv"]
    for inside, file in shown.items():
        argv += ["--ro-bind", file, inside]
    for fd in filter_fds:
        argv += ["--seccomp", str(fd)]
    return [*argv, *command]


def find_python() -> tuple[str, str]:
    """A Python that a box can run: (program, prefix to bind or ""). Raises: RuntimeUnavailable."""
    for common in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if os.access(common, os.X_OK) and Path(common).resolve().is_relative_to("/usr"):
            return common, ""
    prefix = Path(sys.base_prefix).resolve()
    program = prefix / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    # As root we start boxes as nobody, who must be able to walk there.
    closed = [p for p in (prefix, *prefix.parents) if os.geteuid() == 0 and not p.stat().st_mode & 0o001]
    if program.exists() and not closed:
        return str(program), str(prefix)
    raise RuntimeUnavailable(
        f"process sandboxes need a Python that every user can run, and there is none ({prefix} is private)",
        remedy="Install python3 for the whole machine (Debian and Ubuntu: apt install python3), or use Docker.",
    )


def _program(name: str) -> str:
    found = shutil.which(name, path=BOX_PATH)
    if found is None:
        raise RuntimeUnavailable(f"process sandboxes need {name}, which is not installed", remedy=INSTALL)
    return found
