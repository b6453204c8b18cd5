"""Measures Docker sandboxes: how fast they start, run commands and go, against one `docker exec` per command.

    python tools/bench_sandboxes.py --image IMAGE [--count 128] [--commands 10] [--json OUT]

Needs a daemon on this machine (DOCKER_HOST or the default socket) that has IMAGE, with bash and python3 in it. Every
figure is printed with what was measured; containers that are left at the end are counted, and make the exit code 1.

Commands a second depend on what else the machine does. So the processor time of a command is measured too: that of
this process, of the daemon with its helpers, and of the containers. It hardly moves with the load.
"""

import argparse
import asyncio
import gc
import os
import platform
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

import aiodocker
import aiohttp
import msgspec
import psutil

from sandboxes import Command, DockerRuntime, Sandbox, SandboxSpec
from sandboxes.client import DEFAULT_HOST
from sandboxes.latency import Latencies, Latency

LABEL = "thundersync.bench"
SCRIPT = "ls / >/dev/null; echo done"


class Processor(msgspec.Struct, kw_only=True):
    """Seconds of computing, of whom."""

    own: float = 0.0
    """This process."""
    daemon: float = 0.0
    """dockerd, containerd, and a shim per container, with what they started and saw end."""
    containers: float = 0.0
    """Process 1 of each, with what it started and saw end."""

    @property
    def total(self) -> float:
        return self.own + self.daemon + self.containers

    def since(self, before: "Processor", *, calls: int) -> "Processor":
        """Per call, since an earlier look."""
        return Processor(
            own=(self.own - before.own) / calls,
            daemon=(self.daemon - before.daemon) / calls,
            containers=(self.containers - before.containers) / calls,
        )


class Figures(msgspec.Struct, kw_only=True):
    """What one bench came to. Seconds are of single calls, with `count` sandboxes at once."""

    machine: str
    count: int
    commands_each: int
    latencies: dict[str, Latency]
    start_wall_s: float
    commands_per_s: float
    remove_wall_s: float
    execs_per_s: float
    ratio: float
    """Commands a second through the agent, over those of one exec each."""
    command_processor: Processor
    """Of one command through the agent."""
    exec_processor: Processor
    """Of one exec."""
    one_by_one_command_p50_s: float
    rss_mib: dict[str, float]
    """Of this process: at the start, and at the end of each of the rounds."""
    leaks: int
    errors: int


async def bench(host: str, image: str, *, count: int, commands: int, execs: int, rounds: int) -> Figures:
    """Run it all: `rounds` times the whole, then `execs` commands as one exec each. Raises: SandboxError."""
    latencies, one_by_one = Latencies(), Latencies()
    rss = {"start": _rss_mib()}
    start_s, command_s, remove_s, execs_per_s = 0.0, 0.0, 0.0, 0.0
    errors = 0
    per_command, per_exec = Processor(), Processor()

    async def work(sandbox: Sandbox) -> int:
        wrong = 0
        for _ in range(commands):
            with latencies.timed("command"):
                result = await sandbox.run(Command(script=SCRIPT))
            wrong += result.stdout != b"done\n"
        return wrong

    async def start(runtime: DockerRuntime) -> Sandbox:
        with latencies.timed("start (with the wait for its turn)"):
            return await runtime.start(SandboxSpec(image=image, memory_mib=256, labels={LABEL: "1"}))

    async def remove(sandbox: Sandbox) -> None:
        with latencies.timed("remove (with the wait for its turn)"):
            await sandbox.close()

    for number in range(rounds):
        runtime = DockerRuntime(host)
        try:
            began = time.monotonic()
            sandboxes = await asyncio.gather(*(start(runtime) for _ in range(count)))
            start_s += time.monotonic() - began
            names = [one.sandbox_id for one in sandboxes]
            pids = await _pids(host, names)
            before = _processor(host, pids)
            began = time.monotonic()
            errors += sum(await asyncio.gather(*(work(sandbox) for sandbox in sandboxes)))
            command_s += time.monotonic() - began
            per_command = _processor(host, pids).since(before, calls=count * commands)
            if number == 0:
                for _ in range(50):
                    with one_by_one.timed("command"):
                        await sandboxes[0].run(Command(script=SCRIPT))
                before = _processor(host, pids)
                execs_per_s = await _execs_per_s(host, names, execs, latencies)
                per_exec = _processor(host, pids).since(before, calls=max(1, execs))
            began = time.monotonic()
            await asyncio.gather(*(remove(sandbox) for sandbox in sandboxes))
            remove_s += time.monotonic() - began
        finally:
            await runtime.close()
        gc.collect()
        rss[f"round {number + 1}"] = _rss_mib()

    rate = rounds * count * commands / command_s
    return Figures(
        machine=f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}",
        count=count,
        commands_each=commands,
        latencies=latencies.read(),
        start_wall_s=start_s / rounds,
        commands_per_s=rate,
        remove_wall_s=remove_s / rounds,
        execs_per_s=execs_per_s,
        ratio=rate / execs_per_s if execs_per_s else 0.0,
        command_processor=per_command,
        exec_processor=per_exec,
        one_by_one_command_p50_s=one_by_one.read()["command"].p50_s,
        rss_mib=rss,
        leaks=await _leaks(host),
        errors=errors,
    )


