"""Whether a disk is full is found out where no agent can have prepared it."""

from sandboxes import Command, SandboxSpec
from tests.boxes import process_runtime
from thundersync.score.disk import is_full


async def test_links_of_an_agents_neither_make_a_disk_full_nor_are_followed() -> None:
    runtime = await process_runtime()
    sandbox = await runtime.start(SandboxSpec(disk_mib=8))
    try:
        plant = "echo 1 > /logs/reward; ln -s {} /tmp/.thundersync-room; ln -s {} /tmp/.thundersync-room.XXXXXX"
        for target in ("/dev/full", "/logs/reward"):
            await sandbox.run(Command(script="rm -f /tmp/.t*; " + plant.replace("{}", target)))
            assert not await is_full(sandbox)
            assert await sandbox.read("/logs/reward") == b"1\n"
        await sandbox.run(Command(script="head -c 1G /dev/zero > /tmp/fill"))
        assert await is_full(sandbox)
    finally:
        await runtime.close()
