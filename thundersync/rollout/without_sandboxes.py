"""No sandboxes at all, for programs whose own agent and reward need none (`sandbox.runtime = "none"`).

In the place of a real runtime; whoever asks it for a sandbox is told. Never a weaker sandbox instead.
"""

from collections.abc import Mapping

from sandboxes.base import Sandbox, SandboxSpec
from sandboxes.errors import RuntimeUnavailable


class WithoutSandboxes:
    """A `Runtime` that starts nothing."""

    name = "none"
    isolation = "there are none"
    outage_limit_s = 0.0

    async def check(self) -> None:
        """Nothing can be missing."""

    async def prepare(self, spec: SandboxSpec) -> None:
        """Nothing is needed."""

    async def start(self, spec: SandboxSpec) -> Sandbox:
        raise RuntimeUnavailable(
            'a sandbox was asked for, and sandbox.runtime is "none"',
            remedy='Set sandbox.runtime = "auto" to give agent and reward functions sandboxes.',
        )

    async def snapshot(self, sandbox: Sandbox, spec: SandboxSpec) -> SandboxSpec:
        return spec

    async def forget(self, spec: SandboxSpec) -> None:
        """There is no snapshot."""

    async def reap(self, labels: Mapping[str, str]) -> int:
        return 0

    async def close(self) -> None:
        """Nothing was started."""
