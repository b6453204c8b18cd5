"""Own prompts, own reward: teach a model to answer in as few words as it can.

    python examples/own_reward.py

Each prompt is a task; the agent asks the policy once; the reward looks at the reply and at nothing else.
"""

import asyncio

from sandboxes import Sandbox
from thundersync import Config, Engine, Policy, Task, UnscoredRollout, load_config

QUESTIONS = ["Why is the sky blue?", "What is a prime number?", "Who wrote Hamlet?", "How do bees make honey?"]


async def ask_once(task: Task, policy: Policy, sandbox: Sandbox) -> None:
    """The agent: one reply. It returns nothing, so the reward below judges."""
    await policy.chat(policy.opening)  # `opening` is the task's instruction, as a conversation


async def brevity(task: Task, rollout: UnscoredRollout, sandbox: Sandbox) -> float:
    """Near 1 for a word or two, near 0 for a speech. What it raises would be a failure, never a reward of 0."""
    return 1.0 / (1.0 + len(rollout.reply.split()) / 8.0)


async def main(config: Config) -> list[float]:
    """The mean reward of each step."""
    tasks = [Task(task_id=f"question-{number}", instruction=text) for number, text in enumerate(QUESTIONS)]
    means = []
    async with Engine(config, tasks=tasks, agent=ask_once, reward=brevity, say=print) as engine:
        async for step in engine.steps():
            means.append(step.metrics["reward_mean"])
            print(f"step {step.step}: mean reward {means[-1]:.3f}")
        print("the run is in", engine.run_dir)
    return means


if __name__ == "__main__":
    asyncio.run(main(load_config("examples/small.toml", own_tasks=True)))
