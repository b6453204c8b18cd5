"""The first generator: vLLM's asynchronous engine as an object of the coordinator, its EngineCore a child process.

Token ids in, sampled ids and logprobs out, and weights by shared memory. Knows nothing of chat, tools or training.

Weights travel through host memory (`generate.arena`) on every device; on a GPU that is a copy per publish that a
carrier over NVLink would save, and nothing else would change here.
"""

import asyncio
import gc
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import psutil

from thundersync.config import EngineConfig
from thundersync.errors import EngineDied, EngineFailed
from thundersync.generate.base import EngineStats, Generation, Sampling, TokenScores, WeightArena
from thundersync.generate.child import end_processes, log_tail
from thundersync.generate.engine_checks import (
    checked_scores,
    refuse_faults,
    refuse_impossible_score,
    refuse_requests_in_flight,
    refuse_torn_weights,
)
from thundersync.generate.manifest import Manifest, read_manifest
from thundersync.generate.meter import Meter
from thundersync.generate.vllm_names import ARENA_FAULTS, ENGINE, PID_FILE, STALE_WEIGHTS
from thundersync.generate.vllm_requests import read_reply, read_scores, reply_parameters, scoring_parameters
from thundersync.generate.vllm_start import VllmSettings, VllmStart, close_logs

MOST_FOLDER_CHARS = 50
PUBLISH_LIMIT_S = 600.0
CLOSE_LIMIT_S = 10.0
# The process holds nothing that its end could damage, so it is killed at once; only a tensor-parallel one has
# shared memory of its own to unlink.
GRACE_S = 0.0
TENSOR_PARALLEL_GRACE_S = 5.0
# Most conversations are much shorter than the context; vLLM preempts, correctly, if this guess was too bold.
ASSUMED_CONTEXT_SHARE = 0.25


