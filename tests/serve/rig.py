"""An endpoint on a real socket over a scripted engine and a real tokenizer: every id of the engine is known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.fakes import FakeGenerator, FakeRuntime, Feed, Script, a_task
from tests.rollout.test_dialogue import ASK, TURN
from tests.tiny import tiny_tokenizer
from thundersync.config import RolloutConfig
from thundersync.core.types import Rollout, Task
from thundersync.rollout.dialogue import Renderer
from thundersync.rollout.functions import FunctionAgent
from thundersync.score.judge import CheckerJudge
from thundersync.score.reward import RewardChecker
from thundersync.serve.absence import Absence
from thundersync.serve.agents import SessionAgent, Visitors, Who
from thundersync.serve.desk import Desk
from thundersync.serve.server import Endpoint
from thundersync.serve.session import Rules, ToolParser

KEY = "the-runs-key"
# As Qwen's: tools are declared first, an assistant's calls are written out, results are the user's.
QWEN = (
    "{% if tools %}{{ '<|im_start|>system\n# Tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m['content'] + '\n</tool_response><|im_end|>\n' }}"
    "{% elif m['tool_calls'] %}{{ '<|im_start|>assistant\n' + m['content'] }}{% for c in m['tool_calls'] %}"
    "{{ '\n<tool_call>\n' + (c['function'] | tojson) + '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% else %}" + TURN % "m['content']" + "{% endif %}{% endfor %}" + ASK
)


def tokenizer(folder: Path, template: str = QWEN) -> Any:
    from transformers import PreTrainedTokenizerFast

    found = PreTrainedTokenizerFast.from_pretrained(str(tiny_tokenizer(folder)))
    found.chat_template = template
    return found


class JsonCalls:
    """A tool parser: a reply that is JSON with a name is a call of it."""

    def parse(self, text: str, tools: Any) -> tuple[str, list[tuple[str, str]]]:
        before, mark, body = text.partition("CALL ")
        if not mark:
            return text, []
        call = json.loads(body)
        return before, [(call["name"], json.dumps(call["arguments"]))]


class Rig:
    """`rollout()` offers one; `take()` takes it as a program would; `done()` is what became of it."""

    def __init__(self, script: Script, tok: Any, *, verdict: bytes = b"1\n", **settings: Any) -> None:
        self.tokenizer = tok
        self.renderer = Renderer(tok)
        self.engine = FakeGenerator(script, tokenizer=tok, max_model_len=settings.get("context_tokens", 4096))
        self.runtime = FakeRuntime(verdict=verdict)
        self.feed = Feed()
        self.warned: list[str] = []
        absence = Absence(where=lambda: self.endpoint.url, stall_timeout_s=3600.0, warn=self.warned.append)
        self.desk = Desk(key=KEY, absence=absence)
        self.endpoint = Endpoint(
            self.desk,
            host=settings.get("host", "127.0.0.1"),
            port=0,
            model="tiny",
            context_tokens=settings.get("context_tokens", 4096),
            max_body_bytes=settings.get("max_body_bytes", 1 << 20),
            public_url=settings.get("public_url", ""),
            ping_s=settings.get("ping_s", 10.0),
        )
        self.config = settings.get("config", RolloutConfig(max_tokens=200))
        parser: ToolParser | None = settings.get("parser", JsonCalls())
        who: Who = settings.get("who") or Visitors(idle_timeout_s=settings.get("idle_timeout_s", 60.0))
        checker = RewardChecker()
        self.agent = SessionAgent(
            self.desk,
            who,
            inner=lambda function, judge: FunctionAgent(
                function,
                renderer=self.renderer,
                runtime=self.runtime,
                checker=checker,
                judge=judge or CheckerJudge(checker),
                config=self.config,
                prompt=[],
                emit=self.feed,
            ),
            renderer=self.renderer,
            parser=parser,
            rules=Rules(
                model="tiny",
                context_tokens=settings.get("context_tokens", 4096),
                vocabulary=384,
                temperature=self.config.temperature,
                max_tokens=self.config.max_tokens,
                stop=self.config.stop,
                command_timeout_s=self.config.command_timeout_s,
                client_judges=settings.get("client_judges", True),
            ),
            verdict_s=settings.get("verdict_s", 5.0),
        )
        self.running: list[asyncio.Task[Rollout]] = []
        self.http: aiohttp.ClientSession
        self.base = ""
        """Where it is found, if not where it says that it is."""

    def rollout(self, task: Task | None = None, *, attempt: int = 1) -> asyncio.Task[Rollout]:
        number = len(self.running)
        running = asyncio.create_task(
            self.agent.run(
                task or a_task(),
                rollout_id=f"000000-00-{number:02d}",
                group_id="000000-00",
                generator=self.engine,
                policy_version=0,
                attempt=attempt,
            )
        )
        self.running.append(running)
        return running

    async def open(self, task: Task | None = None) -> dict[str, Any]:
        """Offer a rollout and take it."""
        self.rollout(task)
        return await self.take()

    async def until(self, condition: Callable[[], Any]) -> None:
        """Let others work until it is so."""
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.001)

    async def take(self) -> dict[str, Any]:
        status, told = await self.post("/sessions", key=KEY)
        assert status == 201, (status, told)
        return told

    async def post(self, path: str, body: Any = None, *, key: str, **headers: str) -> tuple[int, Any]:
        async with self.http.post(
            (self.base or self.endpoint.url) + path, json=body, headers={"Authorization": f"Bearer {key}", **headers}
        ) as response:
            text = await response.text()
            return response.status, json.loads(text) if text else None

    async def reward(self, session: dict[str, Any], reward: float = 1.0) -> Rollout:
        """Post it, and give the rollout that comes of it."""
        status, told = await self.post(
            f"/sessions/{session['session_id']}/reward", {"reward": reward}, key=session["api_key"]
        )
        assert status == 200, told
        return await self.running[int(session["rollout_id"].split("-")[2])]


@asynccontextmanager
async def rig(script: Script, tok: Any, **settings: Any) -> AsyncIterator[Rig]:
    made = Rig(script, tok, **settings)
    await made.endpoint.start()
    async with aiohttp.ClientSession() as made.http:
        try:
            yield made
        finally:
            for each in made.running:
                each.cancel()
            await asyncio.gather(*made.running, return_exceptions=True)
            await made.endpoint.close()
            assert not made.runtime.open and not made.engine.running and not made.desk.open


def assert_captured(made: Rig, rollout: Rollout, logprob: float = -0.5) -> None:
    """The rollout's sequences are what the engine was given and what it gave, token by token, each sampled once."""
    asked = {each.turn: each for each in made.engine.asked if each.rollout_id == rollout.rollout_id}
    for turn in rollout.turns:
        ids = rollout.sequences[turn.sequence].token_ids
        assert asked[turn.index].prompt_ids == ids[: turn.start]
        sequence = rollout.sequences[turn.sequence]
        assert all(sequence.sampled[turn.start : turn.end])
        assert sequence.logprobs[turn.start : turn.end] == [logprob] * (turn.end - turn.start)
        assert turn.message is not None and turn.conversation <= turn.message
        said = rollout.messages[turn.message]
        assert said.role == "assistant" and said.content in made.renderer.decode(ids[turn.start : turn.end])
    for index, sequence in enumerate(rollout.sequences):
        spans = [(turn.start, turn.end) for turn in rollout.turns if turn.sequence == index]
        assert sum(sequence.sampled) == sum(end - start for start, end in spans)
        assert len(sequence.token_ids) == max(end for _, end in spans)
