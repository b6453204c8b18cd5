"""Inside a web application that has an event loop of its own: train in the background, answer from the newest policy.

    pip install fastapi uvicorn && uvicorn --factory --app-dir examples in_a_web_app:small

The engine lives exactly as long as the application. It takes no signal handlers and needs no loop of a certain kind.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import own_reward
from fastapi import FastAPI

from thundersync import Config, Engine, Message, StepResult, Task, load_config


def application(config: Config) -> FastAPI:
    rewards: list[float] = []
    tasks = [Task(task_id=text, instruction=text) for text in own_reward.QUESTIONS]

    async def on_step(step: StepResult) -> None:
        rewards.append(step.metrics["reward_mean"])

    engine = Engine(config, tasks=tasks, agent=own_reward.ask_once, reward=own_reward.brevity, on_step=on_step)

    async def train() -> None:
        async for _ in engine.steps():
            pass

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        async with engine:
            app.state.training = asyncio.create_task(train(), name="training")
            yield
            engine.stop()  # the open step is finished, committed and saved; none begins after it
            await app.state.training  # raises what broke the training, if something did

    app = FastAPI(lifespan=life)

    @app.get("/progress")
    async def progress() -> dict[str, list[float]]:
        return {"rewards": rewards}

    @app.post("/ask")
    async def ask(question: str) -> dict[str, str]:
        return {"answer": await engine.generate([Message(role="user", content=question)], max_tokens=32)}

    return app


def small() -> FastAPI:
    return application(load_config("examples/small.toml", own_tasks=True))
