"""One rollout's door: requests of an outside agent in, exact samples of the policy out, until one of several ends.

Place in the flow: the requests come from `server`; policy and sandbox are lent by the run for as long as the session
lasts. Every reply is captured token by token. Knows nothing of HTTP, groups or training.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from sandboxes.base import Command, Sandbox
from thundersync.core.types import Task
from thundersync.rollout.dialogue import ChatTemplateError, Renderer, Tool
from thundersync.rollout.policy import Policy, Reply
from thundersync.rollout.sampler import LimitReached
from thundersync.serve.answers import Answer, Choice
from thundersync.serve.chat import ToolCall, assistant, for_readers
from thundersync.serve.ending import Ending
from thundersync.serve.errors import ContextFull, Refused, SessionOver
from thundersync.serve.history import Ask, History
from thundersync.serve.parameters import Call

MOST_AT_ONCE = 32
"""Requests of one session at a time."""

T = TypeVar("T")


class ToolParser(Protocol):
    """Takes tool calls out of a reply (`generate.vllm_tools`)."""

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[str, str]]]: ...


class Rules(Struct, frozen=True, kw_only=True):
    """What is the same for all sessions of one agent."""

    model: str
    context_tokens: int
    vocabulary: int
    """Ids that the model knows are below it."""
    temperature: float
    max_tokens: int
    """Per reply."""
    stop: tuple[str, ...]
    """The run's stop strings; they stay in the text."""
    command_timeout_s: float
    client_judges: bool
    """The agent posts the reward; else the task's checker judges."""


class Ran(Struct, frozen=True, kw_only=True):
    """What a command in the session's sandbox came to."""

    output: str
    exit_code: int
    timed_out: bool


