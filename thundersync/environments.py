"""Environments of the `verifiers` package: their rows as tasks, their rollouts as an agent function.

Where `env.type = "verifiers"`, this stands in for what a program that embeds the engine would bring (`own`): the
environment talks with the policy through an object of the OpenAI client's shape, so that every token is captured as it
was sampled, and its rubric says what a rollout is worth. Spoken to is the interface that versions before 0.4 have
(`load_environment`, `rollout`, `rubric.score_rollout`). Imports the package only when asked for it.
"""

from __future__ import annotations

import importlib
import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import msgspec

from sandboxes.base import Sandbox
from thundersync.config import Config, EnvConfig
from thundersync.core.types import Checker, Image, Outcome, Scored, Task
from thundersync.errors import TaskError, ThundersyncError
from thundersync.own import Own
from thundersync.rollout.policy import Policy, Reply
from thundersync.rollout.sampler import LimitReached

MODEL = "policy"
"""What environments know the policy as."""
_WIRE: dict[str, str] = {"stop": "stop", "length": "length", "context": "length", "abort": "stop"}


class EnvironmentFailed(ThundersyncError):
    """A rollout in a verifiers environment gave no reward."""


async def with_environments(own: Own, config: Config, stack: AsyncExitStack) -> Own:
    """`own`, and in it what the configured verifiers environments bring; as it was where there are none.

    `stack` ends them. They are loaded on the loop's own thread, which they insist on; nothing else runs yet.
    Raises: TaskError.
    """
    asked = [config.env, *([config.eval.env] if config.eval is not None else [])]
    if not any(env.type == "verifiers" for env in asked):
        return own
    if own.agent is not None or own.reward is not None or not all(env.type == "verifiers" for env in asked):
        raise TaskError(
            "a verifiers environment brings its own agent and rewards",
            remedy='Give no other, and use env.type = "verifiers" for [eval] too.',
        )
    environments = [VerifiersEnvironment(env, training=env is config.env) for env in asked]
    for each in environments:
        stack.push_async_callback(each.close)
    agent = _Agent(environments)
    return msgspec.structs.replace(
        own,
        tasks=environments[0].tasks if own.tasks is None else own.tasks,
        eval_tasks=environments[1].tasks if len(environments) > 1 and own.eval_tasks is None else own.eval_tasks,
        agent=agent,
    )


class VerifiersEnvironment:
    """One environment and its rows."""

    def __init__(self, env: EnvConfig, *, training: bool) -> None:
        """`training`: its training rows, else those it keeps for evaluation. Raises: TaskError."""
        self.environment = _load(env)
        rubric = self.environment.rubric
        if getattr(self.environment, "oai_tools", None):
            raise TaskError(
                f"the environment {env.path} declares tools, and their calls would have to be read out of texts",
                remedy="Run it against `python -m thundersync serve`, which reads tool calls.",
            )
        if _asked(rubric, "_get_group_reward_funcs"):
            raise TaskError(
                f"the environment {env.path} rewards whole groups at once",
                remedy="Use one whose rubric rewards each rollout by itself: rewards land one by one here.",
            )
        rows = self.environment.get_dataset() if training else self.environment.get_eval_dataset()
        kind = "train" if training else "eval"
        self._rows = {f"{env.path}/{kind}-{index:06d}": dict(row) for index, row in enumerate(rows)}
        self.tasks = [
            Task(
                task_id=task_id,
                suite=env.path,
                instruction=_last_said(row.get("prompt")),
                image=Image(),
                checker=Checker(tests="", command=""),
            )
            for task_id, row in self._rows.items()
        ]

    async def close(self) -> None:
        """End what it has started for all its rollouts."""
        for handler in getattr(self.environment, "_teardown_handlers", []):
            await handler()

    def holds(self, task: Task) -> bool:
        return task.task_id in self._rows

    async def rollout(self, task: Task, policy: Policy) -> Outcome:
        """Raises: EnvironmentFailed, and whatever sampling raises."""
        client = PolicyClient(policy)
        row = dict(self._rows[task.task_id])
        state = await self.environment.rollout(row, _native(client), MODEL, {})
        if client.failure is not None:
            raise client.failure
        error = state.get("error")
        if error is not None and client.reached is None:
            raise EnvironmentFailed(f"{task.task_id}: {error!r}", remedy="Look into the environment's own log.")
        await self.environment.rubric.score_rollout(state)
        reward = state.get("reward")
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise EnvironmentFailed(
                f"{task.task_id}: its rubric gave {reward!r}", remedy="A reward is one finite number."
            )
        return Scored(
            reward=float(reward),
            rewards={**_finite(state.get("metrics") or {}), "reward": float(reward)},
            stop=client.reached.stop if client.reached is not None else "submitted",
        )


