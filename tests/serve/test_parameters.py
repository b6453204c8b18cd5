"""Requests of any shape: what is read, and that nothing but a refusal comes of the others."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thundersync.serve.anthropic_api import MessagesRequest, count_call, messages_call
from thundersync.serve.errors import Refused
from thundersync.serve.openai_api import ChatRequest, CompletionRequest, chat_call, completion_call

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "user", "text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "function", "name", "id", "tool_calls", "arguments"]),
            inner,
        )
    ),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system", "x"]) | JSON, "content": JSON},
    optional={"tool_calls": JSON, "tool_call_id": JSON, "name": JSON, "function_call": JSON},
)


def bodies(kind: type[Any]) -> st.SearchStrategy[dict[str, Any]]:
    names = [name for name in kind.__struct_fields__ if name != "messages"]
    some = st.dictionaries(st.sampled_from([*names, "unknown"]), JSON, max_size=3)
    return st.builds(lambda more, messages: {"messages": messages, **more}, some, st.lists(MESSAGE, max_size=3) | JSON)


@given(body=bodies(ChatRequest) | bodies(CompletionRequest) | bodies(MessagesRequest))
def test_a_request_of_any_shape_is_read_or_refused(body: dict[str, Any]) -> None:
    for read in (chat_call, completion_call, messages_call):
        with contextlib.suppress(Refused):
            read(body, temperature=1.0)
    with contextlib.suppress(Refused):
        count_call(body)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": 3}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}], "max_tokens": "many"}, "max_tokens"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": [], "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"messages": [{"role": "user", "content": "a"}], "stop": [""]}, "stop"),
    ],
)
def test_a_refusal_names_the_parameter(body: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused) as caught:
        chat_call(body, temperature=1.0)
    assert caught.value.param == param


def test_parts_of_text_and_calls_of_any_api_become_one_form() -> None:
    _, openai = chat_call(
        {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "user", "content": "c"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
                    "annotations": [],
                },
                {"role": "tool", "tool_call_id": "1", "content": "d"},
            ]
        },
        temperature=1.0,
    )
    _, anthropic = messages_call(
        {
            "max_tokens": 5,
            "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}],
            "messages": [
                {"role": "user", "content": "c"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "d"}]},
            ],
        },
        temperature=1.0,
    )
    assert openai.messages == anthropic.messages
    assert openai.messages[0] == {"role": "system", "content": "a\nb"}
