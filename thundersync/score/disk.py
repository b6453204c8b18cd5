"""Whether a sandbox's disk is full, by trying: that something printed so may be the agent's own words."""

from sandboxes.base import Command, Sandbox

ROOM_BYTES = 1 << 20
# A name that is drawn: an agent may have put a link to something else wherever it knows that root will write.
_SCRIPT = f"""
file=$(mktemp /tmp/.thundersync-room.XXXXXX) || exit
head -c {ROOM_BYTES} /dev/zero > "$file"
code=$?
rm -f -- "$file"
exit $code
"""
_TIMEOUT_S = 60.0


async def is_full(sandbox: Sandbox) -> bool:
    """No room for a MiB. Raises: the sandbox's own SandboxError."""
    tried = await sandbox.run(Command(script=_SCRIPT, timeout_s=_TIMEOUT_S, cwd="/", user="root"))
    return tried.exit_code != 0
