"""The contract of `Generator.score`, held against both engines: a teacher's numbers are those of a plain forward pass.

The reference is plain transformers over the whole sequence in one piece, in float64.
"""

import asyncio
from pathlib import Path

import pytest

from tests.generate.conftest import BACKENDS
from tests.generate.rig import MAX_MODEL_LEN, MAX_TOPK, Rig, new_generator, prompt, worst
from tests.generate.rig import TOLERANCE as REPLY_TOLERANCE
from tests.tiny import tiny_model
from thundersync.errors import EngineFailed, PublishFailed

# A float32 engine against a float64 forward.
TOLERANCE = 5e-5


def worst_error(rig: Rig, token_ids: list[int], start: int, logprobs: list[float]) -> float:
    return worst(logprobs, rig.logprobs(token_ids[:start], token_ids[start:]))


@pytest.mark.parametrize(("length", "start"), [(2, 1), (40, 1), (40, 39), (300, 120), (MAX_MODEL_LEN, 200)])
async def test_scores_are_the_logprobs_of_one_forward_pass(rig: Rig, length: int, start: int) -> None:
    ids = prompt(200 + length + start, length)
    scores = await rig.score(ids, start)
    assert worst_error(rig, ids, start, scores.logprobs) < TOLERANCE
    assert (scores.top_ids, scores.top_logprobs) == ([], [])
    assert scores.policy_version == rig.generator.policy_version


@pytest.mark.parametrize("topk", [1, 8, MAX_TOPK])
async def test_the_most_probable_tokens_come_best_first(rig: Rig, topk: int) -> None:
    ids = prompt(210 + topk, 150)
    scores = await rig.score(ids, 90, topk)
    expected = rig.table(ids, 90)
    assert worst_error(rig, ids, 90, scores.logprobs) < TOLERANCE
    assert len(scores.top_ids) == 60
    for place, (top, logprobs) in enumerate(zip(scores.top_ids, scores.top_logprobs, strict=True)):
        assert len(set(top)) == topk
        assert logprobs == sorted(logprobs, reverse=True)
        # Two nearly equal tokens may change places; what is said of each must be right, and none may be missing.
        assert worst(logprobs, expected[place, top].tolist()) < TOLERANCE
        assert logprobs[-1] >= expected[place].topk(topk).values[-1].item() - TOLERANCE


async def test_turns_of_a_growing_conversation_are_scored_from_its_cached_beginning(rig: Rig) -> None:
    ids = prompt(220, 170)
    before = rig.generator.stats()
    for turn in range(4):
        start = len(ids)
        ids = ids + prompt(221 + turn, 40)  # a reply
        scores = await rig.score(ids, start, 4)
        assert worst_error(rig, ids, start, scores.logprobs) < TOLERANCE
        ids = ids + prompt(231 + turn, 33)  # what a tool said: never scored
    after = rig.generator.stats()
    # Each turn after the first finds everything before it, up to a block, its own tool output excepted.
    assert after.cached_tokens - before.cached_tokens >= 3 * 192
    assert after.prompt_tokens - before.prompt_tokens == 210 + 283 + 356 + 429


async def test_a_sequence_that_is_cached_beyond_its_start_is_scored_all_the_same(rig: Rig) -> None:
    ids = prompt(240, 128)
    reply = await rig.generate(ids, max_tokens=100)
    whole = ids + reply.token_ids
    for start in (1, 64, 128):
        scores = await rig.score(whole, start)
        assert worst_error(rig, whole, start, scores.logprobs) < TOLERANCE
    # The engine's two ways to the same numbers: sampled with, and scored afterwards.
    assert worst((await rig.score(whole, 128)).logprobs, reply.logprobs) < TOLERANCE


