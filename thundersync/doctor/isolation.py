"""Checks of what can hold an agent's commands: a Docker daemon, bubblewrap, user namespaces.

Asks them for real, each within a deadline; knows nothing of the sandboxes that are built on them.
"""

import contextlib
import os
import platform
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from thundersync.doctor.check import COMMAND_DEADLINE_S, Check, run

DOCKER_DEADLINE_S = 2.0


def check_docker(addresses: Sequence[str]) -> Check:
    """Ask the daemon at the first of `addresses` (`unix://` or `tcp://`) that answers."""
    remedy = "Install or start Docker Engine; without it, tools run in process sandboxes (bubblewrap)."
    reasons = []
    for address in addresses:
        try:
            version = ping_docker(address, deadline_s=DOCKER_DEADLINE_S)
        except PermissionError:
            reasons.append(f"{address}: permission denied")
            remedy = (
                "Let this user use Docker: add it to the group `docker` (sudo usermod -aG docker $USER), log in again."
            )
        except TimeoutError:
            reasons.append(f"{address}: no answer within {DOCKER_DEADLINE_S:.0f} s")
        except (OSError, ValueError) as error:
            reasons.append(f"{address}: {getattr(error, 'strerror', None) or error}")
        else:
            return Check(name="Docker", status="ok", found=f"answers at {address} (API {version})")
    return Check(name="Docker", status="warn", found="; ".join(reasons) or "no socket", remedy=remedy)


def docker_addresses(docker_host: str, home: Path) -> list[str]:
    """Where a daemon may listen: the given address alone, else the default sockets that exist."""
    if docker_host:
        return [docker_host]
    sockets = [Path("/run/docker.sock"), Path("/var/run/docker.sock"), home / ".docker/run/docker.sock"]
    sockets.append(Path(f"/run/user/{os.getuid()}/docker.sock"))
    there = list({path.resolve(): f"unix://{path}" for path in sockets if path.exists()}.values())
    return there or ["unix:///var/run/docker.sock"]


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


def check_bubblewrap(program: str = "bwrap") -> Check:
    """Start a real, empty sandbox: kernels, containers and AppArmor profiles may each forbid it."""
    install = "sudo apt-get install bubblewrap (or your system's package manager)"
    path = shutil.which(program)
    if path is None:
        return Check(name="bubblewrap", status="warn", found="not installed", remedy=f"Install it: {install}")
    binds = [part for folder in ("/usr", "/bin", "/lib", "/lib64") for part in ("--ro-bind-try", folder, folder)]
    command = [path, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", *binds]
    command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        return Check(name="bubblewrap", status="warn", found="its self-test hangs", remedy="Use Docker sandboxes.")
    if done.returncode == 0:
        version = (run([path, "--version"]) or "").replace("bubblewrap", "").strip()
        return Check(name="bubblewrap", status="ok", found=f"{version}; its self-test passed")
    reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    return Check(
        name="bubblewrap",
        status="warn",
        found=f"installed, but its self-test failed: {reason[0]}",
        remedy="Allow user namespaces (next line); inside a container that means a less strict seccomp profile.",
    )


def check_user_namespaces(proc_sys: Path = Path("/proc/sys")) -> Check:
    """Unprivileged sandboxes stand on them. Root needs none."""
    name = "user namespaces"
    if not proc_sys.is_dir():
        return Check(name=name, status="warn", found=f"{platform.system()} has none; process sandboxes need Linux")
    switches = [
        ("user/max_user_namespaces", "0", "user.max_user_namespaces=15000"),
        ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
    ]
    for file, forbids, allow in switches:
        with contextlib.suppress(OSError):
            if (proc_sys / file).read_text().strip() == forbids:
                found = f"switched off by {file.replace('/', '.')} = {forbids}"
                return Check(name=name, status="warn", found=found, remedy=f"sudo sysctl -w {allow}")
    return Check(name=name, status="ok", found="allowed")
