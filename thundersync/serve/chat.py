"""Messages in the one form that chat templates take, whichever API they came by, and when two of them are the same.

Place in the flow: below the two APIs, above `history`. Pure. Knows nothing of tokens, sessions or HTTP.

A message is a plain dictionary: `role`, `content` (text), and where it has them `tool_calls`, `tool_call_id`, `name`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import msgspec
from msgspec import Struct

from thundersync.core.types import Message
from thundersync.serve.errors import Refused

Chat: TypeAlias = dict[str, Any]

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""OpenAI's role -> the template's: few templates know developers."""

_REASONING = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)


class ToolCall(Struct, frozen=True, kw_only=True):
    """One call that a reply asks for."""

    call_id: str
    name: str
    arguments: str
    """JSON, as the tool parser gave it."""


def assistant(content: str, calls: Sequence[ToolCall] = ()) -> Chat:
    """A reply as a client is told it, and as it sends it back."""
    message: Chat = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                # Templates write the arguments out themselves.
                "function": {"name": call.name, "arguments": parsed(call.arguments)},
            }
            for call in calls
        ]
    return message


def from_openai(given: Sequence[Mapping[str, Any]]) -> list[Chat]:
    """Raises: Refused for what is no message, or no text."""
    if not given:
        raise Refused("messages is empty", param="messages")
    return [_from_openai(message, f"messages[{index}]") for index, message in enumerate(given)]


def text_of(content: Any, where: str) -> str:
    """The text of a message's content, which may be given in parts. Raises: Refused for images, sound, files."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(f"{where} is neither text nor a list of parts", param=where)
    texts = []
    for index, part in enumerate(content):
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise Refused(f"{where}[{index}] is of type {kind!r}: the policy reads text only", param=where)
        texts.append(text)
    return "\n".join(texts)


def parsed(arguments: str) -> Any:
    """A call's arguments as an object; the text itself where it is no JSON object."""
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):  # the latter: brackets without end
        return arguments
    return found if isinstance(found, dict) else arguments


def keys(messages: Sequence[Chat]) -> list[bytes]:
    """One digest for each beginning of a conversation, the empty one first: equal exactly if the beginnings are."""
    found = [b""]
    for message in messages:
        found.append(extended(found[-1], message))
    return found


def extended(key: bytes, message: Chat) -> bytes:
    """The digest of a conversation with one more message.

    Of an assistant's text, leading reasoning and the space around it do not count: clients drop them when they send
    it back, and the model is shown what it said in any case.
    """
    content = message["content"]
    if message["role"] == "assistant":
        content = _REASONING.sub("", content).strip()
    plain = [
        message["role"],
        content,
        message.get("tool_calls", []),
        message.get("tool_call_id", ""),
        message.get("name", ""),
    ]
    return hashlib.blake2b(key + msgspec.json.encode(plain, order="deterministic"), digest_size=16).digest()


def for_readers(message: Chat) -> Message:
    """The message as the run's files keep it: calls as text behind the content."""
    text: str = message["content"]
    for call in message.get("tool_calls", []):
        text += f"\n{msgspec.json.encode(call['function']).decode()}"
    return Message(role=message["role"], content=text.strip("\n") if message.get("tool_calls") else text)


def _from_openai(given: Mapping[str, Any], where: str) -> Chat:
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise Refused(f"{where}.role = {role!r} is none of {', '.join(ROLES)}", param=f"{where}.role")
    message: Chat = {"role": ROLES[role], "content": text_of(given.get("content"), f"{where}.content")}
    if given.get("function_call"):
        raise Refused(f"{where}.function_call is the old form: use tool_calls", param=f"{where}.function_call")
    if role == "assistant" and given.get("tool_calls"):
        message["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(given["tool_calls"])
        ]
    for key in ("tool_call_id", "name"):
        if given.get(key):
            message[key] = str(given[key])
    return message


def _call(given: Any, where: str) -> Chat:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(f"{where} is no call of a function", param=where)
    arguments = function.get("arguments") or "{}"
    return cast(
        Chat,
        {
            "id": str(given.get("id") or ""),
            "type": "function",
            "function": {
                "name": function["name"],
                "arguments": parsed(arguments) if isinstance(arguments, str) else arguments,
            },
        },
    )
