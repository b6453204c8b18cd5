"""Own objective: advantages divided by the range of a group's rewards instead of their deviation.

    python examples/own_objective.py

It streams as GRPO does, because its advantage is a straight line over a rollout's own reward, whose slope and offset
follow from the group's rewards. The engine tries that on many rewards before it starts anything.
"""

import asyncio
from collections.abc import Sequence

import own_reward

from thundersync import Config, Engine, JoinScalars, Objective, Task, check_separable, load_config


class RangeNormalised(Objective, frozen=True, kw_only=True):
    """A = (r - mean(group)) / (max(group) - min(group)); weights, scales and the rest are GRPO's."""

    def join(self, rewards: Sequence[float], *, base: float) -> JoinScalars:
        """The line A(r) = slope x (r - base) + offset; `base` is whichever reward landed first."""
        width, mean = max(rewards) - min(rewards), sum(rewards) / len(rewards)
        if width == 0.0:  # all equal: nothing to learn
            return JoinScalars(base=base, slope=0.0, offset=0.0)
        return JoinScalars(base=base, slope=1.0 / width, offset=(base - mean) / width)

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        """The same, member by member: what `verify` and audits compare streaming with."""
        line = self.join(rewards, base=rewards[0])
        return [line.advantage(reward) for reward in rewards]

    def formula(self) -> str:
        return "A = (r - mean(group)) / (max(group) - min(group))"


async def main(config: Config) -> list[float]:
    objective = RangeNormalised()
    check_separable(objective)  # the engine does this too
    tasks = [Task(task_id=text, instruction=text) for text in own_reward.QUESTIONS]
    norms = []
    async with Engine(
        config, tasks=tasks, agent=own_reward.ask_once, reward=own_reward.brevity, objective=objective, say=print
    ) as engine:
        async for step in engine.steps():
            norms.append(step.metrics["grad_norm"])
            print(f"step {step.step}: gradient norm {norms[-1]:.4f}")
    return norms


if __name__ == "__main__":
    asyncio.run(main(load_config("examples/small.toml", own_tasks=True)))
