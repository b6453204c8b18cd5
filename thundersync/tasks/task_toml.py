"""The tables of a Harbor `task.toml`: read, checked, and turned into plain facts about one task.

Between the file and `harbor.py`, which knows the folder around it. Refuses to know the folder, the sandbox and the
agent. Unknown keys are tolerated, as the format asks; a key whose meaning we cannot keep is told as a fault.
"""

import re
import tomllib
from collections.abc import Mapping
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct

from thundersync.core.types import HealthCheck

NetworkMode = Literal["public", "no-network", "allowlist"]
TableT = TypeVar("TableT", bound=Struct)

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)
_UNIT_MIB = {"": 1 / 1024 / 1024, "k": 1 / 1024, "m": 1.0, "g": 1024.0, "t": 1024.0 * 1024.0}
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


class AgentTable(Struct, frozen=True, kw_only=True):
    timeout_sec: float | None = None
    user: str | int | None = None
    network_mode: NetworkMode | None = None


class VerifierTable(Struct, frozen=True, kw_only=True):
    timeout_sec: float = 600.0
    env: dict[str, str] = {}
    user: str | int | None = None
    network_mode: NetworkMode | None = None
    environment_mode: str = "shared"


class EnvironmentTable(Struct, frozen=True, kw_only=True):
    """Sizes come in two ages: `memory_mb = 2048`, or `memory = "2G"`; so do `storage` and the network."""

    build_timeout_sec: float = 600.0
    docker_image: str = ""
    os: str = "linux"
    cpus: float = 1.0
    memory_mb: float | None = None
    memory: str | float | None = None
    storage_mb: float | None = None
    storage: str | float | None = None
    gpus: int = 0
    env: dict[str, str] = {}
    workdir: str = ""
    network_mode: NetworkMode | None = None
    allow_internet: bool | None = None
    mcp_servers: list[object] = []
    healthcheck: dict[str, object] | None = None


class SolutionTable(Struct, frozen=True, kw_only=True):
    env: dict[str, str] = {}


class StageVerifierTable(Struct, frozen=True, kw_only=True):
    timeout_sec: float | None = None
    """None: the task's own."""
    env: dict[str, str] = {}
    user: str | int | None = None
    network_mode: NetworkMode | None = None
    environment_mode: str = "shared"


class HealthCheckTable(Struct, frozen=True, kw_only=True):
    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3


class StageTable(Struct, frozen=True, kw_only=True):
    """One of [[steps]]. What it collects (`artifacts`) is for viewers of Harbor's."""

    name: str
    agent: AgentTable = AgentTable()
    verifier: StageVerifierTable = StageVerifierTable()
    min_reward: float | dict[str, float] | None = None
    healthcheck: HealthCheckTable | None = None


class StageToml(Struct, frozen=True, kw_only=True):
    """What a task.toml says of one stage."""

    name: str
    agent_timeout_s: float | None
    checker_timeout_s: float
    checker_env: dict[str, str]
    min_reward: float | dict[str, float] | None
    healthcheck: HealthCheck | None


class TaskToml(Struct, frozen=True, kw_only=True):
    """What a task.toml says, in the units of `core.types.Task`."""

    agent_timeout_s: float | None
    checker_timeout_s: float
    build_timeout_s: float
    checker_env: dict[str, str]
    solution_env: dict[str, str]
    env: dict[str, str]
    docker_image: str
    workdir: str
    """Empty: the image's own."""
    cpus: float
    memory_mib: int
    disk_mib: int
    """0: it does not say."""
    network: bool
    stages: list[StageToml] = []
    stage_rewards: Literal["mean", "final"] = "mean"


