"""A served teacher, over a real socket to a small server that answers as vLLM's does, or not: K6 of field.md."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.tiny import tiny_tokenizer
from thundersync.errors import TeacherFailed, TokenizerMismatch
from thundersync.score.openai_teacher import OpenAITeacher
from thundersync.score.teacher import Teacher

VOCABULARY = 100
KEY = "secret-of-the-test"
MODEL = "org/teacher"


def logprobs_after(prefix: list[int]) -> list[float]:
    """A distribution over VOCABULARY ids that depends on everything before it."""
    weights = [1.0 + (sum(prefix) * 31 + len(prefix) * 7 + token * 17) % 53 for token in range(VOCABULARY)]
    return [math.log(weight / sum(weights)) for weight in weights]


Answer = dict[str, Any]
Change = Callable[[Answer, dict[str, Any]], Any]


class Server:
    """vLLM's answers to /v1/models and /v1/completions; `change` alters one, or replaces it by a response of its own.

    `asked` records the bodies of completion requests.
    """

    def __init__(self, change: Change = lambda answer, asked: answer) -> None:
        self.change = change
        self.asked: list[dict[str, Any]] = []
        self.models: Any = {"data": [{"id": MODEL, "max_model_len": 1000}]}
        self.base_url = ""

    async def list_models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self.models)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"error": {"message": "invalid key"}}, status=401)
        asked = await request.json()
        self.asked.append(asked)
        prompt, topk = asked["prompt"], asked["prompt_logprobs"]
        assert asked["model"] == MODEL and asked["temperature"] == 0
        rows: list[Any] = [None]
        for place in range(1, len(prompt)):
            logprobs = logprobs_after(prompt[:place])
            ranked = sorted(range(VOCABULARY), key=lambda token: -logprobs[token])
            told = dict.fromkeys([prompt[place], *ranked[:topk]])
            rows.append(
                {
                    str(token): {"logprob": logprobs[token], "rank": ranked.index(token) + 1, "decoded_token": "x"}
                    for token in told
                }
            )
        answer = {"id": "cmpl-1", "choices": [{"index": 0, "text": "", "prompt_logprobs": rows}], "usage": {}}
        changed = self.change(answer, asked)
        if isinstance(changed, Awaitable):
            changed = await changed
        return changed if isinstance(changed, web.StreamResponse) else web.json_response(changed)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Server"]:
        app = web.Application()
        app.router.add_get("/v1/models", self.list_models)
        app.router.add_post("/v1/completions", self.complete)
        runner = web.AppRunner(app, handler_cancellation=True)  # a caller who hangs up ends what it asked for
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            self.base_url = f"http://{host}:{port}/v1"
            yield self
        finally:
            await runner.cleanup()


def teacher_at(server: Server, **options: Any) -> OpenAITeacher:
    return OpenAITeacher(**{"base_url": server.base_url, "api_key": KEY, "first_wait_s": 0.001, **options})


@asynccontextmanager
async def started(server: Server, **options: Any) -> AsyncIterator[OpenAITeacher]:
    async with server.serving():
        teacher = teacher_at(server, **options)
        try:
            await teacher.start()
            yield teacher
        finally:
            await teacher.close()


async def refused(server: Server, **options: Any) -> TeacherFailed:
    """What a start against `server` fails with."""
    async with server.serving():
        teacher = teacher_at(server, **options)
        with pytest.raises(TeacherFailed) as failed:
            await teacher.start()
        await teacher.close()
    assert failed.value.remedy
    return failed.value


@pytest.mark.parametrize("topk", [0, 1, 5])
async def test_scores_are_what_the_server_says_of_the_tokens_from_start(topk: int) -> None:
    ids = [(7 * i) % VOCABULARY for i in range(50)]
    async with started(Server(), topk=topk) as teacher:
        asked: Teacher = teacher
        scores = await asked.score(ids, start=30, topk=topk)
    expected = [logprobs_after(ids[:place]) for place in range(30, 50)]
    assert scores.logprobs == [row[token] for row, token in zip(expected, ids[30:], strict=True)]
    best = [sorted(row, reverse=True)[:topk] for row in expected]
    assert scores.top_logprobs == (best if topk else [])
    assert all(
        [row[token] for token in top] == said
        for row, top, said in zip(expected, scores.top_ids, scores.top_logprobs, strict=bool(topk))
    )
    assert scores.policy_version == 0


async def test_the_start_probes_with_a_few_tokens_and_the_runs_topk() -> None:
    server = Server()
    async with started(server, topk=3) as teacher:
        assert [asked["prompt_logprobs"] for asked in server.asked] == [3]
        assert len(server.asked[0]["prompt"]) < 10
        assert MODEL in teacher.name
        assert KEY not in teacher.name
        probe_bytes = teacher.payload_bytes
        await teacher.score([1, 2, 3], start=1)
        assert teacher.payload_bytes > probe_bytes > 0


async def test_logprobs_beside_the_choices_are_read_too() -> None:
    def move(answer: Answer, asked: dict[str, Any]) -> Answer:
        return answer | {"prompt_logprobs": answer["choices"][0].pop("prompt_logprobs")}

    async with started(Server(move)) as teacher:
        assert len((await teacher.score([1, 2, 3], start=1)).logprobs) == 2


def rows_of(answer: Answer) -> list[Any]:
    rows: list[Any] = answer["choices"][0]["prompt_logprobs"]
    return rows


def without(answer: Answer, asked: dict[str, Any]) -> Answer:
    del answer["choices"][0]["prompt_logprobs"]
    return answer


def one_less(answer: Answer, asked: dict[str, Any]) -> Answer:
    rows_of(answer).pop()
    return answer


def of_other_tokens(answer: Answer, asked: dict[str, Any]) -> Answer:
    rows_of(answer)[3] = {"99": {"logprob": -1.0, "rank": 1}}
    return answer


def unfinite(answer: Answer, asked: dict[str, Any]) -> Answer:
    rows_of(answer)[2][str(asked["prompt"][2])]["logprob"] = -9999.0
    return answer


def logits(answer: Answer, asked: dict[str, Any]) -> Answer:
    rows_of(answer)[2][str(asked["prompt"][2])]["logprob"] = 17.5
    return answer


def too_few(answer: Answer, asked: dict[str, Any]) -> Answer:
    kept = str(asked["prompt"][2])
    rows_of(answer)[2] = {kept: rows_of(answer)[2][kept]}
    return answer


def page(answer: Answer, asked: dict[str, Any]) -> web.Response:
    return web.Response(text="<html>welcome</html>", content_type="text/html")


@pytest.mark.parametrize(
    ("change", "told", "remedy"),
    [
        (without, "without prompt_logprobs", "vllm serve"),
        (one_less, "7 places of a prompt of 8", "add no token"),
        (of_other_tokens, "about other tokens", "add no token"),
        (unfinite, "not finite", "raw_logprobs"),
        (logits, "above zero", "raw_logprobs"),
        (too_few, "most probable ids are not 2", "vLLM"),
        (page, "cannot be read", "/v1"),
    ],
)
async def test_a_server_that_gives_no_usable_prompt_logprobs_is_refused_at_the_start(
    change: Change, told: str, remedy: str
) -> None:
    error = await refused(Server(change), topk=2)
    assert told in error.message
    assert remedy in error.remedy


def status(code: int, message: str) -> Change:
    return lambda answer, asked: web.json_response({"error": {"message": message}}, status=code)


@pytest.mark.parametrize(
    ("code", "message", "remedy"),
    [
        (400, "Requested prompt logprobs of 3, which is greater than max allowed: 2", "--max-logprobs 3"),
        (404, "no such route", "/v1"),
        (422, "prompt must be text", "--max-logprobs"),
    ],
)
async def test_a_refusal_is_told_in_the_servers_words_and_not_repeated(code: int, message: str, remedy: str) -> None:
    server = Server(status(code, message))
    error = await refused(server, topk=3)
    assert message in error.message
    assert remedy in error.remedy
    assert len(server.asked) == 1


async def test_a_wrong_key_is_refused_without_being_told() -> None:
    error = await refused(Server(), api_key="another")
    assert "refused the key" in error.message
    assert "api_key_env" in error.remedy
    assert "another" not in str(error)


async def test_an_unserved_model_and_a_short_context_are_refused_at_the_start() -> None:
    error = await refused(Server(), model="other")
    assert f"serves {MODEL}, not other" in error.message
    error = await refused(Server(), context_tokens=1000)  # no room left for the token that a server must sample
    assert "holds 1000 tokens" in error.message
    assert "--max-model-len 1001" in error.remedy
    async with started(Server(), context_tokens=999):
        pass


async def test_of_several_models_one_has_to_be_named() -> None:
    server = Server()
    server.models = {"data": [{"id": "first"}, {"id": MODEL}]}
    assert "serves first, org/teacher, not one model" in (await refused(server)).message
    async with started(server, model=MODEL):
        pass


@pytest.mark.parametrize("code", [429, 500, 503])
async def test_a_server_that_is_busy_or_starting_is_asked_again(code: int) -> None:
    left = [3]

    def busy_at_first(answer: Answer, asked: dict[str, Any]) -> Any:
        left[0] -= 1
        return web.Response(status=code, text="busy") if left[0] >= 0 else answer

    server = Server(busy_at_first)
    async with started(server) as teacher:
        assert len(server.asked) == 4
        assert len((await teacher.score([1, 2, 3], start=1)).logprobs) == 2


async def test_a_server_that_stays_broken_fails_with_its_last_words() -> None:
    server = Server(status(500, "out of memory"))
    error = await refused(server, max_attempts=3)
    assert "out of memory" in error.message
    assert "after 3 attempts" in error.message
    assert len(server.asked) == 3


async def test_a_server_that_never_answers_is_given_up_within_the_limits() -> None:
    never = asyncio.Event()

    async def wait(answer: Answer) -> Answer:
        await never.wait()
        return answer

    server = Server(lambda answer, asked: wait(answer))
    error = await refused(server, request_limit_s=0.05, max_attempts=2)
    assert "did not answer within 0.05 s, after 2 attempts" in error.message
    error = await refused(server, request_limit_s=60.0, limit_s=0.05)
    assert "for 0.05 s" in error.message


async def test_a_server_that_is_not_there_fails_by_name() -> None:
    server = Server()
    async with server.serving():
        pass
    teacher = teacher_at(server, max_attempts=2)
    with pytest.raises(TeacherFailed, match="cannot be reached") as failed:
        await teacher.start()
    assert server.base_url in failed.value.message


async def test_a_teacher_that_was_not_started_or_is_closed_scores_nothing() -> None:
    teacher = teacher_at(Server())
    for _ in range(2):
        with pytest.raises(TeacherFailed, match="not started"):
            await teacher.score([1, 2], start=1)
        await teacher.close()


async def test_no_more_requests_than_allowed_are_open_at_once() -> None:
    running = [0, 0]

    async def count(answer: Answer) -> Answer:
        running[0] += 1
        running[1] = max(running)
        await asyncio.sleep(0)
        running[0] -= 1
        return answer

    async with started(Server(lambda answer, asked: count(answer)), concurrency=2) as teacher:
        await asyncio.gather(*[teacher.score([1, 2, 3], start=1) for _ in range(12)])
    assert running[1] <= 2


async def test_without_the_served_models_tokenizer_the_user_is_told_so(tmp_path: Path) -> None:
    policy = tiny_tokenizer(tmp_path / "policy")
    async with Server().serving() as server:
        teacher = teacher_at(server, policy_tokenizer=policy)
        (note,) = await teacher.start()
        assert "not compared" in note
        await teacher.close()
        teacher = teacher_at(server, policy_tokenizer=policy, tokenizer=policy)
        assert await teacher.start() == []
        await teacher.close()


async def test_a_served_model_with_another_tokenizer_is_refused_before_it_is_asked(tmp_path: Path) -> None:
    policy, other = tiny_tokenizer(tmp_path / "policy"), tiny_tokenizer(tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    content["model"]["vocab"]["<think>"] = content["model"]["vocab"].pop("<reserved_380>")
    (other / "tokenizer.json").write_text(json.dumps(content))
    server = Server()
    async with server.serving():
        with pytest.raises(TokenizerMismatch, match="<think>"):
            await teacher_at(server, policy_tokenizer=policy, tokenizer=other).start()
    assert server.asked == []
