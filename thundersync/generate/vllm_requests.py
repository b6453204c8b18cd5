"""What vLLM is asked for, and how its answers are read: sampled replies, and scores of given tokens.

Knows vLLM's structures; nothing of processes, weights or teachers.

Scores come from prompt logprobs, where two of vLLM's habits are met. It leaves the prefix cache alone for these, since
places out of the cache have no logprobs; we let it read the cache and take only the places after it, which makes
scoring turn by turn affordable. And one of its two model runners answers with a row for every place of the prompt, the
cached ones uninitialised memory, the other with the computed rows only; so rows are counted from the end.
"""

from collections.abc import Sequence
from typing import Any

from thundersync.errors import EngineFailed
from thundersync.generate.base import Generation, Sampling, TokenScores
from thundersync.generate.engine_checks import refuse_unfinite
from thundersync.generate.vllm_names import ENGINE


def reply_parameters(sampling: Sampling, room: int, end_ids: Sequence[int]) -> Any:
    """vLLM's sampling parameters for a reply of at most `room` tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    # No per-request seed: with a chunked prefill it kills the engine on a CPU.
    return SamplingParams(
        temperature=sampling.temperature,
        max_tokens=min(sampling.max_tokens, room),
        stop=list(sampling.stop),
        stop_token_ids=[] if sampling.to_limit else list(end_ids),
        ignore_eos=sampling.to_limit,
        logprobs=0,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def read_reply(output: Any, *, version: int, cut_by_context: bool) -> Generation:
    """The reply in vLLM's answer. Raises: EngineFailed when it is not wholly `version`'s, or has a bad logprob."""
    reply = output.outputs[0]
    token_ids = list(reply.token_ids)
    logprobs = [entry[token].logprob for entry, token in zip(reply.logprobs or [], token_ids, strict=True)]
    refuse_unfinite(logprobs, engine=ENGINE, request_id=output.request_id)
    _refuse_other_versions(output, version)
    reason = reply.finish_reason
    if reason not in ("stop", "length", "abort"):
        raise EngineFailed(f"vLLM ended request {output.request_id} by {reason!r}")
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason="context" if reason == "length" and cut_by_context else reason,
        policy_version=version,
        cached_tokens=output.num_cached_tokens or 0,
    )


def scoring_parameters(topk: int, reads_cache: bool) -> Any:
    """vLLM's sampling parameters for a score. It has to sample one token, which is greedy and thrown away."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0,
        max_tokens=1,
        prompt_logprobs=topk,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_reading_prefix_cache=not reads_cache,
    )


def read_scores(output: Any, token_ids: Sequence[int], *, start: int, topk: int, version: int) -> TokenScores | None:
    """Scores of `token_ids[start:]` in vLLM's answer; None when one of these places was not computed.

    Raises: EngineFailed when another version than `version` answered.
    """
    _refuse_other_versions(output, version)
    wanted = token_ids[start:]
    flat = output.prompt_logprobs
    if flat is None:
        return None
    first = len(flat) - len(wanted)
    # The place before `start` predicts its token. The first row of all, of a token with nothing before it, is empty.
    if first < 1 or (output.num_cached_tokens or 0) > start - 1:
        return None
    logprobs: list[float] = []
    top_ids: list[list[int]] = []
    top_logprobs: list[list[float]] = []
    for token_id, begin, end in zip(wanted, flat.start_indices[first:], flat.end_indices[first:], strict=True):
        # A row begins with the given token itself; the best ones follow in order.
        if end - begin != topk + 1 or flat.token_ids[begin] != token_id:
            return None
        logprobs.append(flat.logprobs[begin])
        if topk:
            top_ids.append(flat.token_ids[begin + 1 : end])
            top_logprobs.append(flat.logprobs[begin + 1 : end])
    return TokenScores(logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs, policy_version=version)


def _refuse_other_versions(output: Any, version: int) -> None:
    reply = output.outputs[0]
    versions = {span.version for span in reply.weight_versions or []}
    if reply.token_ids and versions != {str(version)}:
        raise EngineFailed(
            f"request {output.request_id} was sampled by versions {sorted(versions)}, not by {version} alone",
            remedy="Weights were published during generation; report it with the run folder.",
        )
