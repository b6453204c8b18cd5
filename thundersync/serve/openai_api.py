"""OpenAI's chat completions and completions: requests into calls, answers into responses and streams.

Place in the flow: between HTTP and a session. Pure. Knows nothing of tokens but their ids, and nothing of sessions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from thundersync.serve.answers import Answer, Choice
from thundersync.serve.chat import from_openai
from thundersync.serve.errors import Refused
from thundersync.serve.parameters import (
    Call,
    choices,
    declared,
    positive,
    read,
    refuse_inexact,
    stop_strings,
)

_FINISH = {"stop": "stop", "length": "length", "context": "length"}


class _Shared(Struct, frozen=True, kw_only=True):
    model: str = ""
    stream: bool = False
    stream_options: dict[str, Any] = {}
    n: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    return_token_ids: bool = False
    """As vLLM's: the response tells the exact ids."""
    user: str = ""
    metadata: dict[str, Any] = {}
    store: bool = False

    def refuse(self, temperature: float) -> None:
        refuse_inexact(msgspec.structs.asdict(self), temperature=temperature)
        if unknown := sorted(set(self.stream_options) - {"include_usage", "include_obfuscation"}):
            raise Refused(f"stream_options.{unknown[0]} is not supported", param="stream_options")


class ChatRequest(_Shared, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] = {}
    logprobs: bool = False
    top_logprobs: int | None = None
    safety_identifier: str = ""
    prompt_cache_key: str = ""
    service_tier: str = ""
    modalities: list[str] = []


class CompletionRequest(_Shared, frozen=True, kw_only=True):
    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None


def chat_call(body: Mapping[str, Any], *, temperature: float) -> tuple[ChatRequest, Call]:
    """Raises: Refused."""
    request = read(ChatRequest, body)
    request.refuse(temperature)
    if request.response_format.get("type", "text") != "text":
        raise Refused(
            "response_format would constrain the policy, and every reply is trained on: leave it out",
            code="inexact_sampling",
            param="response_format",
        )
    if request.tool_choice not in (None, "auto", "none"):
        raise Refused(
            f'tool_choice = {request.tool_choice!r} would constrain the policy: use "auto" or "none"',
            code="inexact_sampling",
            param="tool_choice",
        )
    if request.parallel_tool_calls is False:
        raise Refused(
            "parallel_tool_calls = false would constrain the policy: leave it out",
            code="inexact_sampling",
            param="parallel_tool_calls",
        )
    if request.top_logprobs:
        raise Refused("only the sampled tokens' logprobs are known: top_logprobs = 0", param="top_logprobs")
    if request.modalities not in ([], ["text"]):
        raise Refused("the policy writes text only", param="modalities")
    call = Call(
        messages=from_openai(request.messages),
        tools=declared(request.tools) if request.tool_choice != "none" else [],
        max_tokens=positive(request.max_completion_tokens, "max_completion_tokens")
        or positive(request.max_tokens, "max_tokens"),
        stop=stop_strings(request.stop),
        choices=choices(request.n),
        token_texts=request.logprobs,
    )
    return request, call


def completion_call(body: Mapping[str, Any], *, temperature: float) -> tuple[CompletionRequest, Call]:
    """Raises: Refused."""
    request = read(CompletionRequest, body)
    request.refuse(temperature)
    for name, neutral in (("echo", (False,)), ("best_of", (None, 1)), ("suffix", (None, ""))):
        if getattr(request, name) not in neutral:
            raise Refused(f"{name} is not supported", code="unsupported_parameter", param=name)
    if request.logprobs:
        raise Refused("only the sampled tokens' logprobs are known: logprobs = 0", param="logprobs")
    call = Call(
        prompt=_one_prompt(request.prompt),
        max_tokens=positive(request.max_tokens, "max_tokens"),
        stop=stop_strings(request.stop),
        choices=choices(request.n),
        token_texts=request.logprobs is not None,
    )
    return request, call


def _one_prompt(given: str | list[Any]) -> str | list[int]:
    if isinstance(given, list) and given and isinstance(given[0], str | list):
        if len(given) > 1:
            raise Refused(f"{len(given)} prompts in one request: send one", param="prompt")
        given = given[0]
    if not given:
        raise Refused("prompt is empty", param="prompt")
    if isinstance(given, list) and not all(type(token) is int for token in given):
        raise Refused("prompt is neither text nor token ids", param="prompt")
    return given


