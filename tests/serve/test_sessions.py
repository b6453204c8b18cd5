"""Sessions: who may open what, what ends one, and what its rollout then is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sandboxes.base import Command
from sandboxes.errors import SandboxGone
from tests.fakes import FakeSandbox, Reply, done, turns
from tests.serve.rig import KEY, Rig, assert_captured, rig
from thundersync.config import RolloutConfig
from thundersync.core.types import Failed, Scored
from thundersync.errors import EngineFailed, StaleRollout
from thundersync.generate.base import Generation

HELLO = {"messages": [{"role": "user", "content": "Hello."}]}


async def chat(made: Rig, session: dict[str, Any], body: Any = HELLO) -> tuple[int, Any]:
    return await made.post(f"/sessions/{session['session_id']}/v1/chat/completions", body, key=session["api_key"])


async def end(made: Rig, session: dict[str, Any], **body: Any) -> tuple[int, Any]:
    return await made.post(f"/sessions/{session['session_id']}/end", body or None, key=session["api_key"])


async def test_a_program_is_told_its_task_and_where_its_policy_is(tok: Any) -> None:
    async with rig(turns("hi"), tok) as made:
        session = await made.open()
        assert session["task_id"] == "task" and session["instruction"] == "Do it."
        assert session["openai_base_url"] == f"{made.endpoint.url}/sessions/{session['session_id']}/v1"
        assert (session["temperature"], session["turns_left"], session["judge"]) == (1.0, 10, "client")
        status, _ = await made.post(
            "/v1/chat/completions", HELLO, key=session["api_key"], **{"X-Thundersync-Session": session["session_id"]}
        )
        assert status == 200
        async with made.http.get(session["url"], headers={"X-Api-Key": session["api_key"]}) as response:
            assert (await response.json())["replies"] == 1
        await made.reward(session)


@pytest.mark.parametrize("asked", ["gateway.example:9443", "10.0.0.7", "[fd00::7]:8791"])
async def test_a_program_is_told_the_address_that_it_came_by(tok: Any, asked: str) -> None:
    async with rig(turns(), tok) as made:
        made.rollout()
        forwarded = {"X-Forwarded-Host": "evil.example", "X-Forwarded-Proto": "https"}  # which anybody can say
        status, told = await made.post("/sessions", key=KEY, Host=asked, **forwarded)
        assert status == 201
        here = f"http://{asked}/sessions/{told['session_id']}"
        assert [told[key] for key in ("url", "openai_base_url", "anthropic_base_url")] == [here, here + "/v1", here]


@pytest.mark.parametrize("nonsense", ["", "evil.example/path", "me@evil.example", "a b"])
async def test_an_address_that_is_none_is_not_told(tok: Any, nonsense: str) -> None:
    async with rig(turns(), tok) as made:
        made.rollout()
        status, told = await made.post("/sessions", key=KEY, Host=nonsense)
        assert status == 400 or told["url"].startswith(made.endpoint.url + "/")


async def test_a_public_url_is_told_whatever_a_program_came_by(tok: Any) -> None:
    async with rig(turns(), tok, public_url="https://train.example.org/door/") as made:
        assert made.endpoint.url == made.endpoint.local_url == "https://train.example.org/door"
        assert made.endpoint._runner is not None
        made.base = "http://{}:{}".format(*made.endpoint._runner.addresses[0])
        session = await made.open()
        assert session["openai_base_url"].startswith("https://train.example.org/door/sessions/")


async def test_an_endpoint_at_every_address_is_told_by_one_that_leads_to_it(tok: Any) -> None:
    async with rig(turns(), tok, host="0.0.0.0") as made:
        assert "0.0.0.0" not in made.endpoint.url
        assert made.endpoint.local_url.startswith("http://127.0.0.1:")
        session = await made.open()  # over the URL that endpoint.json has
        assert session["url"].startswith(made.endpoint.url)


async def test_a_key_opens_what_it_is_for_and_nothing_else(tok: Any) -> None:
    async with rig(turns(), tok) as made:
        first, second = await made.open(), await made.open()
        for path, key, status in [
            ("/sessions", first["api_key"], 401),
            ("/sessions", "", 401),
            (f"/sessions/{second['session_id']}/reward", first["api_key"], 401),
            (f"/sessions/{second['session_id']}/v1/chat/completions", "wrong", 401),
            ("/sessions/unknown/end", "wrong", 401),
            ("/sessions/unknown/end", KEY, 404),
            ("/v1/chat/completions", KEY, 400),
            ("/v1/chat/completions", "wrong", 401),
            ("/v1/embeddings", KEY, 404),
        ]:
            found, told = await made.post(path, HELLO, key=key)
            assert found == status, (path, told)
            assert told["error"]["message"]
        async with made.http.options(made.endpoint.url + "/sessions", headers={"Origin": "http://evil"}) as response:
            assert response.status == 405 and "Access-Control-Allow-Origin" not in response.headers


async def test_rollouts_are_taken_in_order_and_nothing_is_told_when_there_is_none(tok: Any) -> None:
    async with rig(turns(), tok) as made:
        assert await made.post("/sessions?wait_s=0", key=KEY) == (204, None)
        waiting = asyncio.create_task(made.take())
        made.rollout()
        made.rollout()
        first, second = await waiting, await made.take()
        assert [each["rollout_id"][-2:] for each in (first, second)] == ["00", "01"]
        waiting = asyncio.create_task(made.post("/sessions", key=KEY))
        await asyncio.sleep(0)
        await made.desk.end()
        status, told = await waiting
        assert status == 410 and told["error"]["code"] == "run_over"


async def test_a_withdrawn_rollout_is_not_handed_out(tok: Any) -> None:
    async with rig(turns(), tok) as made:
        gone = made.rollout()
        await made.until(lambda: made.desk.waiting)
        gone.cancel()
        await asyncio.wait({gone})
        assert await made.post("/sessions?wait_s=0", key=KEY) == (204, None)


async def test_the_checker_judges_what_the_agent_did_in_the_sandbox(tok: Any) -> None:
    def shell(sandbox: FakeSandbox, command: Command) -> Any:
        assert command.script == "exec 2>&1; ls" and command.timeout_s == 7.0
        return done(b"a file\n", exit_code=3)

    async with rig(turns("I look."), tok, client_judges=False, verdict=b"0.25\n") as made:
        made.runtime._shell = shell
        session = await made.open()
        assert session["judge"] == "checker"
        assert (await chat(made, session))[0] == 200
        assert not made.runtime.sandboxes  # it starts when it is first used
        status, ran = await made.post(
            f"/sessions/{session['session_id']}/run", {"command": "ls", "timeout_s": 7}, key=session["api_key"]
        )
        assert (status, ran) == (200, {"output": "a file\n", "exit_code": 3, "timed_out": False})
        status, told = await made.post(
            f"/sessions/{session['session_id']}/reward", {"reward": 1}, key=session["api_key"]
        )
        assert status == 403 and "checker" in told["error"]["message"]
        assert (await end(made, session))[0] == 200
        rollout = await made.running[0]
    assert rollout.outcome == Scored(reward=0.25, rewards={"reward": 0.25}, stop="submitted")
    assert rollout.turns[0].command.endswith("ls") and rollout.turns[0].exit_code == 3
    assert_captured(made, rollout)


async def test_a_session_that_is_over_answers_no_more(tok: Any) -> None:
    async with rig(turns("hi"), tok) as made:
        session = await made.open()
        await chat(made, session)
        await made.reward(session)
        for path in ("v1/chat/completions", "reward", "end"):
            for key in (KEY, session["api_key"]):
                status, told = await made.post(f"/sessions/{session['session_id']}/{path}", HELLO, key=key)
                assert status == 404 and told["error"]["code"] == "session_over"


async def test_a_failure_that_the_agent_tells_of_is_no_reward(tok: Any) -> None:
    async with rig(turns("hi"), tok) as made:
        session = await made.open()
        await chat(made, session)
        await end(made, session, error="my database is down")
        rollout = await made.running[0]
    assert rollout.outcome == Failed(reason="function", detail="my database is down")


async def test_a_silent_program_counts_as_dead(tok: Any) -> None:
    async with rig(turns("hi"), tok, idle_timeout_s=0.05) as made:
        await made.open()
        rollout = await made.running[0]
    assert isinstance(rollout.outcome, Failed) and rollout.outcome.reason == "function"
    assert "asked for nothing for 0.05 s" in rollout.outcome.detail


async def test_a_reward_before_anything_was_said_is_about_nothing(tok: Any) -> None:
    async with rig(turns(), tok) as made:
        rollout = await made.reward(await made.open())
    assert isinstance(rollout.outcome, Failed) and rollout.outcome.reason == "agent"


async def test_the_turn_limit_is_told_so_that_clients_give_up_and_the_rollout_is_judged(tok: Any) -> None:
    async with rig(turns("a", "b", "c"), tok, config=RolloutConfig(max_turns=2), client_judges=False) as made:
        session = await made.open()
        for _ in range(2):
            assert (await chat(made, session))[0] == 200
        status, told = await chat(made, session)
        assert status == 403 and told["error"]["code"] == "max_turns_reached"
        await end(made, session)
        rollout = await made.running[0]
    assert isinstance(rollout.outcome, Scored) and rollout.outcome.stop == "max_turns"


async def test_time_ends_a_session_and_its_verdict_may_still_come(tok: Any) -> None:
    never = asyncio.Event()
    script = turns("a", Reply(text="b", before=never.wait))
    async with rig(script, tok, config=RolloutConfig(timeout_s=0.2)) as made:
        session = await made.open()
        assert (await chat(made, session))[0] == 200
        status, _ = await chat(made, session)
        assert status in (403, 404)
        await made.until(lambda: "scoring_started" in made.feed.kinds)
        rollout = await made.reward(session, 0.5)
    assert isinstance(rollout.outcome, Scored)
    assert (rollout.outcome.reward, rollout.outcome.stop) == (0.5, "time")
    assert made.engine.aborted == ["000000-00-00/1/1"]


async def test_an_end_without_a_verdict_in_time_is_no_reward(tok: Any) -> None:
    async with rig(turns("a"), tok, verdict_s=0.01) as made:
        session = await made.open()
        await chat(made, session)
        await end(made, session)
        rollout = await made.running[0]
    assert isinstance(rollout.outcome, Failed) and rollout.outcome.reason == "no_reward"


@pytest.mark.parametrize(
    ("broken", "kind"),
    [(EngineFailed("the engine is gone"), "engine"), (SandboxGone("box", "it died"), "sandbox")],
)
async def test_what_breaks_below_a_request_fails_the_rollout_as_what_it_was(
    tok: Any, broken: Exception, kind: str
) -> None:
    async with rig(turns(broken if kind == "engine" else "hi"), tok, client_judges=False) as made:
        session = await made.open()
        status, told = await chat(made, session)
        if kind == "sandbox":
            made.runtime.failing["start"] = broken
            status, told = await made.post(
                f"/sessions/{session['session_id']}/run", {"command": "ls"}, key=session["api_key"]
            )
        assert status == 503 and told["error"]["code"] == "rollout_failed"
        rollout = await made.running[0]
    assert isinstance(rollout.outcome, Failed) and rollout.outcome.reason == kind


async def test_a_reply_of_another_policy_version_ends_the_run(tok: Any) -> None:
    stale = Generation(token_ids=[5, 2], logprobs=[-1.0, -1.0], finish_reason="stop", policy_version=7)
    async with rig(turns(stale), tok) as made:
        session = await made.open()
        assert (await chat(made, session))[0] == 503
        with pytest.raises(StaleRollout):
            await made.running[0]


async def test_bodies_that_are_too_large_or_no_json_are_refused(tok: Any) -> None:
    async with rig(turns(), tok, max_body_bytes=1000) as made:
        session = await made.open()
        status, told = await chat(made, session, {"messages": [{"role": "user", "content": "a" * 2000}]})
        assert status == 413 and told["error"]["code"] == "request_too_large"
        url = session["openai_base_url"] + "/chat/completions"
        headers = {"Authorization": f"Bearer {session['api_key']}"}
        for data in (b"{", b"[]", b"\xff"):
            async with made.http.post(url, data=data, headers=headers) as response:
                assert response.status == 400 and "error" in await response.json()


async def test_tools_without_a_parser_are_refused_with_the_remedy(tok: Any) -> None:
    tool = {"type": "function", "function": {"name": "bash", "parameters": {}}}
    async with rig(turns(), tok, parser=None) as made:
        session = await made.open()
        status, told = await chat(made, session, {**HELLO, "tools": [tool]})
        assert status == 400 and "serve.tool_parser" in told["error"]["message"]


async def test_a_rollout_that_is_cancelled_takes_its_session_and_its_requests_along(tok: Any) -> None:
    begun, never = asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        begun.set()
        await never.wait()

    async with rig(turns(Reply(text="never", before=hang)), tok) as made:
        session = await made.open()
        asking = asyncio.create_task(chat(made, session))
        await begun.wait()
        made.running[0].cancel()
        status, told = await asking
        assert status == 404 and told["error"]["code"] == "session_over"
        assert made.engine.aborted and not made.desk.open