class Session:
    """Open from its making until its `ending` is over. `clock` gives monotonic seconds."""

    def __init__(
        self,
        session_id: str,
        *,
        key: str,
        task: Task,
        policy: Policy,
        sandbox: Sandbox,
        renderer: Renderer,
        parser: ToolParser | None,
        rules: Rules,
        on_opening: Callable[[Sequence[int]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.session_id = session_id
        self.key = key
        self.task = task
        self.rules = rules
        self.ending = Ending(session_id, client_judges=rules.client_judges)
        self._policy = policy
        self._sandbox = sandbox
        self._renderer = renderer
        self._parser = parser
        self._history = History(renderer)
        self._on_opening = on_opening
        self._clock = clock
        self._busy: set[asyncio.Task[Any]] = set()
        self._last_s = clock()

    @property
    def idle_s(self) -> float:
        """Seconds since the last request ended; 0 while one is answered."""
        return 0.0 if self._busy else self._clock() - self._last_s

    @property
    def told(self) -> dict[str, Any]:
        """What an agent needs to know."""
        return {
            "session_id": self.session_id,
            "rollout_id": self._policy.rollout_id,
            "task_id": self.task.task_id,
            "instruction": self.task.instruction,
            "workdir": self.task.workdir,
            "policy_version": self._policy.policy_version,
            "temperature": self.rules.temperature,
            "max_tokens": self.rules.max_tokens,
            "turns_left": self._policy.turns_left,
            "seconds_left": self._policy.seconds_left,
            "judge": "client" if self.rules.client_judges else "checker",
            "replies": self._history.replies,
            "forks": self._policy.forks,
            "over": self.ending.over.done(),
        }

    async def answer(self, call: Call) -> Answer:
        """Every reply asked for, sampled, captured, and as the client is told it.

        Raises: Refused. What broke the rollout also ends the session.
        """
        if call.tools and self._parser is None:
            raise Refused(
                "tools are given, and the run has no tool parser: set serve.tool_parser to that of the model's family",
                param="tools",
            )
        return await self._while_open(self._answer(call))

    async def count(self, call: Call) -> int:
        """Tokens of a conversation as the model would be shown it. Raises: Refused."""
        return len((await self._while_open(self._ask(call))).prompt_ids)

    async def run(self, script: str, timeout_s: float | None) -> Ran:
        """Run a command in the task's sandbox, which starts at the first one. Raises: Refused."""
        return await self._while_open(self._run(script, timeout_s))

    async def close(self) -> None:
        """Nothing is sampled for it after this. Idempotent."""
        self.ending.close()
        self._policy.close()
        for task in list(self._busy):
            task.cancel()
        if self._busy:
            await asyncio.wait(self._busy)

    async def _while_open(self, work: Coroutine[Any, Any, T]) -> T:
        """Carry out a request; the end of the session cancels it. What breaks the rollout ends the session."""
        if self.ending.over.done() or len(self._busy) >= MOST_AT_ONCE:
            work.close()
            self.ending.refuse_over()
            raise Refused(f"session {self.session_id} has {MOST_AT_ONCE} requests open", status=429)
        task = asyncio.create_task(work, name=f"session-{self.session_id}")
        self._busy.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self.ending.over.done() and not _leaving():
                raise SessionOver(f"session {self.session_id} ended while it was asked") from None
            task.cancel()
            raise
        except Refused:
            raise
        except Exception as error:  # whatever it is, the rollout cannot go on as if it had been answered
            self.ending.break_by(error)
            raise Refused(f"the rollout is broken: {error}", status=503, code="rollout_failed") from error
        finally:
            self._busy.discard(task)
            self._last_s = self._clock()

    async def _ask(self, call: Call) -> Ask:
        if call.prompt is None:
            try:
                return await asyncio.to_thread(self._history.ask, call.messages, tools=call.tools)
            except ChatTemplateError as error:
                raise Refused(error.message, param="messages") from error
        if isinstance(call.prompt, str):
            return await asyncio.to_thread(self._history.ask_text, call.prompt)
        if not all(0 <= token < self.rules.vocabulary for token in call.prompt):
            raise Refused(f"prompt has ids that are not among the model's {self.rules.vocabulary}", param="prompt")
        return await asyncio.to_thread(self._history.ask_ids, call.prompt)

    async def _answer(self, call: Call) -> Answer:
        ask = await self._ask(call)
        if len(ask.prompt_ids) >= self.rules.context_tokens:
            self.ending.limit = LimitReached(
                "context", f"a prompt of {len(ask.prompt_ids)} tokens leaves no room for a reply"
            )
            raise ContextFull(len(ask.prompt_ids), self.rules.context_tokens)
        if self._on_opening is not None and ask.how == "new":
            self._on_opening(ask.prompt_ids)
        if ask.how == "forked":
            self._policy.tell_fork(ask.why)
        found = await asyncio.gather(*(self._choice(call, ask) for _ in range(call.choices)), return_exceptions=True)
        choices = []
        for choice in found:
            if isinstance(choice, BaseException):
                raise choice
            choices.append(choice)
        return Answer(
            answer_id=uuid.uuid4().hex,
            created_s=int(time.time()),
            model=self.rules.model,
            prompt_ids=ask.prompt_ids,
            choices=choices,
            policy_version=self._policy.policy_version,
            how=ask.how,
            why=ask.why,
        )

    async def _choice(self, call: Call, ask: Ask) -> Choice:
        try:
            reply = await self._policy.sample(
                ask.prompt_ids,
                max_tokens=call.max_tokens,
                stop=(*self.rules.stop, *call.stop),
                told=[for_readers(message) for message in ask.shown],
            )
        except LimitReached as reached:
            self.ending.limit = reached
            raise Refused(reached.message, status=403, code=f"{reached.stop}_reached") from reached
        self.ending.limit = None
        shown, stopped_by = _without_stop(reply, call.stop)
        content, calls = await self._calls(shown, call.tools, call.tool_prefix)
        self._history.take(
            ask,
            text=reply.text,
            token_ids=reply.token_ids,
            visible=assistant(content, calls) if call.prompt is None else None,
        )
        return Choice(
            content=content,
            calls=calls,
            finish_reason=reply.finish_reason,
            stopped_by=stopped_by,
            token_ids=reply.token_ids,
            logprobs=reply.logprobs,
            token_texts=await asyncio.to_thread(self._texts, reply.token_ids) if call.token_texts else [],
        )

    def _texts(self, token_ids: Sequence[int]) -> list[str]:
        return [self._renderer.decode([token]) for token in token_ids]

    async def _calls(self, text: str, tools: list[Tool], prefix: str) -> tuple[str, list[ToolCall]]:
        if not tools or self._parser is None:
            return text, []
        content, found = await asyncio.to_thread(self._parser.parse, text, tools)
        calls = [
            ToolCall(call_id=f"{prefix}{uuid.uuid4().hex[:24]}", name=name, arguments=arguments)
            for name, arguments in found
        ]
        return content, calls

    async def _run(self, script: str, timeout_s: float | None) -> Ran:
        limit_s = min(timeout_s or self.rules.command_timeout_s, self.rules.command_timeout_s)
        limit_s = max(0.1, min(limit_s, self._policy.seconds_left))
        result = await self._sandbox.run(Command(script="exec 2>&1; " + script, timeout_s=limit_s))
        return Ran(
            output=(result.stdout + result.stderr).decode(errors="replace"),
            exit_code=result.exit_code,
            timed_out=result.timed_out,
        )


def _leaving() -> bool:
    """Whether it is the asker itself that is cancelled, not what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _without_stop(reply: Reply, stop: Sequence[str]) -> tuple[str, str]:
    """A reply's text up to the first of the request's stop strings, and which it was. OpenAI's clients never see it."""
    if reply.finish_reason != "stop":
        return reply.text, ""
    found = [(at, each) for each in stop if (at := reply.text.find(each)) >= 0]
    if not found:
        return reply.text, ""
    at, which = min(found)
    return reply.text[:at], which
