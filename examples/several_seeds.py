"""Several engines, one after another, in one process: the same run under three seeds, and how far they are apart.

    python examples/several_seeds.py

Nothing of an engine outlives its `async with`: no process, socket, thread or shared memory.
"""

import asyncio
import statistics

import msgspec
import own_reward

from thundersync import Config, Engine, Task, load_config


async def one(config: Config) -> float:
    """The mean reward of the last step."""
    tasks = [Task(task_id=text, instruction=text) for text in own_reward.QUESTIONS]
    last = 0.0
    async with Engine(config, tasks=tasks, agent=own_reward.ask_once, reward=own_reward.brevity) as engine:
        async for step in engine.steps():
            last = step.metrics["reward_mean"]
    return last


async def main(config: Config, seeds: tuple[int, ...] = (42, 43, 44)) -> list[float]:
    found = []
    for seed in seeds:
        own = msgspec.structs.replace(config, seed=seed, name=f"seed-{seed}")
        found.append(await one(own))
        print(f"seed {seed}: {found[-1]:.3f}")
    print(f"mean {statistics.fmean(found):.3f}, deviation {statistics.pstdev(found):.3f}")
    return found


if __name__ == "__main__":
    asyncio.run(main(load_config("examples/small.toml", own_tasks=True)))
