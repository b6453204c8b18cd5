"""Checks of what can hold an agent's commands: a Docker daemon, bubblewrap, user namespaces.

Asks them for real, each within a deadline, and in the way that `sandboxes` will use them.
"""

import contextlib
import platform
import re
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sandboxes.bwrap import LAUNCH_ENV, box_argv
from sandboxes.cgroups import Cgroups
from sandboxes.controllers import CONTROLLERS
from sandboxes.errors import RuntimeUnavailable
from sandboxes.seccomp import filter_fds
from thundersync.doctor.check import COMMAND_DEADLINE_S, Check

DEFAULT_DOCKER_HOST = "unix:///var/run/docker.sock"
DOCKER_DEADLINE_S = 2.0


def check_docker(docker_host: str, other_sockets: Sequence[Path]) -> Check:
    """Ask the daemon at `docker_host`, where a run would look for it; `other_sockets` are only worth a hint."""
    remedy = "Install or start Docker Engine; without it, tools run in process sandboxes (bubblewrap)."
    elsewhere = [path for path in other_sockets if path.is_socket()]
    if elsewhere:
        remedy = f"There is a socket at {elsewhere[0]}: set DOCKER_HOST=unix://{elsewhere[0]}"
    try:
        version = ping_docker(docker_host, deadline_s=DOCKER_DEADLINE_S)
    except PermissionError:
        reason = "permission denied"
        remedy = "Let this user use Docker: sudo usermod -aG docker $USER, then log in again."
    except TimeoutError:
        reason = f"no answer within {DOCKER_DEADLINE_S:.0f} s"
    except (OSError, ValueError) as error:
        reason = str(getattr(error, "strerror", None) or error)
    else:
        return Check(name="Docker", state="ok", found=f"answers at {docker_host} (API {version})")
    return Check(name="Docker", state="warn", found=f"{docker_host}: {reason}", remedy=remedy)


def ping_docker(address: str, *, deadline_s: float) -> str:
    """The daemon's API version. Raises OSError (TimeoutError after `deadline_s`) or ValueError for a foreign answer."""
    ends_at = time.monotonic() + deadline_s
    kind, _, rest = address.partition("://")
    if kind == "unix":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        target: str | tuple[str, int] = rest
    elif kind in ("tcp", "http"):
        host, _, port = rest.rstrip("/").rpartition(":")
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        target = (host, int(port))
    else:
        raise ValueError("only unix:// and tcp:// addresses can be asked")
    answer = b""
    with contextlib.closing(connection):
        connection.settimeout(deadline_s)
        connection.connect(target)
        connection.sendall(b"GET /_ping HTTP/1.1\r\nHost: docker\r\nConnection: close\r\n\r\n")
        while b"\r\n\r\n" not in answer and len(answer) < 65536:
            connection.settimeout(max(0.001, ends_at - time.monotonic()))
            part = connection.recv(4096)
            if not part:
                break
            answer += part
    version = re.search(rb"(?im)^api-version:\s*(\S+)", answer)
    if not answer.startswith(b"HTTP/1.") or b" 200 " not in answer.split(b"\r\n", 1)[0] or version is None:
        raise ValueError("something answers, but it is no Docker daemon")
    return version[1].decode()


def check_bubblewrap() -> Check:
    """Start a real, empty process sandbox: kernels, containers and AppArmor profiles may each forbid it."""
    with filter_fds() as fds:
        try:
            command = box_argv(["true"], python_prefix="", disk_bytes=1 << 20, filter_fds=fds)
        except RuntimeUnavailable as error:
            return Check(name="bubblewrap", state="warn", found=error.message, remedy=error.remedy)
        return self_test(command, fds)


def self_test(command: Sequence[str], fds: Sequence[int] = ()) -> Check:
    """Whether `command`, a sandbox around nothing that inherits `fds`, ends well and in time."""
    settings: dict[str, Any] = {"env": LAUNCH_ENV, "pass_fds": fds, "timeout": COMMAND_DEADLINE_S}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, **settings)
    except subprocess.TimeoutExpired:
        return Check(name="bubblewrap", state="warn", found="its self-test hangs", remedy="Use Docker sandboxes.")
    if done.returncode == 0:
        return Check(name="bubblewrap", state="ok", found="a process sandbox starts and ends")
    reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    return Check(
        name="bubblewrap",
        state="warn",
        found=f"installed, but a process sandbox does not start: {reason[0]}",
        remedy="bubblewrap 0.8 or newer and user namespaces (next line) are needed; a container must permit them.",
    )


def limits_remedy() -> str:
    """What gives process sandboxes the limits as a whole that they have not; empty where they have all."""
    if Cgroups.find().limited.issuperset(CONTROLLERS):
        return ""
    accounts = "-p MemoryAccounting=yes -p TasksAccounting=yes -p CPUAccounting=yes"
    return f"All limits per box take control groups that are ours: as root, or in systemd-run --user --scope {accounts}"


def check_user_namespaces(proc_sys: Path = Path("/proc/sys")) -> Check:
    """Unprivileged sandboxes stand on them. Root needs none."""
    name = "user namespaces"
    if not proc_sys.is_dir():
        return Check(name=name, state="warn", found=f"{platform.system()} has none; process sandboxes need Linux")
    switches = [
        ("user/max_user_namespaces", "0", "user.max_user_namespaces=15000"),
        ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
    ]
    for file, forbids, allow in switches:
        with contextlib.suppress(OSError):
            if (proc_sys / file).read_text().strip() == forbids:
                found = f"switched off by {file.replace('/', '.')} = {forbids}"
                return Check(name=name, state="warn", found=found, remedy=f"sudo sysctl -w {allow}")
    return Check(name=name, state="ok", found="allowed")
