"""Anthropic's messages: requests into calls, answers into responses and streams.

Place in the flow: beside `openai_api`, between HTTP and a session. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from thundersync.serve.answers import Answer, Choice
from thundersync.serve.chat import Chat, ToolCall, assistant, parsed, text_of
from thundersync.serve.errors import Refused
from thundersync.serve.parameters import Call, declared, positive, read, refuse_inexact, stop_strings


class MessagesRequest(Struct, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_tokens: int
    model: str = ""
    system: str | list[dict[str, Any]] = ""
    stream: bool = False
    stop_sequences: list[str] = []
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: dict[str, Any] = {}
    thinking: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    service_tier: str = ""


class CountRequest(Struct, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    model: str = ""
    system: str | list[dict[str, Any]] = ""
    tools: list[dict[str, Any]] = []
    tool_choice: dict[str, Any] = {}
    thinking: dict[str, Any] = {}


def messages_call(body: Mapping[str, Any], *, temperature: float) -> tuple[MessagesRequest, Call]:
    """Raises: Refused."""
    request = read(MessagesRequest, body)
    refuse_inexact(msgspec.structs.asdict(request), temperature=temperature)
    if request.thinking.get("type", "disabled") != "disabled":
        raise Refused("thinking is not supported: the policy thinks in its text if it thinks", param="thinking")
    call = Call(
        messages=_conversation(request.system, request.messages),
        tools=_tools(request.tools, request.tool_choice),
        tool_prefix="toolu_",
        max_tokens=positive(request.max_tokens, "max_tokens"),
        stop=stop_strings(request.stop_sequences, "stop_sequences"),
    )
    if request.messages[-1].get("role") == "assistant":
        raise Refused("the last message is the assistant's: beginnings of replies are not supported", param="messages")
    return request, call


def count_call(body: Mapping[str, Any]) -> Call:
    """What `count_tokens` asks about. Raises: Refused."""
    request = read(CountRequest, body)
    return Call(
        messages=_conversation(request.system, request.messages), tools=_tools(request.tools, request.tool_choice)
    )


def messages_response(request: MessagesRequest, answer: Answer) -> dict[str, Any]:
    (choice,) = answer.choices
    return _message(request, answer) | {
        "content": _blocks(choice),
        "stop_reason": _stop_reason(choice),
        "stop_sequence": choice.stopped_by or None,
        "usage": _usage(answer, len(choice.token_ids)),
    }


def messages_events(request: MessagesRequest, answer: Answer) -> Iterator[dict[str, Any]]:
    """The same answer as the events of a stream; each event's `type` is its name."""
    (choice,) = answer.choices
    begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(answer, 0)}
    yield {"type": "message_start", "message": _message(request, answer) | begun}
    for index, block in enumerate(_blocks(choice)):
        if block["type"] == "text":
            start: dict[str, Any] = {"type": "text", "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            start = block | {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": msgspec.json.encode(block["input"]).decode()}
        yield {"type": "content_block_start", "index": index, "content_block": start}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {"stop_reason": _stop_reason(choice), "stop_sequence": choice.stopped_by or None}
    yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": len(choice.token_ids)}}
    yield {"type": "message_stop"}


def _conversation(system: str | list[dict[str, Any]], given: Sequence[Mapping[str, Any]]) -> list[Chat]:
    if not given:
        raise Refused("messages is empty", param="messages")
    messages: list[Chat] = []
    if system:
        messages.append({"role": "system", "content": text_of(system, "system")})
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        match message.get("role"):
            case "user":
                messages += _from_user(message.get("content"), where)
            case "assistant":
                messages.append(_from_assistant(message.get("content"), where))
            case other:
                raise Refused(f'{where}.role = {other!r} is neither "user" nor "assistant"', param=f"{where}.role")
    return messages


def _from_user(content: Any, where: str) -> list[Chat]:
    """Results of tools are messages of their own, before what else the user says."""
    if not isinstance(content, list):
        return [{"role": "user", "content": text_of(content, where)}]
    results = [part for part in content if isinstance(part, dict) and part.get("type") == "tool_result"]
    rest = [part for part in content if part not in results]
    messages: list[Chat] = [
        {
            "role": "tool",
            "content": text_of(part.get("content"), f"{where}.tool_result"),
            "tool_call_id": str(part.get("tool_use_id", "")),
        }
        for part in results
    ]
    if rest or not results:
        messages.append({"role": "user", "content": text_of(rest, where)})
    return messages


def _from_assistant(content: Any, where: str) -> Chat:
    if not isinstance(content, list):
        return assistant(text_of(content, where))
    uses = [part for part in content if isinstance(part, dict) and part.get("type") == "tool_use"]
    rest = [part for part in content if part not in uses]
    calls = [
        ToolCall(
            call_id=str(use.get("id", "")),
            name=str(use.get("name", "")),
            arguments=msgspec.json.encode(use.get("input", {})).decode(),
        )
        for use in uses
    ]
    return assistant(text_of(rest, where), calls)


def _tools(given: Sequence[Mapping[str, Any]], choice: Mapping[str, Any]) -> list[Any]:
    if choice.get("type", "auto") not in ("auto", "none") or choice.get("disable_parallel_tool_use"):
        raise Refused('tool_choice would constrain the policy: use "auto" or "none"', param="tool_choice")
    if choice.get("type") == "none":
        return []
    functions = []
    for index, tool in enumerate(given):
        if tool.get("type", "custom") != "custom":
            raise Refused(f"tools[{index}] is a tool of Anthropic's own, which is not here", param=f"tools[{index}]")
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema", {"type": "object"})}
        if tool.get("description"):
            function["description"] = tool["description"]
        functions.append({"type": "function", "function": function})
    return declared(functions)


def _message(request: MessagesRequest, answer: Answer) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.answer_id}",
        "type": "message",
        "role": "assistant",
        "model": request.model or answer.model,
    }


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if choice.content or not choice.calls:
        blocks.append({"type": "text", "text": choice.content})
    for call in choice.calls:
        arguments = parsed(call.arguments)
        # The API knows objects only; a call that is no JSON is told as what it is.
        inputs = arguments if isinstance(arguments, dict) else {"arguments": arguments}
        blocks.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": inputs})
    return blocks


def _stop_reason(choice: Choice) -> str:
    if choice.calls:
        return "tool_use"
    if choice.stopped_by:
        return "stop_sequence"
    return "end_turn" if choice.finish_reason == "stop" else "max_tokens"


def _usage(answer: Answer, output_tokens: int) -> dict[str, Any]:
    return {"input_tokens": len(answer.prompt_ids), "output_tokens": output_tokens}
