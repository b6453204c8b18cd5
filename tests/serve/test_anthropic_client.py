"""The `anthropic` package, unmodified, against the endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes import Reply, turns
from tests.serve.rig import assert_captured, rig

if TYPE_CHECKING:
    import anthropic  # where it runs it is imported late: all test processes read this file, and it takes seconds

TOOL = {"name": "bash", "description": "Runs it.", "input_schema": {"type": "object", "properties": {}}}
CALL = 'I look. CALL {"name": "bash",  "arguments": {"command": "ls"}}'


def client(session: dict[str, Any]) -> anthropic.AsyncAnthropic:
    import anthropic

    return anthropic.AsyncAnthropic(base_url=session["anthropic_base_url"], api_key=session["api_key"], max_retries=0)


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


async def test_a_conversation_with_tools_is_one_exact_sequence(tok: Any) -> None:
    async with rig(turns(CALL, "done"), tok) as made:
        session = await made.open()
        async with client(session) as api:
            asked: dict[str, Any] = {
                "model": "claude",
                "max_tokens": 100,
                "system": "You have a shell.",
                "tools": [TOOL],
            }
            first = await api.messages.create(messages=[user("a")], **asked)
            assert first.stop_reason == "tool_use" and [block.type for block in first.content] == ["text", "tool_use"]
            use = first.content[1]
            assert use.type == "tool_use" and use.input == {"command": "ls"}
            result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "a file"}]}
            messages = [user("a"), {"role": "assistant", "content": first.content}, user([result])]
            raw = await api.messages.with_raw_response.create(messages=messages, **asked)
            assert raw.headers["X-Thundersync-History"] == "extended"
            second = await raw.parse()
            assert second.stop_reason == "end_turn" and second.content[0].type == "text"
            assert second.usage.input_tokens == len(made.engine.asked[1].prompt_ids)
        rollout = await made.reward(session)
    [sequence] = rollout.sequences
    assert_captured(made, rollout)
    shown = made.renderer.decode(sequence.token_ids)
    assert CALL + "<|im_end|>\n<|im_start|>user\n<tool_response>\na file" in shown
    assert [message.role for message in rollout.messages] == ["system", "user", "assistant", "tool", "assistant"]


async def test_a_stream_builds_the_same_message(tok: Any) -> None:
    async with rig(turns(CALL), tok) as made:
        session = await made.open()
        async with (
            client(session) as api,
            api.messages.stream(model="claude", max_tokens=100, messages=[user("a")], tools=[TOOL]) as stream,  # type: ignore[list-item]
        ):
            text = "".join([piece async for piece in stream.text_stream])
            message = await stream.get_final_message()
        assert text == "I look. " and message.stop_reason == "tool_use"
        assert message.content[1].type == "tool_use" and message.content[1].input == {"command": "ls"}
        assert message.usage.output_tokens == len(made.engine.tokenizer.encode(CALL, add_special_tokens=False)) + 1
        assert_captured(made, await made.reward(session))


async def test_stops_limits_and_counts_are_told_in_its_own_words(tok: Any) -> None:
    replies = turns(Reply(text="x STOP", ended=False), Reply(text="cut", finish_reason="length"))
    async with rig(replies, tok) as made:
        session = await made.open()
        async with client(session) as api:
            asked: dict[str, Any] = {"model": "claude", "max_tokens": 50}
            stopped = await api.messages.create(messages=[user("a")], stop_sequences=["STOP"], **asked)
            assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
            cut = await api.messages.create(messages=[user("b")], **asked)
            assert cut.stop_reason == "max_tokens"
            counted = await api.messages.count_tokens(model="claude", messages=[user("b")])
            assert counted.input_tokens == cut.usage.input_tokens
        await made.reward(session)


@pytest.mark.parametrize(
    "changes",
    [
        {"extra_body": {"temperature": 0.2}},
        {"extra_body": {"top_k": 5}},
        {"tools": [TOOL], "tool_choice": {"type": "any"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"messages": [user("a"), {"role": "assistant", "content": "I begin"}]},
        {"messages": [user([{"type": "image", "source": {"type": "url", "url": "x"}}])]},
    ],
)
async def test_what_cannot_be_exact_is_refused(tok: Any, changes: dict[str, Any]) -> None:
    import anthropic

    async with rig(turns(), tok) as made:
        session = await made.open()
        async with client(session) as api:
            with pytest.raises(anthropic.BadRequestError) as caught:
                await api.messages.create(**{"model": "claude", "max_tokens": 5, "messages": [user("a")], **changes})
        assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
        assert not made.engine.asked


async def test_a_wrong_key_is_an_authentication_error(tok: Any) -> None:
    import anthropic

    async with rig(turns(), tok) as made:
        session = await made.open()
        async with client({**session, "api_key": "wrong"}) as api:
            with pytest.raises(anthropic.AuthenticationError):
                await api.messages.create(model="claude", max_tokens=5, messages=[user("a")])
