"""What all routes share: bodies in, JSON and streams out, and refusals in the shape of the API that was spoken.

Place in the flow: below `server`. Knows nothing of sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from thundersync.serve.answers import Answer
from thundersync.serve.errors import Refused

HISTORY_HEADER = "X-Thundersync-History"
REASON_HEADER = "X-Thundersync-Fork-Reason"
LARGE_BYTES = 1 << 20
"""A body that takes longer to decode than the event loop may be held."""

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Events = Iterable[tuple[str, Any]]
"""Of a stream: their name, empty for none, and what they hold."""


@web.middleware
async def refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refusals in the shape that the request's API has."""
    try:
        return await handler(request)
    except Refused as refused:
        shown = refused
    except web.HTTPRequestEntityTooLarge:
        shown = Refused("the request is larger than serve.max_body_mib", status=413, code="request_too_large")
    except web.HTTPNotFound:
        shown = Refused(f"there is nothing at {request.path}", status=404, code="not_found")
    except web.HTTPMethodNotAllowed as error:
        shown = Refused(f"{request.method} is not what {request.path} takes", status=error.status)
    return as_json(shown.anthropic() if _speaks_anthropic(request) else shown.openai(), status=shown.status)


def key_of(request: web.Request) -> str:
    """As OpenAI's clients send it, or as Anthropic's."""
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    return bearer.strip() if scheme.lower() == "bearer" else request.headers.get("X-Api-Key", "")


async def body_of(request: web.Request, *, optional: bool = False) -> Mapping[str, Any]:
    """Raises: Refused for what is no JSON object."""
    raw = await request.read()
    if optional and not raw:
        return {}
    try:
        found = (
            msgspec.json.decode(raw) if len(raw) < LARGE_BYTES else await asyncio.to_thread(msgspec.json.decode, raw)
        )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(f"the request is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise Refused("the request is no JSON object")
    return found


def read(body: Mapping[str, Any], kind: type[T]) -> T:
    """One of our own requests. Raises: Refused."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise Refused(str(error).replace("`", "")) from error


def as_json(value: Any, headers: Mapping[str, str] | None = None, *, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), content_type="application/json", status=status, headers=headers
    )


def history_headers(answer: Answer) -> dict[str, str]:
    """How the request's conversation fits what was captured."""
    return {HISTORY_HEADER: answer.how} | ({REASON_HEADER: answer.why} if answer.why else {})


async def stream(
    request: web.Request,
    work: Awaitable[Answer],
    events: Callable[[Answer], Events],
    *,
    end: bytes = b"",
    ping_s: float,
) -> web.StreamResponse:
    """Server-sent events. What is refused at once is refused as usual; later, as an event of the stream."""
    anthropic = _speaks_anthropic(request)
    answering = asyncio.ensure_future(work)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    try:
        await asyncio.wait({answering}, timeout=ping_s)
        if answering.done():
            response.headers.update(history_headers(answering.result()))
        await response.prepare(request)
        while not answering.done():
            await response.write(_event("ping", {"type": "ping"}) if anthropic else b": still sampling\n\n")
            await asyncio.wait({answering}, timeout=ping_s)
        try:
            for name, event in events(answering.result()):
                await response.write(_event(name, event))
            await response.write(end)
        except Refused as refused:
            await response.write(_event("error", refused.anthropic()) if anthropic else _event("", refused.openai()))
        await response.write_eof()
    finally:
        if not answering.done():
            answering.cancel()
            await asyncio.wait({answering})
    return response


def _speaks_anthropic(request: web.Request) -> bool:
    return "/v1/messages" in request.path


def _event(name: str, data: Any) -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"
