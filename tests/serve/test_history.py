"""Which captured ids a conversation goes on with, over templates that misbehave and clients that do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollout.test_dialogue import (
    COUNTS_MESSAGES,
    DROPS_EARLIER_REASONING,
    NO_SPECIAL_END,
    OTHER_END,
    PLAIN,
    TRIMS,
    with_template,
)
from tests.serve.rig import QWEN
from tests.tiny import tiny_tokenizer
from thundersync.rollout.dialogue import ChatTemplateError, Renderer
from thundersync.serve.chat import Chat, ToolCall, assistant, keys, parsed
from thundersync.serve.history import Ask, History

NEEDS_CALLS = (
    "{% for m in messages %}{% if m['role'] == 'tool' and not messages[loop.index0 - 1]['tool_calls'] %}"
    "{{ raise_exception('a result of no call') }}{% endif %}{% endfor %}" + QWEN
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def user(text: str) -> Chat:
    return {"role": "user", "content": text}


def say(
    history: History, renderer: Renderer, ask: Ask, ids: list[int], calls: list[ToolCall] | None = None, cut: str = ""
) -> Chat:
    """Let the model say `ids`; returns what the client is told. `cut` is the text before its tool calls."""
    spoken, _ = renderer.split_end(ids)
    text = renderer.decode_after(ask.prompt_ids[-8:], spoken)
    visible = assistant(cut if calls else text, calls or [])
    history.take(ask, text=text, token_ids=ids, visible=visible)
    return visible


def spoken(renderer: Renderer, text: str) -> list[int]:
    return renderer.encode(text + "<|im_end|>")


def test_a_template_that_rewrites_what_was_said_forks(folder: Path) -> None:
    renderer = Renderer(with_template(folder, TRIMS))
    history = History(renderer)
    first = history.ask([user("a")], tools=[])
    reply = say(history, renderer, first, spoken(renderer, "ends with a space "))
    second = history.ask([user("a"), reply, user("b")], tools=[])
    assert (first.how, second.how) == ("new", "forked") and "differently" in second.why
    assert renderer.decode(second.prompt_ids) == renderer.render([user("a"), reply, user("b")], tools=[])


def test_a_template_that_wants_calls_apart_gets_them_and_forks(folder: Path) -> None:
    renderer = Renderer(with_template(folder, NEEDS_CALLS))
    history = History(renderer)
    asked = history.ask([user("a")], tools=[])
    call = ToolCall(call_id="1", name="bash", arguments='{"command": "ls"}')
    reply = say(history, renderer, asked, spoken(renderer, '<tool_call>{"name":"bash"}</tool_call>'), [call])
    result = {"role": "tool", "content": "a file", "tool_call_id": "1"}
    second = history.ask([user("a"), reply, result], tools=[])
    assert second.how == "forked" and "apart" in second.why
    assert '{"command": "ls"}' in renderer.decode(second.prompt_ids).replace('": "ls', '": "ls')
    with pytest.raises(ChatTemplateError):
        history.ask([user("a"), result], tools=[])


def test_other_tools_are_another_beginning(folder: Path) -> None:
    renderer = Renderer(with_template(folder, QWEN))
    history = History(renderer)
    tools: list[Any] = [{"type": "function", "function": {"name": "bash"}}]
    reply = say(history, renderer, history.ask([user("a")], tools=tools), spoken(renderer, "x"))
    assert history.ask([user("a"), reply, user("b")], tools=tools).how == "extended"
    assert history.ask([user("a"), reply, user("b")], tools=[]).how == "forked"


def test_the_order_of_arguments_and_the_space_around_a_reply_do_not_count(folder: Path) -> None:
    renderer = Renderer(with_template(folder, QWEN))
    history = History(renderer)
    call = ToolCall(call_id="1", name="bash", arguments='{"b": 1,   "a": 2}')
    reply = say(history, renderer, history.ask([user("a")], tools=[]), spoken(renderer, "x "), [call], cut="x ")
    sent = assistant("x", [ToolCall(call_id="1", name="bash", arguments='{"a":2,"b":1}')])
    assert sent != reply
    result = {"role": "tool", "content": "", "tool_call_id": "1"}
    assert history.ask([user("a"), sent, result], tools=[]).how == "extended"
    other = assistant("x", [ToolCall(call_id="1", name="bash", arguments='{"a":2,"b":3}')])
    assert history.ask([user("a"), other, result], tools=[]).how == "forked"


TEXTS = st.text(alphabet="ab <>é\n", max_size=8)
TEMPLATES = st.sampled_from([PLAIN, QWEN, TRIMS, DROPS_EARLIER_REASONING, COUNTS_MESSAGES, NO_SPECIAL_END, OTHER_END])


@settings(deadline=None, max_examples=50)
@given(template=TEMPLATES, data=st.data())
def test_whatever_a_client_goes_on_from_the_ids_are_the_templates_and_only_grow(
    folder: Path, template: str, data: st.DataObject
) -> None:
    renderer = Renderer(with_template(folder, template))
    end = {NO_SPECIAL_END: "", OTHER_END: "<|endoftext|>"}.get(template, "<|im_end|>")
    history = History(renderer)
    conversations: list[tuple[list[Chat], list[int]]] = [([], [])]
    """Each as its client knows it, and all ids that it stands for."""
    for _ in range(data.draw(st.integers(1, 5))):
        index = data.draw(st.integers(0, len(conversations) - 1))
        known, _ = conversations[index]
        messages = [*known, user(data.draw(TEXTS))]
        ask = history.ask(messages, tools=[])
        assert renderer.decode(ask.prompt_ids) == ask.text == renderer.render(ask.shown, tools=[])
        if ask.how == "extended":
            # Of what sounds the same, one has been gone on with.
            alike = [ids for said, ids in conversations if keys(said)[-1] == keys(known)[-1]]
            assert any(ask.prompt_ids[: len(ids)] == ids for ids in alike)
        text = data.draw(TEXTS)
        letters = [token for letter in text for token in renderer.encode(letter)]
        reply = (letters if data.draw(st.booleans()) else renderer.encode(text)) + renderer.encode(end)
        reply = reply or renderer.encode("x")
        visible = say(history, renderer, ask, reply)
        conversations.append(([*messages, visible], [*ask.prompt_ids, *reply]))


def test_a_calls_arguments_that_are_no_object_stay_the_text_that_they_are() -> None:
    assert parsed('{"a": 1}') == {"a": 1}
    for text in ("[1]", "{", '{"a": ' + "[" * 5000):
        assert parsed(text) == text
