"""Measures what monitors that come and go cost a run: steps with and without them, in turns, in one run.

    python tools/bench_monitors.py [--repeats 8]

Each repeat works the same step three times, in changing order: `alone`; `watched`, while two monitors at a time (--json
or --plain, processes of their own) attach and are ended or killed at random; `elsewhere`, the same, but they call where
nobody answers. So `watched / elsewhere` is what attaching costs, and `watched / alone` also has what two programs more
cost on the same cores. Engine, trainer worker and feed are a run's own, tokens and waits replayed as in `bench`, the
model that of the tests, so small that a step is hundreds of events in seconds.
"""

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

from thundersync.bench.arms import ArmDriver, Measured
from thundersync.bench.crew import own_crew
from thundersync.bench.processes import Processes, machine
from thundersync.bench.protocol import fitted
from thundersync.bench.replay import Script, replayed_task
from thundersync.bench.statistics import Spread, spread, turns_taken
from thundersync.bench.workload import workload_of
from thundersync.config_file import config_from
from thundersync.engine import Engine
from thundersync.generate.child import pin
from thundersync.placement import place_here

WAYS = ["alone", "watched", "elsewhere"]
STAYS_S = (1.0, 8.0)
PAUSES_S = (0.1, 2.0)
"""A monitor lives so long, its start included; then there is none for a while."""
CONFIG: dict[str, Any] = {
    "seed": 42,
    "name": "run",
    "algo": {"group_size": 8, "prompts_per_step": 8},
    "engine": {"backend": "transformers", "max_num_seqs": 32},
    "bench": {"prompt_tokens": 24, "reply_tokens": 32, "tool_s": 0.2},
}
MODEL = "import pathlib, sys, tests.tiny; tests.tiny.tiny_model(pathlib.Path(sys.argv[1]))"


def viewers() -> None:
    """A process of its own, so that starting them costs the run nothing: a target on standard input lets two come and
    go, an empty line ends that and is answered with how many there were, and their processor seconds."""
    while target := sys.stdin.readline().strip():
        enough, count = threading.Event(), [0, 0]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        slots = [threading.Thread(target=come_and_go, args=(target, slot, count, enough)) for slot in (0, 1)]
        for each in slots:
            each.start()
        sys.stdin.readline()
        enough.set()
        for each in slots:
            each.join()
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(json.dumps((sum(count), spent.ru_utime + spent.ru_stime - before.ru_utime - before.ru_stime)), flush=True)


def come_and_go(target: str, slot: int, count: list[int], enough: threading.Event) -> None:
    draw = random.Random()
    while not enough.wait(draw.uniform(*PAUSES_S) if count[slot] else 0.0):
        command = [sys.executable, "-m", "thundersync", "monitor", target, draw.choice(["--json", "--plain"])]
        viewer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        count[slot] += 1
        enough.wait(draw.uniform(*STAYS_S))
        viewer.send_signal(draw.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL]))
        viewer.wait()


async def measure(folder: Path, repeats: int, helper: "subprocess.Popen[str]") -> dict[str, Spread]:
    model = {"name": str(folder / "model"), "dtype": "float32", "max_model_len": 1024}
    config = config_from(CONFIG | {"output_dir": str(folder), "model": model})
    workload, placement = workload_of(config), place_here(config)
    own = fitted(config, workload)
    print(f"{machine()}; {placement.sentence()}; load {os.getloadavg()[0]:.1f}; {workload.sentence()}")
    pin(placement.engine_cpus)
    tasks = [replayed_task(f"bench-{index}") for index in range(workload.prompts_per_step)]
    steps: dict[str, list[Measured]] = defaultdict(list)
    monitors: dict[str, list[tuple[int, float]]] = defaultdict(list)
    assert helper.stdin and helper.stdout
    async with Engine(own, tasks=tasks, agent=nobody, placement=placement, say=print) as engine:
        parts = engine.parts
        script, processes = Script(workload, vocabulary=384, seed=own.seed), Processes([w.pid for w in parts.workers])
        driver = ArmDriver(
            "stream", own, crew=own_crew(parts), run=parts.driver, script=script, emit=parts.feed.emit,
            keep=parts.folder.write_rollouts, processes=processes,
        )  # fmt: skip
        targets: dict[str, str] = {"watched": str(engine.run_dir), "elsewhere": f"ipc://{folder}/nobody"}
        for number in range(2):
            await driver.step(number)
        for repeat, order in enumerate(turns_taken(WAYS, repeats)):
            for way in order:
                if way in targets:
                    print(targets[way], file=helper.stdin, flush=True)
                steps[way].append(await driver.step(2 + repeat))
                if way in targets:
                    print(file=helper.stdin, flush=True)
                    monitors[way].append(json.loads(await asyncio.to_thread(helper.stdout.readline)))
            print(", ".join(f"{way} {steps[way][-1].step_s:.2f} s" for way in WAYS))
    return figures(steps, monitors)


def figures(steps: dict[str, list[Measured]], monitors: dict[str, list[tuple[int, float]]]) -> dict[str, Spread]:
    """Each a median with its quartiles; ratios are of the same repeat."""
    taken = {way: [step.step_s for step in steps[way]] for way in WAYS}
    told: dict[str, list[float]] = {f"step_s, {way}": taken[way] for way in WAYS}
    told |= {f"coordinator cpu_s, {way}": [step.cpu.coordinator_s for step in steps[way]] for way in WAYS}
    for other in ("elsewhere", "alone"):
        told[f"watched / {other}"] = [a / b for a, b in zip(taken["watched"], taken[other], strict=True)]
    for way, counted in monitors.items():
        told[f"monitors started, {way}"], told[f"their cpu_s, {way}"] = map(list, zip(*counted, strict=True))
    return {name: spread(values) for name, values in told.items()}


async def nobody(task: object, policy: object, sandbox: object) -> None:
    """In the place of the run's agent: the steps are replayed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--viewers", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.viewers:
        viewers()
        return
    command, ends = [sys.executable, __file__, "--viewers"], subprocess.PIPE
    with (
        tempfile.TemporaryDirectory(prefix="monitors-") as folder,
        subprocess.Popen(command, stdin=ends, stdout=ends, text=True) as helper,
    ):
        subprocess.run([sys.executable, "-c", MODEL, f"{folder}/model"], cwd=Path(__file__).parents[1], check=True)
        told = asyncio.run(measure(Path(folder), arguments.repeats, helper))
    for name, value in told.items():
        print(f"{name:28} {value.median:.3f}  (quartiles {value.low:.3f} to {value.high:.3f})")


if __name__ == "__main__":
    main()