async def _execs_per_s(host: str, names: list[str], total: int, latencies: Latencies) -> float:
    """The same command as one exec each, over the same containers, as many at once as the daemon does best with."""
    if not total:
        return 0.0
    docker, connector = _client(host)
    width = asyncio.Semaphore(max(4, 2 * (os.cpu_count() or 1)))

    async def one(number: int) -> None:
        async with width:
            with latencies.timed("exec (without the wait)"):
                container = docker.containers.container(names[number % len(names)])
                execution = await container.exec(["bash", "-c", SCRIPT], user="1000:1000")
                async with execution.start(detach=False) as stream:
                    while await stream.read_out() is not None:
                        pass
                await execution.inspect()

    began = time.monotonic()
    try:
        await asyncio.gather(*(one(number) for number in range(total)))
    finally:
        await docker.close()
        await connector.close()
    return total / (time.monotonic() - began)


async def _pids(host: str, names: list[str]) -> dict[str, int]:
    """Process 1 of each container, by the container's full id."""
    docker, connector = _client(host)
    try:
        found = [await docker.containers.container(name).show() for name in names]
        return {each["Id"]: int(each["State"]["Pid"]) for each in found}
    finally:
        await docker.close()
        await connector.close()


def _processor(host: str, containers: dict[str, int]) -> Processor:
    """Seconds of computing so far."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect((host or DEFAULT_HOST).removeprefix("unix://"))
        daemon = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    helpers = {daemon, *(child.pid for child in psutil.Process(daemon).children(recursive=True))}
    for process in psutil.process_iter():
        try:
            if process.name().startswith("containerd-shim") and containers.keys() & set(process.cmdline()):
                helpers.add(process.pid)
        except psutil.NoSuchProcess:
            continue
    inside = set(containers.values())
    return Processor(
        own=_seconds(os.getpid()),
        daemon=sum(_seconds(pid) for pid in helpers - inside),
        containers=sum(_seconds(pid) for pid in inside),
    )


def _seconds(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)


async def _leaks(host: str) -> int:
    docker, connector = _client(host)
    try:
        filters = aiodocker.utils.clean_filters({"label": [LABEL]})
        return len(await docker._query_json("containers/json", params={"all": 1, "filters": filters}))
    finally:
        await docker.close()
        await connector.close()


def _client(host: str) -> tuple[aiodocker.Docker, aiohttp.BaseConnector]:
    connector = aiohttp.UnixConnector((host or DEFAULT_HOST).removeprefix("unix://"), limit=0)
    return aiodocker.Docker(url="unix://localhost", connector=connector), connector


def _rss_mib() -> float:
    return float(psutil.Process().memory_info().rss) / (1 << 20)


def table(figures: Figures) -> str:
    """The figures for people."""
    lines = [f"{figures.count} sandboxes, {figures.commands_each} commands each ({figures.machine})"]
    lines.append(f"{'call':40}{'count':>8}{'p50 ms':>10}{'p95 ms':>10}{'max ms':>10}")
    for kind, latency in figures.latencies.items():
        milliseconds = "".join(f"{1000 * s:10.1f}" for s in (latency.p50_s, latency.p95_s, latency.max_s))
        lines.append(f"{kind:40}{latency.count:8}{milliseconds}")
    lines.append(f"all started after {figures.start_wall_s:.1f} s, all removed after {figures.remove_wall_s:.1f} s")
    lines.append(
        f"commands: {figures.commands_per_s:.0f}/s; one at a time {1000 * figures.one_by_one_command_p50_s:.1f} ms"
    )
    lines.append(f"as one exec each: {figures.execs_per_s:.1f}/s; ratio {figures.ratio:.1f}")
    for name, each in (("a command", figures.command_processor), ("an exec", figures.exec_processor)):
        lines.append(
            f"processor time of {name}: {1000 * each.total:.1f} ms (own {1000 * each.own:.2f}, daemon "
            f"{1000 * each.daemon:.2f}, container {1000 * each.containers:.2f})"
        )
    if figures.command_processor.total > 0:
        lines.append(f"ratio {figures.exec_processor.total / figures.command_processor.total:.1f}")
    lines.append(
        "memory of this process: " + ", ".join(f"{name} {mib:.0f} MiB" for name, mib in figures.rss_mib.items())
    )
    lines.append(f"errors {figures.errors}, containers left {figures.leaks}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", required=True)
    parser.add_argument("--docker-host", default=os.environ.get("DOCKER_HOST", ""))
    parser.add_argument("--count", type=int, default=128)
    parser.add_argument("--commands", type=int, default=10)
    parser.add_argument("--execs", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given: Any = parser.parse_args()
    figures = asyncio.run(
        bench(
            given.docker_host,
            given.image,
            count=given.count,
            commands=given.commands,
            execs=given.execs,
            rounds=given.rounds,
        )
    )
    print(table(figures))
    if given.json:
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)))
    sys.exit(1 if figures.leaks or figures.errors else 0)


if __name__ == "__main__":
    main()