class _Agent:
    """The agent function of several environments."""

    def __init__(self, environments: Sequence[VerifiersEnvironment]) -> None:
        self._environments = environments

    async def __call__(self, task: Task, policy: Policy, sandbox: Sandbox) -> Outcome:
        for each in self._environments:
            if each.holds(task):
                return await each.rollout(task, policy)
        raise EnvironmentFailed(f"{task.task_id} is of no environment here", remedy="Give no tasks besides.")


class PolicyClient:
    """One rollout's policy in the shape of `openai.AsyncOpenAI`, as far as environments use it.

    What ends the rollout is remembered, because environments wrap the errors of their client in their own.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.chat = self
        self.completions = self
        self.reached: LimitReached | None = None
        """The limit that a call met."""
        self.failure: Exception | None = None
        """Any other error of a call."""

    async def create(self, *, messages: Sequence[Mapping[str, Any]], model: str, **settings: Any) -> Any:
        """A `ChatCompletion`. Sampling is the run's own; only `max_completion_tokens` and `stop` are heard."""
        stop = settings.get("stop")
        limit = settings.get("max_completion_tokens") or settings.get("max_tokens")
        try:
            if settings.get("tools"):
                raise EnvironmentFailed("the environment declares tools", remedy="Run it against `thundersync serve`.")
            said = [{"role": str(each["role"]), "content": _text(each.get("content"))} for each in messages]
            reply = await self._policy.chat(said, max_tokens=limit, stop=[stop] if isinstance(stop, str) else stop)
        except LimitReached as reached:
            self.reached = reached
            raise
        except Exception as error:
            self.failure = error
            raise
        return _completion(reply)

    async def close(self) -> None:
        """The policy is the rollout's."""


def _load(env: EnvConfig) -> Any:
    try:
        verifiers = importlib.import_module("verifiers")
    except ImportError as error:
        raise TaskError(
            f'env.type = "verifiers" needs the package verifiers, which is not installed: {error}',
            remedy="pip install verifiers",
        ) from error
    load = getattr(verifiers, "load_environment", None)
    if load is None:
        raise TaskError(
            f"verifiers {getattr(verifiers, '__version__', '')} has no load_environment: its interface is another one",
            remedy="pip install 'verifiers<0.4'",
        )
    try:
        with _signals_kept():
            return load(env.path, **env.args)
    except Exception as error:  # an environment is a program of somebody else's
        raise TaskError(
            f"the environment {env.path} cannot be loaded: {type(error).__name__}: {error}",
            remedy="Install it (its own package, beside verifiers), and look at env.args.",
        ) from error


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Environments take Ctrl-C for themselves, and it is the run's."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and handler != signal.getsignal(number):
                signal.signal(number, handler)


def _native(client: PolicyClient) -> Any:
    """As this version takes it: the client itself, or (from 0.1.11 on) in a client of its own around it."""
    try:
        clients = importlib.import_module("verifiers.clients")
    except ImportError:
        return client
    return clients.OpenAIChatCompletionsClient(client)


def _completion(reply: Reply) -> Any:
    chat = importlib.import_module("openai.types.chat.chat_completion")
    message = importlib.import_module("openai.types.chat.chat_completion_message")
    usage = importlib.import_module("openai.types.completion_usage")
    told, said = len(reply.prompt_ids), len(reply.token_ids)
    return chat.ChatCompletion(
        id="reply",
        created=int(time.time()),
        model=MODEL,
        object="chat.completion",
        # A reply of nothing but its end of turn is one, and environments take an empty text for a broken server.
        choices=[
            chat.Choice(
                index=0,
                finish_reason=_WIRE[reply.finish_reason],
                message=message.ChatCompletionMessage(role="assistant", content=reply.text or " "),
            )
        ],
        usage=usage.CompletionUsage(prompt_tokens=told, completion_tokens=said, total_tokens=told + said),
    )


def _text(content: object) -> str:
    """Content comes as text, or as a list of parts."""
    if isinstance(content, list):
        if any(not isinstance(part, Mapping) or part.get("type") != "text" for part in content):
            raise EnvironmentFailed("the environment shows something else than text", remedy="Use one of text alone.")
        return "".join(str(part["text"]) for part in content)
    return "" if content is None else str(content)


def _last_said(prompt: object) -> str:
    if isinstance(prompt, list) and prompt:
        return _text(prompt[-1].get("content"))
    return str(prompt or "")


def _asked(thing: object, name: str) -> Any:
    method = getattr(thing, name, None)
    return method() if callable(method) else None


def _finite(metrics: Mapping[str, object]) -> dict[str, float]:
    return {
        str(name): float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
