"""The endpoint: HTTP in front of the desk, on the coordinator's own event loop.

Place in the flow: outside agents speak OpenAI's or Anthropic's language to it; what it answers comes from sessions.
Every request carries a key. Nothing here decides what a rollout is; no request outlives its client.

A reply is told when it is whole: engines give replies whole, and tool calls are read from whole replies. A stream
therefore begins at once, is kept alive while the reply is sampled, and then brings it in a few pieces.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct

from thundersync.errors import ConfigError
from thundersync.serve import anthropic_api, openai_api
from thundersync.serve.answers import Answer
from thundersync.serve.desk import Desk
from thundersync.serve.errors import Refused
from thundersync.serve.http import Events, as_json, body_of, history_headers, key_of, read, refusals, stream
from thundersync.serve.program import program_environment
from thundersync.serve.session import Session

SESSION_HEADER = "X-Thundersync-Session"
PING_S = 10.0
"""Between signs of life in a stream."""
MOST_WAIT_S = 300.0
"""Of one request for a rollout."""
SHUTDOWN_S = 2.0
LOOKUP_S = 5.0
"""For this machine's own name."""


class Reward(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an agent that judges itself posts."""

    reward: float
    rewards: dict[str, float] = {}


class End(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An agent is done; with `error`, because it or its world failed."""

    error: str = ""


class RunCommand(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command for the session's sandbox."""

    command: str
    timeout_s: float | None = None


class Endpoint:
    """Serves from `start` until `close`. `model` and `context_tokens` are what it says of the policy.

    `public_url` is where programs find it; without one, that is where each has found it.
    """

    def __init__(
        self,
        desk: Desk,
        *,
        host: str,
        port: int,
        model: str,
        context_tokens: int,
        max_body_bytes: int,
        public_url: str = "",
        ping_s: float = PING_S,
    ) -> None:
        self._desk = desk
        self._host, self._port = host, port
        self._model = model
        self._context_tokens = context_tokens
        self._max_body_bytes = max_body_bytes
        self._public_url = public_url.rstrip("/")
        self._ping_s = ping_s
        self._runner: web.AppRunner | None = None
        self.url = ""
        """Where it is, once it has started, as other machines would say it."""
        self.local_url = ""
        """The same for programs on this machine."""

    async def start(self) -> str:
        """Listen; returns the URL. Raises: ConfigError where the address cannot be had."""
        runner = web.AppRunner(
            self._app(), handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S, handle_signals=False
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port).start()
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(
                f"the endpoint cannot listen at {self._host}:{self._port}: {error.strerror or error}",
                remedy="Choose another serve.port (0 takes a free one), or an address of this machine for serve.host.",
            ) from error
        self._runner = runner
        host, port = runner.addresses[0][:2]
        self.url = self._public_url or _url(await _reachable(host), port)
        self.local_url = self._public_url or _url(_LOOPBACK.get(host, host), port)
        return self.url

    async def close(self) -> None:
        """Programs that wait are told that the run is over; whatever is still open ends. Idempotent."""
        await self._desk.end()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[refusals])
        for prefix in ("", "/sessions/{session}"):
            app.router.add_get(prefix + "/v1/models", self._models)
            app.router.add_post(prefix + "/v1/chat/completions", self._chat)
            app.router.add_post(prefix + "/v1/completions", self._completions)
            app.router.add_post(prefix + "/v1/messages", self._messages)
            app.router.add_post(prefix + "/v1/messages/count_tokens", self._count)
        app.router.add_post("/sessions", self._take)
        app.router.add_get("/sessions", self._list)
        app.router.add_get("/sessions/{session}", self._status)
        app.router.add_post("/sessions/{session}/run", self._run)
        app.router.add_post("/sessions/{session}/reward", self._reward)
        app.router.add_post("/sessions/{session}/end", self._end)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        if "session" in request.match_info:
            self._session(request)
        else:
            self._need_key(request)
        return as_json(openai_api.models(self._model, self._context_tokens))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session, body = self._session(request), await body_of(request)
        asked, call = openai_api.chat_call(body, temperature=session.rules.temperature)
        return await self._say(
            request,
            session.answer(call),
            streamed=asked.stream,
            whole=lambda answer: openai_api.chat_response(asked, answer),
            events=lambda answer: _unnamed(openai_api.chat_chunks(asked, answer)),
            end=_DONE,
        )

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        session, body = self._session(request), await body_of(request)
        asked, call = openai_api.completion_call(body, temperature=session.rules.temperature)
        return await self._say(
            request,
            session.answer(call),
            streamed=asked.stream,
            whole=lambda answer: openai_api.completion_response(asked, answer),
            events=lambda answer: _unnamed(openai_api.completion_chunks(asked, answer)),
            end=_DONE,
        )

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        session, body = self._session(request), await body_of(request)
        asked, call = anthropic_api.messages_call(body, temperature=session.rules.temperature)
        return await self._say(
            request,
            session.answer(call),
            streamed=asked.stream,
            whole=lambda answer: anthropic_api.messages_response(asked, answer),
            events=lambda answer: ((event["type"], event) for event in anthropic_api.messages_events(asked, answer)),
        )

    async def _say(
        self,
        request: web.Request,
        work: Awaitable[Answer],
        *,
        streamed: bool,
        whole: Callable[[Answer], dict[str, Any]],
        events: Callable[[Answer], Events],
        end: bytes = b"",
    ) -> web.StreamResponse:
        """One answer, as a stream of events or in one piece."""
        if streamed:
            return await stream(request, work, events, end=end, ping_s=self._ping_s)
        answer = await work
        return as_json(whole(answer), history_headers(answer))

    async def _count(self, request: web.Request) -> web.Response:
        session = self._session(request)
        return as_json({"input_tokens": await session.count(anthropic_api.count_call(await body_of(request)))})

    async def _take(self, request: web.Request) -> web.Response:
        """The next rollout for whoever asks; nothing (204) if none comes in time."""
        self._need_key(request)
        try:
            wait_s = float(request.query.get("wait_s", "30"))
        except ValueError as error:
            raise Refused("wait_s is no number", param="wait_s") from error
        if not 0.0 <= wait_s <= MOST_WAIT_S:
            raise Refused(f"wait_s = {wait_s:g} is not between 0 and {MOST_WAIT_S:g}", param="wait_s")
        session = await self._desk.take(wait_s)
        if session is None:
            return web.Response(status=204)
        return as_json(self._told_of(session, self._found_at(request)), status=201)

    async def _list(self, request: web.Request) -> web.Response:
        self._need_key(request)
        return as_json({"sessions": [each.told for each in self._desk.open], "waiting": self._desk.waiting})

    async def _status(self, request: web.Request) -> web.Response:
        return as_json(self._session(request).told)

    async def _run(self, request: web.Request) -> web.Response:
        session, asked = self._session(request), read(await body_of(request), RunCommand)
        if asked.timeout_s is not None and not asked.timeout_s > 0:
            raise Refused(f"timeout_s = {asked.timeout_s} is not above zero", param="timeout_s")
        return as_json(msgspec.structs.asdict(await session.run(asked.command, asked.timeout_s)))

    async def _reward(self, request: web.Request) -> web.Response:
        session, asked = self._session(request), read(await body_of(request), Reward)
        session.ending.reward(asked.reward, asked.rewards)
        return as_json({"over": True})

    async def _end(self, request: web.Request) -> web.Response:
        session, asked = self._session(request), read(await body_of(request, optional=True), End)
        if asked.error:
            session.ending.fail(asked.error)
        else:
            session.ending.end()
        return as_json({"over": True})

    def _found_at(self, request: web.Request) -> str:
        """The base URL that this client gets here by: whatever it called us, it is told the same, and nobody else is.

        What a proxy says of the way before it (X-Forwarded-...) anybody can say: that is for `public_url`.
        """
        host = request.headers.get("Host", "")
        if self._public_url or not _HOST.fullmatch(host):
            return self.url
        return f"{request.scheme}://{host}"

    def _told_of(self, session: Session, url: str) -> dict[str, Any]:
        environment = program_environment(session, url)
        return session.told | {
            "url": environment["THUNDERSYNC_SESSION_URL"],
            "openai_base_url": environment["OPENAI_BASE_URL"],
            "anthropic_base_url": environment["ANTHROPIC_BASE_URL"],
            "api_key": session.key,
            "model": self._model,
        }

    def _session(self, request: web.Request) -> Session:
        name = request.match_info.get("session") or request.headers.get(SESSION_HEADER, "")
        key = key_of(request)
        if not name:
            self._need_key(request)
            raise Refused(
                f"no session is named: take one with POST /sessions, and send {SESSION_HEADER} or use its base URL",
                code="no_session",
            )
        return self._desk.session(name, key)

    def _need_key(self, request: web.Request) -> None:
        if not self._desk.admits(key_of(request)):
            raise Refused("this key opens nothing here", status=401, code="invalid_api_key")


_DONE = b"data: [DONE]\n\n"
_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that mean every address of this machine, and where it reaches itself by them."""


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _reachable(host: str) -> str:
    """An address that can be gone to: for one that means all of them, this machine's name, if that leads here."""
    if host not in _LOOPBACK:
        return host
    name, family = socket.gethostname(), socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        async with asyncio.timeout(LOOKUP_S):
            await asyncio.get_running_loop().getaddrinfo(name, None, family=family)
    except (OSError, UnicodeError):  # TimeoutError is an OSError
        return _LOOPBACK[host]
    return name


def _unnamed(chunks: Iterable[Any]) -> Events:
    return (("", chunk) for chunk in chunks)