def parse_task_toml(text: str, *, variables: Mapping[str, str]) -> tuple[TaskToml | None, list[str]]:
    """Read `text`; answer its facts and every fault found. With faults there may still be facts, not to be used.

    `variables` fills `${NAME}` and `${NAME:-default}` in the env tables. Nothing is raised: a fault is a sentence
    without a subject, for the caller to put the file's name before it.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return None, [f"is not valid TOML: {error}"]
    faults: list[str] = []
    agent = _table(data, "agent", AgentTable, faults)
    verifier = _table(data, "verifier", VerifierTable, faults)
    environment = _table(data, "environment", EnvironmentTable, faults)
    solution = _table(data, "solution", SolutionTable, faults)
    version = str(data.get("schema_version", data.get("version", "1.4")))
    if version.split(".")[0] != "1":
        faults.append(f"has schema version {version!r}; versions 1.x are understood")
    faults += _not_run_yet(agent, verifier, environment)
    checker_env = _filled(verifier.env, "verifier.env", variables, faults)
    stages = _stages(data, agent, verifier, environment, checker_env, variables, faults)
    strategy = data.get("multi_step_reward_strategy", "mean")
    if strategy not in ("mean", "final"):
        faults.append(f"has multi_step_reward_strategy = {strategy!r}; it is mean or final")
    return (
        TaskToml(
            agent_timeout_s=agent.timeout_sec,
            checker_timeout_s=verifier.timeout_sec,
            build_timeout_s=environment.build_timeout_sec,
            checker_env=checker_env,
            # A variable that is not here (often a key of a model's) is missed by the solution, not by the task.
            solution_env=_filled(solution.env, "solution.env", variables, []),
            env=_filled(environment.env, "environment.env", variables, faults),
            docker_image=environment.docker_image,
            workdir=environment.workdir,
            cpus=environment.cpus,
            memory_mib=_mib("memory", environment.memory_mb, environment.memory, faults) or 2048,
            disk_mib=_mib("storage", environment.storage_mb, environment.storage, faults),
            network=_network(agent, environment),
            stages=stages,
            stage_rewards="final" if strategy == "final" else "mean",
        ),
        faults,
    )


def _stages(
    data: Mapping[str, object],
    agent: AgentTable,
    verifier: VerifierTable,
    environment: EnvironmentTable,
    checker_env: Mapping[str, str],
    variables: Mapping[str, str],
    faults: list[str],
) -> list[StageToml]:
    """What a stage leaves out is as the task has it."""
    try:
        tables = msgspec.convert(data.get("steps", []), list[StageTable])
    except msgspec.ValidationError as error:
        faults.append(f"[[steps]] {str(error).replace('$', 'steps')}")
        return []
    stages = []
    for table in tables:
        its = msgspec.structs.replace(
            verifier,
            user=table.verifier.user if table.verifier.user is not None else verifier.user,
            network_mode=table.verifier.network_mode or verifier.network_mode,
            environment_mode=table.verifier.environment_mode,
        )
        if table.agent.network_mode not in (None, agent.network_mode):
            faults.append(f"[[steps]] {table.name} asks for what cannot be run yet: a network of its own")
        faults += [f"[[steps]] {table.name} {fault}" for fault in _not_run_yet(table.agent, its, environment)]
        own = _filled(table.verifier.env, f"steps.{table.name}.verifier.env", variables, faults)
        check = table.healthcheck
        stages.append(
            StageToml(
                name=table.name,
                agent_timeout_s=table.agent.timeout_sec or agent.timeout_sec,
                checker_timeout_s=table.verifier.timeout_sec or verifier.timeout_sec,
                checker_env={**checker_env, **own},
                min_reward=table.min_reward,
                healthcheck=None
                if check is None
                else HealthCheck(
                    command=check.command,
                    interval_s=check.interval_sec,
                    timeout_s=check.timeout_sec,
                    start_period_s=check.start_period_sec,
                    start_interval_s=check.start_interval_sec,
                    retries=check.retries,
                ),
            )
        )
    return stages


def _table(data: Mapping[str, object], name: str, kind: type[TableT], faults: list[str]) -> TableT:
    """One table at a time, so that a fault in one does not hide the faults of the next."""
    try:
        return msgspec.convert(data.get(name, {}), kind)
    except msgspec.ValidationError as error:
        faults.append(f"[{name}] {str(error).replace('$.', name + '.').replace('$', name)}")
        return kind()


def _not_run_yet(agent: AgentTable, verifier: VerifierTable, environment: EnvironmentTable) -> list[str]:
    """Features of the format that change what a task is; running it without them would score something else."""
    found = {
        "MCP servers": bool(environment.mcp_servers),
        "a health check of the whole environment": environment.healthcheck is not None,
        f"gpus = {environment.gpus}": environment.gpus > 0,
        f'os = "{environment.os}"': environment.os != "linux",
        "a network allowlist": "allowlist" in (agent.network_mode, environment.network_mode),
        f'verifier.environment_mode = "{verifier.environment_mode}"': verifier.environment_mode != "shared",
        f'agent.user = "{agent.user}"': agent.user not in (None, "agent"),
        f'verifier.user = "{verifier.user}"': verifier.user not in (None, "root", 0),
        "a network for the verifier alone": verifier.network_mode is not None
        and (verifier.network_mode == "public") != _network(agent, environment),
    }
    return [f"asks for what cannot be run yet: {feature}" for feature, asked in found.items() if asked]


def _network(agent: AgentTable, environment: EnvironmentTable) -> bool:
    """The newer key wins over the older one; a file that says nothing means public, as in Harbor."""
    mode = agent.network_mode or environment.network_mode
    if mode is not None:
        return mode == "public"
    return environment.allow_internet is not False


def _mib(name: str, newer_mb: float | None, older: str | float | None, faults: list[str]) -> int:
    """A size in either way of giving it; 0 where neither is given."""
    if newer_mb is not None:
        return max(1, round(newer_mb))
    if older is None:
        return 0
    match = _SIZE.fullmatch(str(older).strip())
    if match is None:
        faults.append(f'[environment] {name} = "{older}" is not a size like "2G" or "512M"')
        return 0
    return max(1, round(float(match[1]) * _UNIT_MIB[match[2].lower()]))


def _filled(env: dict[str, str], name: str, variables: Mapping[str, str], faults: list[str]) -> dict[str, str]:
    def fill(match: re.Match[str]) -> str:
        value = variables.get(match[1], match[2])
        if value is None:
            faults.append(f"[{name}] needs the variable {match[1]}, which is not set and has no default")
            return ""
        return value

    return {key: _VARIABLE.sub(fill, value) for key, value in env.items()}