async def test_scores_and_replies_side_by_side_are_exact(rig: Rig) -> None:
    lengths = [(2, 1), (33, 32), (64, 1), (65, 60), (130, 70), (257, 3), (400, 390), (500, 250)]
    sequences = [(prompt(250 + i, length), start) for i, (length, start) in enumerate(lengths)]
    prompts = [prompt(260 + i, 20 + 31 * i) for i in range(8)]
    replies, scores = await asyncio.gather(
        asyncio.gather(*[rig.generate(ids, max_tokens=30) for ids in prompts]),
        asyncio.gather(*[rig.score(ids, start, i % 3) for i, (ids, start) in enumerate(sequences)]),
    )
    for (ids, start), scored in zip(sequences, scores, strict=True):
        assert worst_error(rig, ids, start, scored.logprobs) < TOLERANCE
    for ids, reply in zip(prompts, replies, strict=True):
        assert rig.worst_error(ids, reply) < REPLY_TOLERANCE


async def test_scores_come_from_the_weights_published_last(rig: Rig) -> None:
    ids = prompt(270, 150)
    before = await rig.score(ids, 100)
    rig.change_weights(11)
    await rig.publish()
    after = await rig.score(ids, 100)
    assert after.policy_version == before.policy_version + 1
    assert worst_error(rig, ids, 100, before.logprobs) > 100 * TOLERANCE
    assert worst_error(rig, ids, 100, after.logprobs) < TOLERANCE


async def test_a_cancelled_score_leaves_the_others_exact(rig: Rig) -> None:
    doomed = [asyncio.create_task(rig.score(prompt(280 + i, 500), 1)) for i in range(3)]
    ids = prompt(285, 300)
    survivor = asyncio.create_task(rig.score(ids, 100))
    await rig.generate(prompt(286, 5), max_tokens=1)
    for task in doomed:
        task.cancel()
    await asyncio.wait(doomed)
    assert worst_error(rig, ids, 100, (await survivor).logprobs) < TOLERANCE
    assert rig.generator.stats().running == 0


@pytest.mark.parametrize(
    ("length", "start", "topk", "told"),
    [
        (10, 0, 0, "from token 0 of 10"),
        (10, 10, 0, "from token 10 of 10"),
        (0, 1, 0, "from token 1 of 0"),
        (MAX_MODEL_LEN + 1, 100, 0, f"context holds {MAX_MODEL_LEN}"),
        (10, 5, 10_000, "most probable tokens"),
    ],
)
async def test_an_impossible_score_is_refused_and_the_engine_lives(
    rig: Rig, length: int, start: int, topk: int, told: str
) -> None:
    with pytest.raises(EngineFailed, match=told):
        await rig.score(prompt(290, length), start, topk)
    await rig.score(prompt(291, 10), 5)


async def test_an_id_beyond_the_vocabulary_is_refused_and_the_engine_lives(rig: Rig) -> None:
    for odd in (384, 10**6, -1):
        with pytest.raises(EngineFailed):
            await rig.score([5, 6, odd, 7], 1)
    ids = prompt(292, 10)
    assert worst_error(rig, ids, 5, (await rig.score(ids, 5)).logprobs) < TOLERANCE


async def test_nothing_is_scored_after_a_publish_that_failed(rig: Rig) -> None:
    arena = rig.write_arena(model__norm__weight="")
    with pytest.raises(PublishFailed):
        await rig.generator.publish(arena, version=rig.generator.policy_version + 1)
    with pytest.raises(EngineFailed, match="not whole"):
        await rig.score(prompt(293, 10), 5)
    await rig.publish()
    await rig.score(prompt(293, 10), 5)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_frozen_teacher_scores_without_ever_being_published_to(backend: str, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "teacher", seed=8, tie=False, vocab=448)
    generator = new_generator(backend, model, tmp_path / "engine.log")
    await generator.start()
    try:
        rig = Rig(generator, model, tmp_path)
        ids = prompt(294, 60)
        scores = await rig.score(ids, 20, 3)
        assert scores.policy_version == 0
        assert worst_error(rig, ids, 20, scores.logprobs) < TOLERANCE
    finally:
        await generator.close()
    with pytest.raises(EngineFailed):
        await rig.score(ids, 20)
