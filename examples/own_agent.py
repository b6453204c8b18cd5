"""Own agent: a game of several turns, played in Python, that says itself what a rollout was worth.

    python examples/own_agent.py

The policy guesses a number; the agent answers "higher" or "lower". An iterator makes the tasks as the run goes.
"""

import asyncio
import itertools
import random
import re
from collections.abc import Iterator

from sandboxes import Sandbox
from thundersync import Config, Engine, LimitReached, Message, Policy, Scored, Task, load_config

RULES = "I think of a number from 1 to 20. Guess it. Reply with one number and nothing else."


def games(seed: int) -> Iterator[Task]:
    """Without an end. A resumed run makes a new iterator, which goes on where the checkpoint stood."""
    chance = random.Random(seed)
    for number in itertools.count():
        yield Task(task_id=f"game-{number}", instruction=RULES, env={"SECRET": str(chance.randint(1, 20))})


async def play(task: Task, policy: Policy, sandbox: Sandbox) -> Scored:
    """1 for the number, less for what came only near it."""
    secret, best = int(task.env["SECRET"]), 0.0
    messages: list[Message | dict[str, str]] = [*policy.opening]
    try:
        while True:
            reply = await policy.chat(messages, max_tokens=8)
            found = re.search(r"\d+", reply.text)
            guess = int(found[0]) if found and len(found[0]) < 4 else -100
            if guess == secret:
                return Scored(reward=1.0)
            best = max(best, 0.5 - abs(guess - secret) / 40)
            hint = "Higher." if guess < secret else "Lower."
            # The reply goes back as it came: edited, it would begin a new token sequence (exact, but longer to learn).
            messages += [reply.message, {"role": "user", "content": hint}]
    except LimitReached as limit:  # rollout.max_turns, the context, or the time; uncaught it would end the rollout
        return Scored(reward=best, stop=limit.stop)


async def main(config: Config) -> list[float]:
    means = []
    async with Engine(config, tasks=games(config.seed), agent=play, say=print) as engine:
        async for step in engine.steps():
            means.append(step.metrics["reward_mean"])
            print(f"step {step.step}: mean reward {means[-1]:.3f}, {step.metrics['turns_mean']:.1f} guesses")
    return means


if __name__ == "__main__":
    asyncio.run(main(load_config("examples/small.toml", own_tasks=True)))
