"""The second generator: plain transformers in a child process, for machines where vLLM has no wheel.

Same contract as `generate.vllm`, at about half its speed. This side only carries messages; the model lives in
`transformers_worker`. Knows nothing of chat, tools or training.
"""

import asyncio
import itertools
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from thundersync.config import EngineConfig
from thundersync.errors import EngineDied, EngineFailed, PublishFailed
from thundersync.generate.base import EngineStats, Generation, Sampling, TokenScores, WeightArena
from thundersync.generate.child import child_environment, log_tail
from thundersync.generate.engine_checks import (
    checked_scores,
    refuse_faults,
    refuse_impossible_score,
    refuse_requests_in_flight,
    refuse_torn_weights,
    refuse_unfinite,
)
from thundersync.generate.meter import Meter
from thundersync.generate.transformers_messages import (
    LENGTH,
    Abort,
    Answer,
    Ask,
    FromWorker,
    Publish,
    Published,
    Ready,
    Score,
    Scores,
    ToWorker,
    WorkerSettings,
    frame,
)

START_LIMIT_S = 600.0
PUBLISH_LIMIT_S = 600.0
CLOSE_LIMIT_S = 10.0
Said = TypeVar("Said", Answer, Scores)
ENGINE = "the engine"
"""How errors speak of it."""


