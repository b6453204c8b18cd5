"""What a request may ask of the sampler, and what it may not: every reply here is trained on.

Place in the flow: between the APIs' requests and a session. Pure. A reply whose tokens were not drawn from the policy
itself, at the run's temperature, has no exact gradient: filters, penalties, biases and forced formats are refused, with
the reason, instead of being ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from thundersync.rollout.dialogue import Tool
from thundersync.serve.chat import Chat
from thundersync.serve.errors import Refused

T = TypeVar("T", bound=Struct)

MOST_CHOICES = 16

_WHY = "every reply is trained on, and has to be drawn from the policy itself"
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
}
"""Parameter -> its values that change nothing."""


class Call(Struct, frozen=True, kw_only=True):
    """A request, whichever API it came by."""

    messages: list[Chat] = []
    prompt: str | list[int] | None = None
    """In the place of messages: a text or token ids to be continued."""
    tools: list[Tool] = []
    tool_prefix: str = "call_"
    """What the ids of tool calls begin with."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    choices: int = 1
    token_texts: bool = False
    """The answer is to tell each token's text."""


def read(kind: type[T], body: Mapping[str, Any]) -> T:
    """A request's body as its struct; parameters that are null are as good as absent. Raises: Refused."""
    given = {name: value for name, value in body.items() if value is not None}
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    for name in given:
        if name not in known:
            raise Refused(f"{name} is not supported here", code="unsupported_parameter", param=name)
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        text, _, place = str(error).replace("`", "").partition(" - at $.")
        missing = text.rpartition(" ")[2] if "missing required" in text else ""
        raise Refused(f"{place or 'the request'}: {text}", param=place or missing) from error


def refuse_inexact(given: Mapping[str, Any], *, temperature: float) -> None:
    """Raises: Refused for parameters under which the reply would not be the policy's own. None: not given."""
    asked = given.get("temperature")
    if asked is not None and asked != temperature:
        raise Refused(
            f"temperature = {asked:g} is not the run's: {_WHY} at rollout.temperature = {temperature:g}; send that, or "
            "none",
            code="inexact_sampling",
            param="temperature",
        )
    for name, neutral in _NEUTRAL.items():
        value = given.get(name)
        if value is not None and value not in neutral:
            raise Refused(
                f"{name} = {value} would change the policy: {_WHY}; leave it out", code="inexact_sampling", param=name
            )
    if given.get("seed") is not None:
        raise Refused("seed is not supported: leave it out", code="unsupported_parameter", param="seed")


def stop_strings(given: str | Sequence[str] | None, name: str = "stop") -> tuple[str, ...]:
    """Raises: Refused for an empty stop string."""
    found = (given,) if isinstance(given, str) else tuple(given or ())
    if any(not each for each in found):
        raise Refused(f"{name} holds an empty string", param=name)
    return found


def choices(n: int | None) -> int:
    if n is not None and not 1 <= n <= MOST_CHOICES:
        raise Refused(f"n = {n} is not between 1 and {MOST_CHOICES}", param="n")
    return n or 1


def positive(value: int | None, name: str) -> int | None:
    if value is not None and value < 1:
        raise Refused(f"{name} = {value}: a reply has at least one token", param=name)
    return value


def declared(tools: Iterable[Any], where: str = "tools") -> list[Tool]:
    """Tools as chat templates take them. Raises: Refused for what is no function."""
    found: list[Tool] = []
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or tool.get("type") != "function"
        ):
            raise Refused(f"{where}[{index}] is no function", param=f"{where}[{index}]")
        # `strict` asks for constrained decoding, which the templates do not know either.
        if function.get("strict"):
            raise Refused(f"{where}[{index}].function.strict would constrain the policy: {_WHY}", param="tools")
        plain = {key: value for key, value in function.items() if key != "strict"}
        found.append({"type": "function", "function": plain})
    return found
