"""Whether a sandbox's disk is full, by trying: that something printed so may be the agent's own words."""

from sandboxes.base import Command, Sandbox

ROOM_BYTES = 1 << 20
_FILE = "/tmp/.thundersync-room"
_TIMEOUT_S = 60.0


async def is_full(sandbox: Sandbox) -> bool:
    """No room for a MiB. Raises: the sandbox's own SandboxError."""
    script = f"head -c {ROOM_BYTES} /dev/zero > {_FILE}; code=$?; rm -f {_FILE}; exit $code"
    tried = await sandbox.run(Command(script=script, timeout_s=_TIMEOUT_S, cwd="/", user="root"))
    return tried.exit_code != 0
