"""The one service of a Terminal-Bench docker-compose.yaml, as facts about a sandbox.

Refuses to know the task around it. What would change the agent's world and cannot be given (other services, devices,
privileges) is a fault; what only served the original runner (names, log volumes, ports, the idle command) is passed by.
"""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import yaml
from msgspec import Struct

_NAMES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_VALUES = {
    "T_BENCH_TEST_DIR": "/tests",
    "T_BENCH_CONTAINER_LOGS_PATH": "/logs",
    "T_BENCH_CONTAINER_AGENT_LOGS_PATH": "/agent-logs",
}
_VARIABLE = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)(?::?-([^}]*))?\}?")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)b?", re.IGNORECASE)
_MIB = {"": 1 / 1024 / 1024, "k": 1 / 1024, "m": 1.0, "g": 1024.0}
_IDLE = re.compile(
    r"(exec )?((/usr)?/bin/)?(sleep (infinity|inf|\d+[smhd]?)|tail -[fF] /dev/null|cat|(ba|da)?sh( -[il]+)*)"
    r"|while (true|:); ?do sleep \S+; ?done"
)
"""What keeps a container there; each of our own stays without."""
_IN_A_SHELL = re.compile(r"((/usr)?/bin/)?(ba|da)?sh -l?c (?P<script>.+)", re.DOTALL)
_PASSED_BY = {"build", "image", "container_name", "environment", "volumes", "deploy", "working_dir", "network_mode"}
_PASSED_BY |= {"ports", "expose", "init", "tty", "stdin_open", "restart", "stop_grace_period", "hostname", "platform"}
_PASSED_BY |= {"mem_limit", "cpus", "shm_size", "labels", "logging", "user", "command"}


class Service(Struct, frozen=True, kw_only=True):
    """In the units of `core.types.Task`; a folder without a compose file has all defaults."""

    image: str = ""
    """Empty: built from the Dockerfile."""
    workdir: str = ""
    env: dict[str, str] = {}
    cpus: float = 1.0
    memory_mib: int = 2048
    network: bool = True


def read_compose(folder: Path, faults: list[str]) -> Service:
    """The service, and into `faults` all of it that cannot be given."""
    path = next((folder / name for name in _NAMES if (folder / name).is_file()), None)
    if path is None:
        return Service()
    wrong: list[str] = []
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        services = dict(data["services"])
        (service,) = services.values() if len(services) == 1 else ({},)
        if len(services) != 1:
            wrong.append(f"asks for what cannot be run yet: {len(services)} services ({', '.join(services)})")
        found = _service(dict(service), wrong)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        wrong.append(f"cannot be read: {error}")
        found = Service()
    faults += [f"{path.name} {each}" for each in wrong]
    return found


def _service(service: Mapping[str, object], wrong: list[str]) -> Service:
    wrong += [f"asks for what cannot be run yet: {key}" for key in service if key not in _PASSED_BY]
    build = service.get("build")
    if isinstance(build, Mapping):
        wrong += [f"builds with {key}, which is not supported" for key in build if key not in ("context", "dockerfile")]
        if str(build.get("context", ".")).rstrip("/") not in ("", "."):
            wrong.append(f"builds in another folder ({build['context']})")
        if str(build.get("dockerfile", "Dockerfile")).removeprefix("./") != "Dockerfile":
            wrong.append(f"builds from another file ({build['dockerfile']})")
    if str(service.get("user", "root")) not in ("root", "0", "0:0", "root:root"):
        wrong.append(f"asks for what cannot be run yet: user {service['user']}")
    if (command := _command(service.get("command"))) and not _IDLE.fullmatch(command):
        wrong.append(f"asks for what cannot be run yet: the command `{command}`, which does more than to wait")
    volumes = service.get("volumes") or []
    wrong += [f"mounts {each}" for each in volumes if not str(each).startswith("${T_BENCH_")]  # type: ignore[attr-defined]
    cpus, memory = _limits(service)
    return Service(
        image="" if build is not None else _filled(str(service.get("image", ""))),
        workdir=str(service.get("working_dir", "")),
        env=_environment(service.get("environment")),
        cpus=cpus,
        memory_mib=_mib(memory, wrong),
        network=service.get("network_mode") != "none",
    )


def _command(found: object) -> str:
    """A service's command as one line, without the shell around it."""
    words = [str(word) for word in found] if isinstance(found, list) else shlex.split(str(found or ""))
    line = " ".join(words).strip().removesuffix(";")
    shell = _IN_A_SHELL.fullmatch(line)
    return shell["script"].strip() if shell else line


def _limits(service: Mapping[str, object]) -> tuple[float, str]:
    limits: object = service.get("deploy") or {}
    for key in ("resources", "limits"):
        limits = limits.get(key) or {} if isinstance(limits, Mapping) else {}
    assert isinstance(limits, Mapping)
    cpus = limits.get("cpus", service.get("cpus", 1.0))
    return float(_filled(str(cpus)) or 1.0), _filled(str(limits.get("memory", service.get("mem_limit", "2g"))))


def _mib(text: str, wrong: list[str]) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        wrong.append(f"has a memory limit that is no size: {text!r}")
        return 2048
    return max(1, round(float(match[1]) * _MIB[match[2].lower()]))


def _environment(found: object) -> dict[str, str]:
    if isinstance(found, Mapping):
        pairs = [(str(key), "" if value is None else str(value)) for key, value in found.items()]
    else:
        pairs = [(key, value) for key, _, value in (str(line).partition("=") for line in found or [])]  # type: ignore[attr-defined]
    return {key: _filled(value) for key, value in pairs}


def _filled(text: str) -> str:
    return _VARIABLE.sub(lambda match: _VALUES.get(match[1], match[2] or ""), text)
