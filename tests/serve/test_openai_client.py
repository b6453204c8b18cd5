"""The `openai` package, unmodified, against the endpoint: what it gets, and what is captured of it."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes import Asked, Reply, turns
from tests.serve.rig import Rig, assert_captured, rig
from thundersync.config import RolloutConfig
from thundersync.core.types import Scored

if TYPE_CHECKING:
    import openai  # where it runs it is imported late: all test processes read this file, and it takes seconds

SYSTEM = {"role": "system", "content": "You have a shell."}
LS = {
    "type": "function",
    "function": {"name": "bash", "description": "Runs it.", "parameters": {"type": "object", "properties": {}}},
}


def client(session: dict[str, Any]) -> openai.AsyncOpenAI:
    import openai

    return openai.AsyncOpenAI(base_url=session["openai_base_url"], api_key=session["api_key"], max_retries=0)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def test_a_conversation_is_one_sequence_of_exactly_the_engines_tokens(tok: Any) -> None:
    async with rig(turns("first", " second \n", "third"), tok) as made:
        session = await made.open()
        async with client(session) as api:
            messages: list[Any] = [SYSTEM, user("Hello.")]
            for said in ("first", " second \n", "third"):
                reply = await api.chat.completions.create(model="any", messages=messages)
                choice = reply.choices[0]
                assert (choice.message.content, choice.finish_reason) == (said, "stop")
                asked = made.engine.asked[-1]
                assert reply.usage is not None
                assert reply.usage.prompt_tokens == len(asked.prompt_ids)
                assert reply.usage.completion_tokens == len(tok.encode(said, add_special_tokens=False)) + 1
                messages += [choice.message, user("Go on.")]
        rollout = await made.reward(session, 0.5)
    assert isinstance(rollout.outcome, Scored) and rollout.outcome.reward == 0.5
    [sequence] = rollout.sequences
    assert_captured(made, rollout)
    assert [message.role for message in rollout.messages] == ["system", "user", *["assistant", "user"] * 2, "assistant"]
    assert made.renderer.decode(sequence.token_ids) + "\n" == made.renderer.text(
        rollout.messages, generation_prompt=False
    )
    assert "history_forked" not in made.feed.kinds


async def test_ids_that_no_tokenizer_would_choose_are_never_tokenised_again(tok: Any) -> None:
    from thundersync.generate.base import Generation

    letters = [tok.encode(letter, add_special_tokens=False)[0] for letter in "bash"]
    assert tok.encode("bash", add_special_tokens=False) != letters
    odd = Generation(token_ids=[*letters, 2], logprobs=[-1.0] * 5, finish_reason="stop", policy_version=0)
    async with rig(turns(odd, "done"), tok) as made:
        session = await made.open()
        async with client(session) as api:
            first = await api.chat.completions.create(model="x", messages=[user("a")], extra_body=RETURN_IDS)
            assert first.choices[0].message.content == "bash"
            assert first.choices[0].token_ids == odd.token_ids  # type: ignore[attr-defined]
            await api.chat.completions.create(
                model="x", messages=[user("a"), {"role": "assistant", "content": "bash"}, user("b")]
            )
        rollout = await made.reward(session)
    first_asked, second = made.engine.asked
    assert second.prompt_ids[: len(first_asked.prompt_ids) + 5] == [*first_asked.prompt_ids, *odd.token_ids]
    assert len(rollout.sequences) == 1


RETURN_IDS = {"return_token_ids": True}


async def test_tool_calls_come_back_structured_and_the_model_is_shown_what_it_said(tok: Any) -> None:
    said = 'I look. CALL {"name": "bash",   "arguments": {"command": "ls"}}'
    async with rig(turns(said, "done"), tok) as made:
        session = await made.open()
        async with client(session) as api:
            first = await api.chat.completions.create(model="x", messages=[user("a")], tools=[LS])  # type: ignore[list-item]
            message = first.choices[0].message
            assert first.choices[0].finish_reason == "tool_calls" and message.content == "I look. "
            assert message.tool_calls is not None
            [call] = message.tool_calls
            assert call.type == "function" and json.loads(call.function.arguments) == {"command": "ls"}
            second = await api.chat.completions.with_raw_response.create(
                model="x",
                messages=[
                    user("a"),
                    message,  # type: ignore[list-item]
                    {"role": "tool", "tool_call_id": call.id, "content": "a file"},
                ],
                tools=[LS],  # type: ignore[list-item]
            )
            assert second.headers["X-Thundersync-History"] == "extended"
        rollout = await made.reward(session)
    [sequence] = rollout.sequences
    assert_captured(made, rollout)
    shown = made.renderer.decode(sequence.token_ids)
    # Not as the template would write the call out: as the model wrote it.
    assert said + "<|im_end|>\n<|im_start|>user\n<tool_response>\na file" in shown


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda m: [m[0], user("b")], "conversation of its own"),
        (lambda m: [m[0], {"role": "assistant", "content": "other"}, user("b")], "not sampled here"),
        (lambda m: [user("A"), m[1], user("b")], "not sampled here"),
    ],
)
async def test_a_changed_history_forks_and_is_reported(tok: Any, edit: Any, reason: str) -> None:
    async with rig(turns("first", "second", "third"), tok) as made:
        session = await made.open()
        async with client(session) as api:
            messages: list[Any] = [user("a")]
            first = await api.chat.completions.create(model="x", messages=messages)
            messages.append({"role": "assistant", "content": first.choices[0].message.content})
            raw = await api.chat.completions.with_raw_response.create(model="x", messages=edit(messages))
            assert raw.headers["X-Thundersync-History"] == "forked"
            assert reason in raw.headers["X-Thundersync-Fork-Reason"]
        rollout = await made.reward(session)
    assert len(rollout.sequences) == 2
    assert_captured(made, rollout)
    first_turn, second_turn = rollout.turns
    assert (first_turn.message, first_turn.conversation, second_turn.conversation) == (1, 0, 2)
    assert second_turn.message == len(rollout.messages) - 1
    assert made.feed.kinds.count("history_forked") == 1


async def test_going_on_from_an_earlier_reply_keeps_its_tokens_and_learns_them_once(tok: Any) -> None:
    async with rig(turns("one", "two", "other two"), tok) as made:
        session = await made.open()
        async with client(session) as api:
            one: list[Any] = [user("a"), {"role": "assistant", "content": "one"}]
            await api.chat.completions.create(model="x", messages=one[:1])
            await api.chat.completions.create(model="x", messages=[*one, user("b")])
            raw = await api.chat.completions.with_raw_response.create(model="x", messages=[*one, user("c")])
            assert "gone on with" in raw.headers["X-Thundersync-Fork-Reason"]
        rollout = await made.reward(session)
    first, second = rollout.sequences
    assert_captured(made, rollout)
    shared = rollout.turns[0].end
    assert first.token_ids[:shared] == second.token_ids[:shared]
    assert any(first.sampled[:shared]) and not any(second.sampled[:shared])


async def test_a_stop_string_is_kept_for_learning_and_hidden_from_the_client(tok: Any) -> None:
    async with rig(turns(Reply(text="x = 1 STOP", ended=False), "done"), tok) as made:
        session = await made.open()
        async with client(session) as api:
            first = await api.chat.completions.create(model="x", messages=[user("a")], stop=["STOP"])
            assert first.choices[0].message.content == "x = 1 "
            assert made.engine.asked[0].sampling.stop == ("STOP",)
            echoed = {"role": "assistant", "content": first.choices[0].message.content}
            await api.chat.completions.create(model="x", messages=[user("a"), echoed, user("b")])  # type: ignore[list-item]
        rollout = await made.reward(session)
    [sequence] = rollout.sequences
    assert_captured(made, rollout)
    assert "x = 1 STOP<|im_end|>" in made.renderer.decode(sequence.token_ids)


async def test_several_choices_are_independent_sequences_and_any_may_be_gone_on_with(tok: Any) -> None:
    async with rig(turns("one", "two", "three"), tok) as made:
        session = await made.open()
        async with client(session) as api:
            reply = await api.chat.completions.create(model="x", messages=[user("a")], n=2)
            said = [choice.message.content for choice in reply.choices]
            assert sorted(said, key=str) == ["one", "two"]
            echoed = {"role": "assistant", "content": said[1]}
            await api.chat.completions.create(model="x", messages=[user("a"), echoed, user("b")])  # type: ignore[list-item]
        rollout = await made.reward(session)
    assert len(rollout.sequences) == 2
    assert_captured(made, rollout)


async def test_a_stream_brings_the_same_reply(tok: Any) -> None:
    async with rig(turns('so CALL {"name": "bash", "arguments": {}}'), tok) as made:
        session = await made.open()
        async with client(session) as api:
            stream = await api.chat.completions.create(
                model="x",
                messages=[user("a")],  # type: ignore[list-item]
                tools=[LS],  # type: ignore[list-item]
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == "so "
        assert [call.function.name for delta in deltas for call in delta.tool_calls or [] if call.function] == ["bash"]
        assert chunks[-2].choices[0].finish_reason == "tool_calls"
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 1
        assert_captured(made, await made.reward(session))


async def test_a_slow_stream_is_kept_alive_until_the_reply_is_whole(tok: Any) -> None:
    gate = asyncio.Event()
    async with rig(turns(Reply(text="late", before=gate.wait)), tok, ping_s=0.01) as made:
        session = await made.open()
        headers = {"Authorization": f"Bearer {session['api_key']}"}
        body = {"messages": [user("a")], "stream": True}
        url = session["openai_base_url"] + "/chat/completions"
        async with made.http.post(url, json=body, headers=headers) as response:
            assert (await response.content.readline()).startswith(b": still sampling")
            gate.set()
            rest = await response.text()
        assert '"content":"late"' in rest and rest.endswith("data: [DONE]\n\n")
        await made.reward(session)


async def test_completions_go_on_from_their_own_text_and_ids(tok: Any) -> None:
    cut = Reply(text=" two", finish_reason="length")
    async with rig(turns(cut, Reply(text=" four", finish_reason="length"), " six"), tok) as made:
        session = await made.open()
        async with client(session) as api:
            first = await api.completions.create(model="x", prompt="one", logprobs=0)
            assert first.choices[0].text == " two" and first.choices[0].finish_reason == "length"
            assert first.choices[0].logprobs is not None
            second = await api.completions.create(model="x", prompt="one two three", extra_body=RETURN_IDS)
            ids = [*second.prompt_token_ids, *second.choices[0].token_ids]  # type: ignore[attr-defined]
            raw = await api.completions.with_raw_response.create(model="x", prompt=[*ids, 77])
            assert raw.headers["X-Thundersync-History"] == "extended"
            assert raw.parse().choices[0].finish_reason == "stop"
        rollout = await made.reward(session)
    assert len(rollout.sequences) == 1
    assert_captured(made, rollout)


async def test_ids_that_the_model_does_not_know_are_refused_and_break_nothing(tok: Any) -> None:
    import openai

    async with rig(turns("hi"), tok) as made:
        session = await made.open()
        async with client(session) as api:
            for prompt in ([5, 384], [-1], [1 << 70]):
                with pytest.raises(openai.BadRequestError):
                    await api.completions.create(model="x", prompt=prompt)
            await api.completions.create(model="x", prompt=[5, 383])
        assert_captured(made, await made.reward(session))


async def test_logprobs_are_those_of_the_sampled_tokens(tok: Any) -> None:
    async with rig(turns("hi"), tok) as made:
        session = await made.open()
        async with client(session) as api:
            reply = await api.chat.completions.create(model="x", messages=[user("a")], logprobs=True)
            assert reply.choices[0].logprobs is not None and reply.choices[0].logprobs.content is not None
            found = [(each.token, each.logprob) for each in reply.choices[0].logprobs.content]
            assert "".join(text for text, _ in found) == "hi<|im_end|>" and {value for _, value in found} == {-0.5}
            models = await api.models.list()
            assert [model.id for model in models.data] == ["tiny"]
        await made.reward(session)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"temperature": 0.7}, "inexact_sampling"),
        ({"top_p": 0.9}, "inexact_sampling"),
        ({"extra_body": {"top_k": 20}}, "inexact_sampling"),
        ({"presence_penalty": 0.5}, "inexact_sampling"),
        ({"response_format": {"type": "json_object"}}, "inexact_sampling"),
        ({"tools": [LS], "tool_choice": "required"}, "inexact_sampling"),
        ({"seed": 3}, "unsupported_parameter"),
        ({"extra_body": {"guided_regex": "a"}}, "unsupported_parameter"),
        ({"max_tokens": 0}, None),
        ({"n": 100}, None),
        ({"messages": []}, None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
        ({"extra_body": {"temperature": "warm"}}, None),
    ],
)
async def test_what_cannot_be_exact_is_refused_with_the_reason(tok: Any, changes: dict[str, Any], code: str) -> None:
    import openai

    async with rig(turns(), tok) as made:
        session = await made.open()
        async with client(session) as api:
            with pytest.raises(openai.BadRequestError) as caught:
                await api.chat.completions.create(**{"model": "x", "messages": [user("a")], **changes})
        assert caught.value.code == code and caught.value.param
        assert not made.engine.asked
        # What changes nothing is welcome.
    assert made.feed.kinds == ["rollout_started"]


async def test_parameters_that_change_nothing_are_accepted(tok: Any) -> None:
    async with rig(turns("a"), tok) as made:
        session = await made.open()
        async with client(session) as api:
            await api.chat.completions.create(
                model="x",
                messages=[user("a")],  # type: ignore[list-item]
                temperature=1,
                top_p=1,
                presence_penalty=0,
                max_completion_tokens=10_000,
                user="me",
                extra_body={"top_k": -1, "seed": None},
            )
        assert made.engine.asked[0].sampling.max_tokens == 200
        await made.reward(session)


async def test_a_full_context_is_refused_as_openai_does_and_the_agent_may_shorten_it(tok: Any) -> None:
    import openai

    async with rig(turns("ok"), tok, context_tokens=60) as made:
        session = await made.open()
        async with client(session) as api:
            with pytest.raises(openai.BadRequestError, match="maximum context length is 60") as caught:
                await api.chat.completions.create(model="x", messages=[user("word " * 60)])
            assert caught.value.code == "context_length_exceeded"
            await api.chat.completions.create(model="x", messages=[user("a")])
        assert_captured(made, await made.reward(session))


async def test_a_client_that_leaves_aborts_its_request_and_may_ask_again(tok: Any) -> None:
    begun, never = asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        begun.set()
        await never.wait()

    def script(asked: Asked) -> Reply:
        return Reply(text="never", before=hang) if asked.turn == 1 else Reply(text="said")

    async with rig(script, tok) as made:
        session = await made.open()
        async with client(session) as api:
            messages: list[Any] = [user("a")]
            first = await api.chat.completions.create(model="x", messages=messages)
            messages += [first.choices[0].message, user("b")]
            asking = asyncio.create_task(api.chat.completions.create(model="x", messages=messages))
            await begun.wait()
            asking.cancel()
            await asyncio.wait({asking})
            raw = await api.chat.completions.with_raw_response.create(model="x", messages=messages)
            assert raw.headers["X-Thundersync-History"] == "extended"
        rollout = await made.reward(session)
    assert made.engine.aborted == ["000000-00-00/1/1"]
    assert len(rollout.sequences) == 1 and [turn.index for turn in rollout.turns] == [0, 2]
    assert_captured(made, rollout)


async def test_requests_that_a_client_gave_up_cost_no_turn(tok: Any) -> None:
    import openai

    never = asyncio.Event()

    def script(asked: Asked) -> Reply:
        return Reply(text="never", before=never.wait) if asked.turn < 2 else Reply(text="said")

    async with rig(script, tok, config=RolloutConfig(max_tokens=200, max_turns=1)) as made:
        session = await made.open()
        async with client(session) as api:
            for given_up in (1, 2):
                asking = asyncio.create_task(api.chat.completions.create(model="x", messages=[user("a")]))
                await made.until(lambda: made.engine.running)
                asking.cancel()
                await asyncio.wait({asking})
                await made.until(lambda given_up=given_up: len(made.engine.aborted) == given_up)
            await api.chat.completions.create(model="x", messages=[user("a")])
            async with made.http.get(session["url"], headers={"X-Api-Key": session["api_key"]}) as response:
                assert (await response.json())["turns_left"] == 0
            with pytest.raises(openai.PermissionDeniedError, match="max_turns"):
                await api.chat.completions.create(model="x", messages=[user("a")])
        rollout = await made.reward(session)
    assert [turn.index for turn in rollout.turns] == [2]  # each request has a number of its own
    told = [kind for kind in made.feed.kinds if kind.startswith("turn_")]
    assert told == [*["turn_started", "turn_aborted"] * 2, "turn_started", "turn_generated"]
    assert_captured(made, rollout)


async def test_reasoning_that_a_client_drops_does_not_fork(tok: Any) -> None:
    async with rig(turns("<think>hm</think>\n\nyes", "done"), tok) as made:
        session = await made.open()
        async with client(session) as api:
            await api.chat.completions.create(model="x", messages=[user("a")])
            messages: list[Any] = [user("a"), {"role": "assistant", "content": "yes"}, user("b")]
            await api.chat.completions.create(model="x", messages=messages)
        rollout = await made.reward(session)
    assert len(rollout.sequences) == 1 and "<think>hm</think>" in rollout.messages[1].content


__all__ = ["Rig"]