def chat_response(request: ChatRequest, answer: Answer) -> dict[str, Any]:
    found = []
    for index, choice in enumerate(answer.choices):
        message: dict[str, Any] = {"role": "assistant", "content": choice.content or None, "refusal": None}
        if choice.calls:
            message["tool_calls"] = _calls(choice)
        else:
            message["content"] = choice.content
        found.append(
            {
                "index": index,
                "message": message,
                "finish_reason": _finish(choice),
                "logprobs": _chat_logprobs(choice) if request.logprobs else None,
                **_told_ids(request, choice),
            }
        )
    return _head(answer, "chat.completion", "chatcmpl", request.model) | {
        "choices": found,
        "usage": _usage(answer),
        **({"prompt_token_ids": answer.prompt_ids} if request.return_token_ids else {}),
    }


def chat_chunks(request: ChatRequest, answer: Answer) -> Iterator[dict[str, Any]]:
    """The same answer as the pieces of a stream."""
    head = _head(answer, "chat.completion.chunk", "chatcmpl", request.model)

    def chunk(index: int, delta: dict[str, Any], more: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": None}
        return head | {"choices": [choice | more]}

    for index, choice in enumerate(answer.choices):
        first: dict[str, Any] = {"role": "assistant", "content": ""}
        yield chunk(index, first, {}) | ({"prompt_token_ids": answer.prompt_ids} if request.return_token_ids else {})
        if choice.content:
            told = {"logprobs": _chat_logprobs(choice)} if request.logprobs else {}
            yield chunk(index, {"content": choice.content}, told)
        if choice.calls:
            calls = [call | {"index": place} for place, call in enumerate(_calls(choice))]
            yield chunk(index, {"tool_calls": calls}, {})
        yield chunk(index, {}, _told_ids(request, choice), _finish(choice))
    if request.stream_options.get("include_usage"):
        yield head | {"choices": [], "usage": _usage(answer)}


def completion_response(request: CompletionRequest, answer: Answer) -> dict[str, Any]:
    return _head(answer, "text_completion", "cmpl", request.model) | {
        "choices": [_completion_choice(request, choice, index) for index, choice in enumerate(answer.choices)],
        "usage": _usage(answer),
        **({"prompt_token_ids": answer.prompt_ids} if request.return_token_ids else {}),
    }


def completion_chunks(request: CompletionRequest, answer: Answer) -> Iterator[dict[str, Any]]:
    head = _head(answer, "text_completion", "cmpl", request.model)
    for index, choice in enumerate(answer.choices):
        yield head | {"choices": [_completion_choice(request, choice, index)]}
    if request.stream_options.get("include_usage"):
        yield head | {"choices": [], "usage": _usage(answer)}


def models(name: str, context_tokens: int) -> dict[str, Any]:
    """The one model there is."""
    model = {"id": name, "object": "model", "created": 0, "owned_by": "thundersync", "max_model_len": context_tokens}
    return {"object": "list", "data": [model]}


def _head(answer: Answer, kind: str, prefix: str, model: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{answer.answer_id}",
        "object": kind,
        "created": answer.created_s,
        "model": model or answer.model,
        "system_fingerprint": f"policy-version-{answer.policy_version}",
    }


def _finish(choice: Choice) -> Literal["tool_calls"] | str:
    return "tool_calls" if choice.calls else _FINISH[choice.finish_reason]


def _calls(choice: Choice) -> list[dict[str, Any]]:
    return [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in choice.calls
    ]


def _usage(answer: Answer) -> dict[str, Any]:
    completion = sum(len(choice.token_ids) for choice in answer.choices)
    prompt = len(answer.prompt_ids)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _told_ids(request: _Shared, choice: Choice) -> dict[str, Any]:
    return {"token_ids": choice.token_ids} if request.return_token_ids else {}


def _chat_logprobs(choice: Choice) -> dict[str, Any]:
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(choice.token_texts, choice.logprobs, strict=True)
        ],
        "refusal": None,
    }


def _completion_choice(request: CompletionRequest, choice: Choice, index: int) -> dict[str, Any]:
    logprobs = None
    if request.logprobs is not None:
        offsets = [0]
        for text in choice.token_texts[:-1]:
            offsets.append(offsets[-1] + len(text))
        logprobs = {
            "tokens": choice.token_texts,
            "token_logprobs": choice.logprobs,
            "top_logprobs": None,
            "text_offset": offsets,
        }
    return {
        "index": index,
        "text": choice.content,
        "finish_reason": _FINISH[choice.finish_reason],
        "logprobs": logprobs,
        **_told_ids(request, choice),
    }