class VllmGenerator:
    """One vLLM engine replica; implements `Generator`.

    Start it before this process runs any torch work of its own: then the engine is forked in about 3 s instead of
    spawned in 10 s. Greedy replies (temperature 0) report logprobs at temperature 1.
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
        max_topk: int = 0,
    ) -> None:
        """`dtype` is float32 or bfloat16; `cpus` pins the engine to cores, one thread each (empty: one, unpinned).

        `max_topk` is the most alternatives per token that `score` may be asked for.
        """
        self._model_path = model_path
        self._config = config
        self._max_model_len = max_model_len
        self._dtype = dtype
        self._log_path = log_path
        self._cpus = tuple(cpus)
        self._seed = seed
        self._max_topk = max_topk
        self._spare = 0
        """Tokens vLLM's context is longer than ours. It refuses a prompt that leaves no room for a reply, but a rollout
        may fill the context to its last token and has to be scored. No position beyond ours is ever computed."""
        self._meter = Meter()
        self._version = 0
        self._whole = True
        """False from the moment a publish begins until it has succeeded: nothing may be sampled in between."""
        self._max_concurrency = config.max_num_seqs
        self._manifest: Manifest | None = None
        self._llm: Any = None
        self._folder: Path | None = None

    @property
    def name(self) -> str:
        return "vllm"

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def max_concurrency(self) -> int:
        return self._max_concurrency

    @property
    def process_id(self) -> int | None:
        """Of the EngineCore process; None before the start and after the close."""
        try:
            return int((self._folder / PID_FILE).read_text()) if self._folder else None
        except (OSError, ValueError):
            return None

    async def start(self) -> None:
        """Start the engine with the folder's weights as version 0. Raises: EngineFailed."""
        self._manifest = read_manifest(self._model_path)
        # Sockets lie in it, and a Unix address holds 107 bytes.
        short = len(tempfile.gettempdir()) <= MOST_FOLDER_CHARS
        self._folder = Path(tempfile.mkdtemp(prefix="ts-", dir=None if short else "/tmp"))
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        # A model with two sets of rotary factors takes the long ones for every request if the context is one longer.
        self._spare = 0 if self._manifest.long_from == self._max_model_len else 1
        settings = VllmSettings(
            model_path=str(self._model_path),
            engine=self._config,
            max_model_len=self._max_model_len + self._spare,
            dtype=self._dtype,
            seed=self._seed,
            max_topk=self._max_topk,
            cpus=self._cpus,
            threads=max(1, len(self._cpus)),
            log_path=str(self._log_path.resolve()),
            folder=str(self._folder),
        )
        start = VllmStart(settings)
        starting = asyncio.ensure_future(asyncio.to_thread(self._launch, start))
        try:
            await asyncio.shield(starting)
            await self._llm.init_weight_transfer_engine(_init_request())
            await self._llm.update_weight_version(str(self._version))
        except asyncio.CancelledError:
            await self._abandon(start, starting)
            raise
        except Exception as error:
            await self.close()
            raise EngineFailed(
                f"vLLM did not start: {_first_line(error)}\n{log_tail(self._log_path)}",
                remedy='Read the log above, or set engine.backend = "transformers".',
            ) from error
        cache = self._llm.vllm_config.cache_config
        tokens = (cache.num_gpu_blocks or 0) * cache.block_size
        self._meter.kv_tokens = tokens
        fitting = int(tokens / (self._max_model_len * ASSUMED_CONTEXT_SHARE))
        self._max_concurrency = max(1, min(self._config.max_num_seqs, fitting))

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        """Sample one reply; see `Generator.generate`."""
        llm = self._usable()
        room = self._max_model_len - len(prompt_ids)
        if room < 1:
            return Generation(token_ids=[], logprobs=[], finish_reason="context", policy_version=self._version)
        self._meter.began(time.monotonic(), prompt_tokens=len(prompt_ids))
        try:
            output = await self._run(llm, prompt_ids, reply_parameters(sampling, room, self._end_ids), request_id)
        finally:
            self._meter.ended(time.monotonic(), prompt_tokens=len(prompt_ids))
        generation = read_reply(output, version=self._version, cut_by_context=room < sampling.max_tokens)
        self._meter.generated(len(prompt_ids), generation)
        return generation

    async def score(self, token_ids: Sequence[int], *, start: int, topk: int = 0, request_id: str) -> TokenScores:
        """Logprobs of given tokens; see `Generator.score`. `topk` goes up to the constructor's `max_topk`."""
        llm = self._usable()
        refuse_impossible_score(
            token_ids,
            start=start,
            topk=topk,
            max_model_len=self._max_model_len - 1 + self._spare,
            max_topk=self._max_topk,
            request_id=request_id,
        )
        self._meter.began(time.monotonic(), prompt_tokens=len(token_ids))
        try:
            # A sequence that this engine has seen beyond `start`, as when a policy scores its own reply, has places
            # cached whose logprobs are wanted. Such a one, and only such a one, is computed anew.
            for reads_cache in (True, False):
                asked = request_id if reads_cache else f"{request_id}-anew"
                output = await self._run(llm, token_ids, scoring_parameters(topk, reads_cache), asked)
                scores = read_scores(output, token_ids, start=start, topk=topk, version=self._version)
                if scores is not None:
                    break
        finally:
            self._meter.ended(time.monotonic(), prompt_tokens=len(token_ids))
        if scores is None:
            raise EngineFailed(f"vLLM left places of request {request_id} without a logprob")
        self._meter.scored(len(token_ids), output.num_cached_tokens or 0)
        return checked_scores(scores, count=len(token_ids) - start, topk=topk, engine=ENGINE, request_id=request_id)

    async def publish(self, arena: WeightArena, *, version: int) -> float:
        """Take every tensor of `arena`; see `Generator.publish`. The prefix cache is emptied with it."""
        if self._llm is None or self._manifest is None:
            raise EngineFailed("vLLM is not running", remedy="Start it first.")
        refuse_requests_in_flight(self._meter.running)
        started_s = time.monotonic()
        self._whole = False
        faults = self._manifest.faults(arena, dtype=self._dtype)
        try:
            if not faults:
                async with asyncio.timeout(PUBLISH_LIMIT_S):
                    faults = await self._take(msgspec.to_builtins(arena), version)
        except Exception as error:
            if self._llm.errored:
                raise self._died() from error
            faults = [_first_line(error)]
        refuse_faults(faults, engine=ENGINE, version=version, log_path=self._log_path)
        self._version = version
        self._whole = True
        return time.monotonic() - started_s

    def stats(self) -> EngineStats:
        return self._meter.stats(time.monotonic())

    async def close(self) -> None:
        """End the EngineCore process, its sockets and its files, within CLOSE_LIMIT_S seconds. Idempotent."""
        llm, self._llm = self._llm, None
        processes = self._processes()
        try:
            if llm is not None:
                if llm.output_handler is not None:
                    # Left alone it would report the end of its engine as a death.
                    llm.output_handler.cancel()
                parallel = self._config.tensor_parallel_size > 1
                await asyncio.to_thread(llm.shutdown, TENSOR_PARALLEL_GRACE_S if parallel else GRACE_S)
            await end_processes(processes, limit_s=CLOSE_LIMIT_S)
        finally:
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None
            close_logs(str(self._log_path.resolve()))
            del llm
            # vLLM's objects refer to each other; collected at interpreter exit instead, they print errors.
            gc.collect()

    def _usable(self) -> Any:
        if self._llm is None:
            raise EngineFailed("vLLM is not running", remedy="Start it first.")
        if self._llm.errored:
            raise self._died()
        refuse_torn_weights(self._whole, engine=ENGINE)
        return self._llm

    @property
    def _end_ids(self) -> tuple[int, ...]:
        return self._manifest.end_ids if self._manifest is not None else ()

    def _launch(self, start: VllmStart) -> None:
        # Assigned, not returned: exceptions that vLLM keeps hold on to this thread's frames, and with them to what
        # they return, for ever.
        self._llm = start.run()

    async def _run(self, llm: Any, prompt_ids: Sequence[int], parameters: Any, request_id: str) -> Any:
        from vllm.inputs import TokensPrompt
        from vllm.v1.engine.exceptions import EngineDeadError

        prompt = TokensPrompt(prompt_token_ids=list(prompt_ids))
        output = None
        try:
            async with aclosing(llm.generate(prompt, parameters, request_id)) as outputs:
                async for final in outputs:  # only the last is sent
                    output = final
        except EngineDeadError as error:
            raise self._died() from error
        except Exception as error:
            raise EngineFailed(f"vLLM refused or failed request {request_id}: {_first_line(error)}") from error
        if output is None:
            raise EngineFailed(f"vLLM gave no answer to request {request_id}")
        return output

    async def _take(self, arena: dict[str, Any], version: int) -> list[str]:
        """Move the arena's weights into the engine; faults as sentences. Stays paused unless there are none."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        faults = _flat(await self._llm.collective_rpc(ARENA_FAULTS, args=(arena,)))
        if faults:
            return faults
        await self._llm.pause_generation(mode="abort", clear_cache=True)
        await self._llm.start_weight_update()
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info={"arena": arena}))
        await self._llm.finish_weight_update(str(version))
        faults = [
            f"{name} is stale" for name in _flat(await self._llm.collective_rpc(STALE_WEIGHTS, args=(arena, version)))
        ]
        if not await self._llm.reset_prefix_cache():
            faults.append("the prefix cache of the old weights could not be emptied")
        if not faults:
            await self._llm.resume_generation()
        return faults

    def _died(self) -> EngineDied:
        return EngineDied(
            f"vLLM's engine process died; its log ends with\n{log_tail(self._log_path)}",
            remedy="Its rollouts run again on another replica, or resume the run.",
        )

    def _processes(self) -> list[psutil.Process]:
        pid = self.process_id
        try:
            process = psutil.Process(pid) if pid else None
            return [process, *process.children(recursive=True)] if process else []
        except psutil.NoSuchProcess:
            return []

    async def _abandon(self, start: VllmStart, starting: "asyncio.Future[None]") -> None:
        """A thread cannot be cancelled; without its child process it soon fails by itself."""
        deadline_s = time.monotonic() + CLOSE_LIMIT_S
        while not starting.done() and time.monotonic() < deadline_s:
            start.cancel()
            await asyncio.wait([starting], timeout=0.1)
        if starting.done() and not starting.cancelled():
            starting.exception()  # looked at, so that asyncio does not report it as forgotten
        await self.close()


def _init_request() -> Any:
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    return WeightTransferInitRequest(init_info={})


def _flat(answers: Sequence[Sequence[str]]) -> list[str]:
    """One list out of every worker's, without repeats."""
    return list(dict.fromkeys(line for answer in answers for line in answer))


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
