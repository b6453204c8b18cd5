"""A teacher behind an OpenAI-compatible server that gives prompt logprobs, as vLLM's does.

Sends token ids to /completions and reads `prompt_logprobs`, vLLM's extension: for every place of the prompt an object
of {token id: {logprob, rank}}. What a server really gives is proven by a probe at the start, since servers that do not
know the field ignore it. Knows HTTP and JSON; nothing of where the tokens come from.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from msgspec import Raw, Struct
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from thundersync.errors import TeacherFailed
from thundersync.generate.base import TokenScores
from thundersync.score.tokenizers import refuse_other_tokenizer

PROBE_IDS = tuple(range(10, 18))
"""In every vocabulary."""
WORTH_ANOTHER_TRY = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
LONGEST_WAIT_S = 30.0
DETAIL_CHARS = 400
# vLLM's servers write this for minus infinity, which JSON has not.
NO_PROBABILITY = -9999.0


class _Said(Struct, frozen=True):
    """One token at one place."""

    logprob: float


class _Choice(Struct, frozen=True):
    prompt_logprobs: list[Raw] | None = None


class _Completion(Struct, frozen=True):
    choices: list[_Choice] = []
    prompt_logprobs: list[Raw] | None = None
    """Where some servers put it."""


class _Model(Struct, frozen=True):
    id: str
    max_model_len: int | None = None


class _Models(Struct, frozen=True):
    data: list[_Model]


class _TryAgain(Exception):
    """The server could not answer just now."""


class OpenAITeacher:
    """A served model; implements `Teacher`. Waits out a server that is starting or busy, up to `limit_s`."""

    def __init__(
        self,
        *,
        base_url: str,
        model: str = "",
        api_key: str = "",
        topk: int = 0,
        context_tokens: int = 0,
        policy_tokenizer: Path | None = None,
        tokenizer: Path | None = None,
        concurrency: int = 32,
        request_limit_s: float = 120.0,
        limit_s: float = 600.0,
        max_attempts: int = 12,
        first_wait_s: float = 1.0,
    ) -> None:
        """`base_url` ends in /v1 on most servers; `model` empty = the only one served.

        `topk` is the most that will be asked for, and `context_tokens` the longest sequence: both are checked at the
        start. `tokenizer` is a folder with the served model's, compared with `policy_tokenizer`. One attempt of a
        request may take `request_limit_s`, all of them with the waits between `limit_s`; the first wait is up to
        `first_wait_s` long, each later one up to twice as long, at random.
        """
        self._base_url = base_url.rstrip("/")
        self._model = model
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._topk = topk
        self._context_tokens = context_tokens
        self._policy_tokenizer = policy_tokenizer
        self._tokenizer = tokenizer
        self._places = asyncio.Semaphore(concurrency)
        self._request_limit_s = request_limit_s
        self._limit_s = limit_s
        self._max_attempts = max_attempts
        self._first_wait_s = first_wait_s
        self._session: aiohttp.ClientSession | None = None
        self._payload_bytes = 0

    @property
    def name(self) -> str:
        return f"{self._model or 'the model'} at {self._base_url}"

    @property
    def payload_bytes(self) -> int:
        return self._payload_bytes

    async def start(self) -> list[str]:
        """Compare tokenizers, find the model, prove that it gives what a teacher must give. See `Teacher.start`."""
        notes = []
        if self._tokenizer is not None and self._policy_tokenizer is not None:
            await asyncio.to_thread(refuse_other_tokenizer, self._policy_tokenizer, self._tokenizer)
        else:
            notes.append(
                f"the tokenizer of {self.name} was not compared with the policy's, and scores under another one mean "
                "nothing: name its folder as teacher.tokenizer to have it checked"
            )
        self._session = aiohttp.ClientSession(
            headers=self._headers, timeout=aiohttp.ClientTimeout(total=self._request_limit_s), json_serialize=_json
        )
        try:
            await self._find_model()
            await self.score(PROBE_IDS, start=1, topk=self._topk)
        except BaseException:
            await self.close()
            raise
        return notes

    async def score(self, token_ids: Sequence[int], *, start: int, topk: int = 0) -> TokenScores:
        """See `Teacher.score`."""
        if not 1 <= start < len(token_ids):
            raise TeacherFailed(f"scores are asked for from token {start} of {len(token_ids)}")
        body = await self._ask(
            "POST",
            "/completions",
            {
                "model": self._model,
                "prompt": list(token_ids),
                "prompt_logprobs": topk,
                # Nothing should be sampled, but servers refuse 0.
                "max_tokens": 1,
                "temperature": 0,
            },
        )
        self._payload_bytes += len(body)
        # Every place of the prompt is in the answer, which makes it megabytes long.
        scores = await asyncio.to_thread(self._read, body, token_ids, start, topk)
        if fault := scores.fault(count=len(token_ids) - start, topk=topk):
            raise self._refusal(fault, remedy='Serve it with vLLM, whose logprobs_mode must be "raw_logprobs".')
        return scores

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _find_model(self) -> None:
        try:
            listed = msgspec.json.decode(await self._ask("GET", "/models", None), type=_Models).data
        except msgspec.DecodeError as error:
            raise self._refusal(f"its list of models cannot be read ({error})", remedy=self._url_remedy()) from error
        served = [each.id for each in listed]
        if not self._model and len(served) == 1:
            self._model = served[0]
        if self._model not in served:
            raise self._refusal(
                f"it serves {', '.join(served) or 'nothing'}, not {self._model or 'one model'}",
                remedy="Set teacher.model to one of these.",
            )
        (found,) = [each for each in listed if each.id == self._model][:1]
        # The server keeps room for the one token it insists on sampling.
        if found.max_model_len is not None and found.max_model_len <= self._context_tokens:
            raise self._refusal(
                f"its context holds {found.max_model_len} tokens, the run's sequences up to {self._context_tokens}",
                remedy=f"Start it with --max-model-len {self._context_tokens + 1} or more.",
            )

    async def _ask(self, method: str, path: str, content: dict[str, Any] | None) -> bytes:
        """The body of a good answer. Raises: TeacherFailed."""
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_TryAgain),
            stop=stop_after_attempt(self._max_attempts),
            wait=wait_random_exponential(multiplier=self._first_wait_s, max=LONGEST_WAIT_S),
            reraise=True,
        )
        last = "no answer yet"
        async with self._places:
            try:
                async with asyncio.timeout(self._limit_s):
                    async for attempt in retrying:
                        with attempt:
                            try:
                                return await self._once(method, path, content)
                            except _TryAgain as error:
                                last = str(error)
                                raise
            except TimeoutError as error:
                raise self._gone(f"{last}, for {self._limit_s:g} s") from error
            except _TryAgain as error:
                raise self._gone(f"{last}, after {self._max_attempts} attempts") from error
        raise AssertionError("the last attempt returns or raises")

    async def _once(self, method: str, path: str, content: dict[str, Any] | None) -> bytes:
        if self._session is None:
            raise self._refusal("it was not started", remedy="Start the teacher first.")
        try:
            async with self._session.request(method, self._base_url + path, json=content) as response:
                body = await response.read()
                status = response.status
        except TimeoutError as error:
            raise _TryAgain(f"it did not answer within {self._request_limit_s:g} s") from error
        except aiohttp.ClientError as error:
            raise _TryAgain(f"it cannot be reached ({error})") from error
        if status in WORTH_ANOTHER_TRY:
            raise _TryAgain(f"it answered {status}: {_detail(body)}")
        if status in (401, 403):
            raise self._refusal(
                f"it refused the key ({status}: {_detail(body)})",
                remedy="Put the server's key into the environment variable that teacher.api_key_env names.",
            )
        if status == 404:
            raise self._refusal(f"it knows no {path} ({_detail(body)})", remedy=self._url_remedy())
        if status != 200:
            raise self._refusal(f"it answered {status}: {_detail(body)}", remedy=self._limits_remedy())
        return body

    def _read(self, body: bytes, token_ids: Sequence[int], start: int, topk: int) -> TokenScores:
        try:
            answer = msgspec.json.decode(body, type=_Completion)
            rows = answer.prompt_logprobs or (answer.choices[0].prompt_logprobs if answer.choices else None)
            if rows is None:
                raise self._refusal(
                    "it answered without prompt_logprobs",
                    remedy="Serve the teacher with vLLM (vllm serve MODEL), or another server that gives the "
                    "logprobs of a prompt given as token ids.",
                )
            if len(rows) != len(token_ids):
                raise self._refusal(
                    f"it gave logprobs for {len(rows)} places of a prompt of {len(token_ids)} tokens",
                    remedy="It must take a prompt of token ids as it is, and add no token of its own.",
                )
            decoder = msgspec.json.Decoder(dict[int, _Said])
            places = [{each: said.logprob for each, said in decoder.decode(row).items()} for row in rows[start:]]
        except msgspec.DecodeError as error:
            raise self._refusal(f"its answer cannot be read ({error})", remedy=self._url_remedy()) from error
        wanted = token_ids[start:]
        for token_id, place in zip(wanted, places, strict=True):
            if token_id not in place:
                raise self._refusal(
                    f"its answer is about other tokens: {token_id} is not among {sorted(place)[:3]}",
                    remedy="It must take a prompt of token ids as it is, and add no token of its own.",
                )
        best = [sorted(place, key=lambda each: (-place[each], each))[:topk] for place in places] if topk else []
        return TokenScores(
            logprobs=[_logprob(place[token_id]) for token_id, place in zip(wanted, places, strict=True)],
            top_ids=best,
            top_logprobs=[
                [_logprob(place[each]) for each in row] for row, place in zip(best, places, strict=bool(topk))
            ],
            policy_version=0,
        )

    def _refusal(self, text: str, *, remedy: str) -> TeacherFailed:
        return TeacherFailed(f"the teacher {self.name} cannot be used: {text}", remedy=remedy)

    def _gone(self, text: str) -> TeacherFailed:
        return TeacherFailed(
            f"the teacher {self.name} does not answer: {text}",
            remedy="Is the server running, and teacher.base_url its?",
        )

    def _url_remedy(self) -> str:
        return "Check teacher.base_url: an OpenAI-compatible server's usually ends in /v1."

    def _limits_remedy(self) -> str:
        return (
            f"A vLLM server needs --max-logprobs {max(self._topk, 1)} or more, and a --max-model-len above the run's "
            "model.max_model_len."
        )


def _logprob(value: float) -> float:
    return value if value > NO_PROBABILITY else float("-inf")


def _json(content: Any) -> str:
    return msgspec.json.encode(content).decode()  # thousands of ids, in a tenth of the standard library's time


def _detail(body: bytes) -> str:
    """What a server says about its refusal, on one line."""
    return " ".join(body[: 4 * DETAIL_CHARS].decode(errors="replace").split())[:DETAIL_CHARS] or "no reason given"
