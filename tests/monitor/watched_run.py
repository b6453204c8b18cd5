"""A whole run whose every token and every sum its seed decides, so that two of them can be compared bit for bit.

    python -m tests.monitor.watched_run FOLDER MODEL

One rollout at a time, each begun after the passes of those before it: which gradients meet in which part is otherwise a
matter of time. The last rollout waits for a line on standard input, or its end. Then it tells of so much that a queue
for a viewer that has stopped is full, and three times as much again. Printed is this process's memory after each, in
MiB.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from thundersync import Engine, Message, Policy, Scored, Task, config_from
from thundersync.monitor import events as e

STEPS, GROUPS, SIZE = 8, 2, 3
ROLLOUTS = STEPS * GROUPS * SIZE
FULL = 12_000
"""More events than a queue holds."""
EVENT_BYTES = 1000


class Watched:
    """The run's agent."""

    def __init__(self) -> None:
        self.engine: Engine
        self.memory_mib: list[float] = []
        self._begun: list[str] = []
        self._worked: set[str] = set()
        self._news = asyncio.Event()

    def see(self, event: e.Event) -> None:
        match event:
            case e.PassDone():
                self._worked.update(event.rollout_ids)
            case e.RolloutSkipped():
                self._worked.add(event.rollout_id)
        self._news.set()

    async def play(self, task: Task, policy: Policy, sandbox: Any) -> Scored:
        while not self._worked.issuperset(self._begun):
            self._news.clear()
            await self._news.wait()
        self._begun.append(policy.rollout_id)
        messages = policy.opening
        said: list[int] = []
        for _ in range(2):
            reply = await policy.chat(messages)
            said += reply.token_ids
            messages += [reply.message, Message(role="user", content="and?")]
        if len(self._begun) == ROLLOUTS:
            await asyncio.to_thread(sys.stdin.readline)
            for times in (1, 3):
                for _ in range(times):
                    await self._flood()
                self.memory_mib.append(psutil.Process().memory_info().rss / 2**20)
        return Scored(reward=zlib.crc32(bytes(str(said), "ascii")) % 3 / 2)

    async def _flood(self) -> None:
        """Returns when the feed has written, and so sent, all of it."""
        file = self.engine.run_dir / "events.jsonl"
        for _ in range(FULL // 1000):
            size = file.stat().st_size
            for _ in range(1000):
                self.engine.parts.feed.emit(e.Warned(at_s=time.time(), text="x" * EVENT_BYTES))
            while file.stat().st_size < size + 1000 * EVENT_BYTES:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


def tasks() -> Iterator[Task]:
    """Each of its own name: which one takes longest is not known of any, and decides no order."""
    for number in range(STEPS * GROUPS):
        yield Task(task_id=f"task-{number}", instruction=f"Say {number}.")


async def main(folder: Path, model: str) -> None:
    config = config_from(
        {
            "max_steps": STEPS,
            "seed": 7,
            "name": "run",
            "output_dir": str(folder),
            "model": {"name": model, "dtype": "float32", "max_model_len": 512},
            "algo": {"group_size": SIZE, "prompts_per_step": GROUPS},
            "rollout": {"max_tokens": 12, "max_turns": 2, "timeout_s": 600, "concurrency": 1},
            "optim": {"lr": 1e-2},
            "engine": {"backend": "transformers", "kv_cache_gib": 0.0625, "max_num_seqs": 8},
            "stream": {"partials_gib": 1.0},
            "sandbox": {"runtime": "none"},
            "ckpt": {"interval": 0},
        }
    )
    watched = Watched()
    async with Engine(config, tasks=tasks(), agent=watched.play, on_event=watched.see) as watched.engine:
        async for _ in watched.engine.steps():
            pass
    print(json.dumps(watched.memory_mib))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
