"""A sandbox is a file tree in which commands run with limits. Knows nothing of tasks, models or training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

from msgspec import Struct


class SandboxSpec(Struct, frozen=True, kw_only=True):
    """What a sandbox should be. `image` (prebuilt) or `context` (folder with a Dockerfile) says where it starts; with
    both, Docker takes the image and process sandboxes follow the Dockerfile.
    """

    image: str = ""
    context: str = ""
    workdir: str = "/workspace"
    env: dict[str, str] = {}
    network: bool = False
    cpus: float = 1.0
    memory_mib: int = 2048
    pids: int = 256
    disk_mib: int = 0
    """Most that the sandbox may write; 0: the runtime's own limit, which in Docker is none. A Docker daemon whose
    storage has no quotas limits the writable areas of a read-only root, and elsewhere each file alone."""
    read_only_root: bool = False
    """Only work areas can be written: workdir, /workspace, home, /tmp, /var/tmp, /run and the checker's folders. A
    process sandbox's programs are read-only always."""
    build_timeout_s: float = 600.0
    ttl_s: float = 7200.0
    """The sandbox ends by itself after this, even when its owner was killed."""
    labels: dict[str, str] = {}


class Command(Struct, frozen=True, kw_only=True):
    """One bash script to run in a sandbox, in a fresh shell."""

    script: str
    timeout_s: float = 60.0
    cwd: str = ""
    """Empty: the sandbox's workdir."""
    env: dict[str, str] = {}
    stdin: bytes = b""
    user: Literal["agent", "root"] = "agent"
    """`root` is for checkers and set-up; where a sandbox has one user only, both are that one."""
    keeps_running: bool = False
    """What the command leaves running lives on until the next command that does not say so ends, or runs late."""
    output_limit_bytes: int = 65536
    """Per stream; what is beyond it is counted and dropped from the middle (head and tail are kept)."""


class Result(Struct, frozen=True, kw_only=True):
    exit_code: int
    """128 + signal if killed."""
    stdout: bytes
    stderr: bytes
    stdout_cut_bytes: int = 0
    """Bytes dropped between the head and the tail."""
    stderr_cut_bytes: int = 0
    timed_out: bool = False
    oom_killed: bool = False
    seconds: float = 0.0


class Origin(Struct, frozen=True, kw_only=True):
    """What a sandbox's files were made from, by content. Of one that was forked: what the first was made from."""

    image: str = ""
    """`sha256:...`. Docker: the image's id. Process sandboxes: over the files and variables that their Dockerfile made,
    times and the host's own programs left out; empty where nothing was built."""
    digest: str = ""
    """`repository@sha256:...`, by which the image can be pulled again; empty where the daemon knows none."""


class Sandbox(Protocol):
    """A live sandbox. Every call raises a SandboxError of sandboxes.errors when the sandbox itself is broken."""

    @property
    def sandbox_id(self) -> str: ...

    @property
    def origin(self) -> Origin: ...

    async def run(self, command: Command) -> Result:
        """Run to the end or to its deadline; then everything it started is killed, and the sandbox lives on."""

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Parents are made. `path` is absolute inside the sandbox."""

    async def read(self, path: str, *, limit_bytes: int = 1 << 24) -> bytes:
        """Raises FileMissing, FileTooLarge."""

    async def put_tree(self, source: Path, target: str) -> None:
        """Copy a host folder's content into `target` (absolute inside)."""

    async def get_tree(self, source: str, target: Path, *, limit_bytes: int = 1 << 28) -> None:
        """Copy the content of a folder inside into the new host folder `target`. Nothing is written outside it, and
        no link in it leads out of it. Raises: FileMissing, FileTooLarge, FileRefused.
        """

    async def kill_all(self) -> None:
        """Kill every process of the sandbox except its own agent."""

    async def close(self) -> None:
        """Remove it. Idempotent, bounded, safe under cancellation."""


class Runtime(Protocol):
    """Makes sandboxes of one kind."""

    @property
    def name(self) -> str:
        """`docker` or `process`."""

    @property
    def isolation(self) -> str:
        """One sentence for people: what this kind does and does not guarantee."""

    @property
    def outage_limit_s(self) -> float:
        """How long `start` may wait for a daemon that is away, beyond what starting takes."""

    async def check(self) -> None:
        """Raises RuntimeUnavailable with a remedy before anything is started."""

    async def prepare(self, spec: SandboxSpec) -> None:
        """Build or pull what `spec` needs; cheap when done before."""

    async def start(self, spec: SandboxSpec) -> Sandbox: ...

    async def snapshot(self, sandbox: Sandbox, spec: SandboxSpec) -> SandboxSpec:
        """`spec` with the files that `sandbox` (started here) has now as its start. Processes are not kept.

        It lives until `forget` or `close`. Raises: BuildFailed, DiskFull, FileTooLarge, SandboxGone.
        """

    async def forget(self, spec: SandboxSpec) -> None:
        """Remove the snapshot that `spec` names; sandboxes that began in it go on."""

    async def reap(self, labels: Mapping[str, str]) -> int:
        """Remove leftovers with these labels whose owner is gone; returns how many."""

    async def close(self) -> None:
        """Remove every sandbox this runtime still owns."""


def isolation_of(runtime: Runtime) -> str:
    """What whoever starts something says of where commands will run."""
    return f"{runtime.name} sandboxes: {runtime.isolation}"