class TransformersGenerator:
    """One engine replica on plain transformers; implements `Generator`.

    Greedy replies (temperature 0) report logprobs at temperature 1.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        config: EngineConfig,
        max_model_len: int,
        dtype: str,
        log_path: Path,
        cpus: Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        """`dtype` is float32 or bfloat16; `cpus` pins the engine to cores, one thread each (empty: one, unpinned)."""
        self._settings = WorkerSettings(
            model_path=str(model_path),
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            kv_cache_bytes=int(config.kv_cache_gib * 2**30),
            gpu_memory_share=config.gpu_memory_utilization,
            seed=seed,
            cpus=list(cpus),
            threads=max(1, len(cpus)),
        )
        self._gpus = config.gpus
        self._log_path = log_path
        self._meter = Meter()
        self._version = 0
        self._whole = True
        """False from the moment a publish begins until it has succeeded."""
        self._max_concurrency = config.max_num_seqs
        self._vocabulary = 0
        self._numbers = itertools.count()
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._published: asyncio.Future[Published] | None = None
        self._answers: dict[int, asyncio.Future[Answer | Scores]] = {}
        self._dead = False

    @property
    def name(self) -> str:
        return "transformers"

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def max_concurrency(self) -> int:
        return self._max_concurrency

    @property
    def process_id(self) -> int | None:
        """Of the engine's process; None before the start and after the close."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the engine's process with the folder's weights as version 0. Raises: EngineFailed."""
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._ready = asyncio.get_running_loop().create_future()
        settings = msgspec.json.encode(self._settings).decode()
        extra = {"OMP_NUM_THREADS": str(self._settings.threads), "TOKENIZERS_PARALLELISM": "false"}
        if self._gpus:
            extra["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in self._gpus)
        log = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "thundersync.generate.transformers_worker",
                settings,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=child_environment(extra),
                # Ctrl-C of the terminal is the coordinator's, which ends engines in order.
                start_new_session=True,
            )
        finally:
            os.close(log)
        self._reader = asyncio.create_task(self._read(self._process), name="transformers-engine-reader")
        try:
            async with asyncio.timeout(START_LIMIT_S):
                ready = await self._ready
                self._max_concurrency, self._vocabulary = ready.max_concurrency, ready.vocabulary
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise EngineFailed(f"the transformers engine was not ready within {START_LIMIT_S:.0f} s") from error
            raise

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        """Sample one reply; see `Generator.generate`."""
        self._check_usable()
        room = self._settings.max_model_len - len(prompt_ids)
        if room < 1:
            return Generation(token_ids=[], logprobs=[], finish_reason="context", policy_version=self._version)
        if not prompt_ids:
            raise EngineFailed(f"request {request_id} has an empty prompt")
        answer = await self._ask(
            Answer,
            Ask(
                number=next(self._numbers),
                prompt_ids=list(prompt_ids),
                temperature=sampling.temperature,
                max_tokens=min(sampling.max_tokens, room),
                stop=sampling.stop,
                to_limit=sampling.to_limit,
            ),
        )
        refuse_unfinite(answer.logprobs, engine=ENGINE, request_id=request_id)
        if answer.policy_version != self._version:
            raise EngineFailed(f"request {request_id} was sampled by version {answer.policy_version}")
        cut_by_context = answer.finish_reason == "length" and room < sampling.max_tokens
        generation = Generation(
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            finish_reason="context" if cut_by_context else answer.finish_reason,
            policy_version=answer.policy_version,
            cached_tokens=answer.cached_tokens,
        )
        self._meter.generated(len(prompt_ids), generation)
        return generation

    async def score(self, token_ids: Sequence[int], *, start: int, topk: int = 0, request_id: str) -> TokenScores:
        """Logprobs of given tokens; see `Generator.score`. `topk` goes up to the vocabulary."""
        self._check_usable()
        refuse_impossible_score(
            token_ids,
            start=start,
            topk=topk,
            max_model_len=self._settings.max_model_len,
            max_topk=self._vocabulary,
            request_id=request_id,
        )
        if not 0 <= min(token_ids) <= max(token_ids) < self._vocabulary:
            raise EngineFailed(
                f"request {request_id} has an id the model does not know: it has {self._vocabulary} tokens",
                remedy="The tokens come from another tokenizer than the scoring model's.",
            )
        answer = await self._ask(
            Scores, Score(number=next(self._numbers), token_ids=list(token_ids), start=start, topk=topk)
        )
        self._meter.scored(len(token_ids), answer.cached_tokens)
        scores = TokenScores(
            logprobs=answer.logprobs,
            top_ids=answer.top_ids,
            top_logprobs=answer.top_logprobs,
            policy_version=answer.policy_version,
        )
        return checked_scores(scores, count=len(token_ids) - start, topk=topk, engine=ENGINE, request_id=request_id)

    async def publish(self, arena: WeightArena, *, version: int) -> float:
        """Take every tensor of `arena`; see `Generator.publish`. Kept prefixes are dropped with it."""
        if self._process is None or self._dead:
            raise self._died()
        refuse_requests_in_flight(self._meter.running)
        started_s = time.monotonic()
        self._whole = False
        self._published = asyncio.get_running_loop().create_future()
        await self._send(Publish(arena=arena, version=version))
        try:
            async with asyncio.timeout(PUBLISH_LIMIT_S):
                faults = (await self._published).faults
        except TimeoutError as error:
            raise PublishFailed(f"the engine did not take the weights within {PUBLISH_LIMIT_S:.0f} s") from error
        refuse_faults(faults, engine=ENGINE, version=version, log_path=self._log_path)
        self._version = version
        self._whole = True
        return time.monotonic() - started_s

    def stats(self) -> EngineStats:
        return self._meter.stats(time.monotonic())

    async def close(self) -> None:
        """End the process, at once: it holds nothing that its end could damage. Idempotent."""
        process, self._process = self._process, None
        reader, self._reader = self._reader, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await process.wait()
        if reader is not None:
            await asyncio.wait([reader], timeout=CLOSE_LIMIT_S)

    def _check_usable(self) -> None:
        if self._process is None or self._dead:
            raise self._died()
        refuse_torn_weights(self._whole, engine=ENGINE)

    async def _ask(self, kind: type[Said], ask: Ask | Score) -> Said:
        """The worker's answer to `ask`, which is of `kind`."""
        self._meter.began(time.monotonic())
        self._answers[ask.number] = asyncio.get_running_loop().create_future()
        try:
            await self._send(ask)
            answer = await self._answers[ask.number]
            assert isinstance(answer, kind)
            return answer
        except asyncio.CancelledError:
            with suppress(EngineDied):
                self._write(Abort(number=ask.number))
            raise
        finally:
            del self._answers[ask.number]
            self._meter.ended(time.monotonic())

    async def _send(self, message: ToWorker) -> None:
        pipe = self._write(message)
        try:
            await pipe.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._died() from error

    def _write(self, message: ToWorker) -> asyncio.StreamWriter:
        if self._dead or self._process is None or self._process.stdin is None:
            raise self._died()
        try:
            self._process.stdin.write(frame(message))
        except RuntimeError as error:  # uvloop's word for a pipe whose end is known already
            raise self._died() from error
        return self._process.stdin

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Deliver the worker's answers until its pipe ends; then fail everyone who still waits."""
        assert process.stdout is not None
        decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
        try:
            while True:
                (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
                self._deliver(decoder.decode(await process.stdout.readexactly(length)))
        except asyncio.IncompleteReadError:
            self._dead = True
            waiting = [self._ready, self._published, *self._answers.values()]
            for future in waiting:
                if future is not None and not future.done():
                    future.set_exception(self._died())
                    future.exception()  # looked at: whoever waited may be gone already

    def _deliver(self, message: FromWorker) -> None:
        future: asyncio.Future[Ready] | asyncio.Future[Published] | asyncio.Future[Answer | Scores] | None
        match message:
            case Ready():
                future = self._ready
            case Published():
                future = self._published
            case Answer(number=number) | Scores(number=number):
                future = self._answers.get(number)  # gone when its caller was cancelled
        if future is not None and not future.done():
            future.set_result(message)  # type: ignore[arg-type]

    def _died(self) -> EngineDied:
        return EngineDied(
            f"the transformers engine is not running; its log ends with\n{log_tail(self._log_path)}",
            remedy="Its rollouts run again on another replica, or resume the run.",
        )
