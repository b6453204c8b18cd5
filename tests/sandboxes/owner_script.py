"""A process that starts a sandbox, keeps a command running in it, and is then killed by the test that started it."""

import asyncio
import sys

from sandboxes import Command, DockerRuntime, ProcessRuntime, SandboxSpec


async def main(kind: str, host: str, image: str) -> None:
    runtime = DockerRuntime(host) if kind == "docker" else ProcessRuntime()
    sandbox = await runtime.start(SandboxSpec(image=image))
    await sandbox.run(Command(script="touch /tmp/ready"))
    print(sandbox.sandbox_id, flush=True)
    await sandbox.run(Command(script="setsid sleep 1000 & sleep 1000", timeout_s=1000))


asyncio.run(main(*sys.argv[1:4]))
