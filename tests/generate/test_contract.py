"""The contract of `Generator`, held against both engines: every fact here is one the training relies on.

The reference is an independent forward pass of plain transformers over prompt and reply together, in float32.
"""

import asyncio
import math

import msgspec
import pytest

from tests.generate.rig import MAX_MODEL_LEN, TOLERANCE, Rig, prompt
from tests.tiny import END_OF_TURN_ID
from thundersync.errors import EngineFailed, PublishFailed
from thundersync.generate.arena import open_arena


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_the_sampling_distribution(rig: Rig, temperature: float) -> None:
    ids = prompt(1, 40)
    reply = await rig.generate(ids, temperature=temperature, max_tokens=24)
    assert 1 <= len(reply.token_ids) <= 24
    assert rig.worst_error(ids, reply, temperature) < TOLERANCE
    assert reply.policy_version == rig.generator.policy_version


async def test_many_ragged_requests_at_once_have_exact_logprobs(rig: Rig) -> None:
    # Lengths from 1 token to several prefill chunks; half of the prompts share a prefix.
    shared = prompt(2, 150)
    prompts = [prompt(10 + i, length) for i, length in enumerate((1, 7, 33, 64, 201, 300))]
    prompts += [shared + prompt(20 + i, 1 + 9 * i) for i in range(6)]
    replies = await asyncio.gather(*[rig.generate(ids, max_tokens=5 + 7 * i) for i, ids in enumerate(prompts)])
    for ids, reply in zip(prompts, replies, strict=True):
        assert rig.worst_error(ids, reply) < TOLERANCE


async def test_a_batch_gives_what_each_request_gives_alone(rig: Rig) -> None:
    prompts = [prompt(30 + i, 20 + 13 * i) for i in range(8)]
    together = await asyncio.gather(*[rig.generate(ids, temperature=0, max_tokens=12) for ids in prompts])
    for ids, reply in zip(prompts, together, strict=True):
        alone = await rig.generate(ids, temperature=0, max_tokens=12)
        assert alone.token_ids == reply.token_ids


async def test_greedy_takes_the_most_probable_token_and_tells_its_logprob_at_temperature_one(rig: Rig) -> None:
    ids = prompt(3, 25)
    reply = await rig.generate(ids, temperature=0, max_tokens=8)
    assert reply.token_ids == rig.best_tokens(ids, reply.token_ids)
    assert rig.worst_error(ids, reply) < TOLERANCE


async def test_equal_requests_get_different_samples(rig: Rig) -> None:
    replies = await asyncio.gather(*[rig.generate(prompt(4, 20), max_tokens=12) for _ in range(4)])
    assert len({tuple(reply.token_ids) for reply in replies}) == 4


async def test_the_reply_limit_ends_a_reply(rig: Rig) -> None:
    replies = [await rig.generate(prompt(50 + i, 10), max_tokens=3) for i in range(4)]
    limited = [reply for reply in replies if reply.finish_reason == "length"]
    assert limited
    assert all(len(reply.token_ids) == 3 for reply in limited)


async def test_the_end_of_turn_token_is_kept_and_ends_a_reply(rig: Rig) -> None:
    replies = await asyncio.gather(*[rig.generate(prompt(100 + i, 12), max_tokens=100) for i in range(40)])
    ended = [reply for reply in replies if reply.finish_reason == "stop"]
    assert ended
    assert all(reply.token_ids[-1] == END_OF_TURN_ID for reply in ended)
    assert not any(END_OF_TURN_ID in reply.token_ids[:-1] for reply in replies)


async def test_a_reply_to_its_limit_samples_end_tokens_like_any_other(rig: Rig) -> None:
    # A prompt that likes to be answered by nothing, asked so often that chance has no say: none would end by itself in
    # one of e^12 such tests.
    chances = {i: math.exp(rig.logprobs(prompt(1000 + i, 12), [END_OF_TURN_ID])[0]) for i in range(200)}
    likely = max(chances, key=chances.__getitem__)
    ids = prompt(1000 + likely, 12)
    asked = [rig.generate(ids, max_tokens=3, to_limit=True) for _ in range(math.ceil(12 / chances[likely]))]
    replies = await asyncio.gather(*asked)
    assert all(len(reply.token_ids) == 3 and reply.finish_reason == "length" for reply in replies)
    ended = [reply for reply in replies if END_OF_TURN_ID in reply.token_ids[:-1]]
    assert ended
    assert all(rig.worst_error(ids, reply) < TOLERANCE for reply in ended)


async def test_a_full_context_ends_a_reply_as_context(rig: Rig) -> None:
    ids = prompt(5, MAX_MODEL_LEN - 3)
    replies = [await rig.generate(ids, max_tokens=10) for _ in range(3)]
    full = [reply for reply in replies if reply.finish_reason != "stop"]
    assert full
    assert all(reply.finish_reason == "context" and len(reply.token_ids) == 3 for reply in full)
    assert all(rig.worst_error(ids, reply) < TOLERANCE for reply in full)


@pytest.mark.parametrize("length", [MAX_MODEL_LEN, MAX_MODEL_LEN + 1])
async def test_a_prompt_without_room_answers_context_and_no_tokens(rig: Rig, length: int) -> None:
    reply = await rig.generate(prompt(6, length), max_tokens=4)
    assert (reply.token_ids, reply.logprobs, reply.finish_reason) == ([], [], "context")


async def test_tokens_that_complete_a_stop_string_are_kept(rig: Rig) -> None:
    ids = prompt(7, 30)
    free = await rig.generate(ids, temperature=0, max_tokens=16)
    texts = [rig.tokenizer.decode(free.token_ids[:n], skip_special_tokens=True) for n in range(17)]
    # A piece of the fourth to sixth token's text, so that the string begins inside one token and ends in another.
    stop = texts[6][len(texts[3]) :][:-1] or texts[6][len(texts[3]) :]
    expected = next(n for n in range(17) if stop in texts[n])
    reply = await rig.generate(ids, temperature=0, max_tokens=16, stop=(stop, "never in the text"))
    assert reply.finish_reason == "stop"
    assert reply.token_ids == free.token_ids[:expected]
    assert len(reply.logprobs) == expected


async def test_the_next_turn_reuses_the_tokens_of_the_last_and_stays_exact(rig: Rig) -> None:
    ids = prompt(8, 130)
    first = await rig.generate(ids, max_tokens=40)
    ids += first.token_ids + prompt(9, 20)
    second = await rig.generate(ids, max_tokens=20)
    assert second.cached_tokens >= 128
    assert rig.worst_error(ids, second) < TOLERANCE


async def test_rollouts_of_one_prompt_share_its_prefill(rig: Rig) -> None:
    ids = prompt(60, 200)
    replies = await asyncio.gather(*[rig.generate(ids, max_tokens=8) for _ in range(4)])
    assert sorted(reply.cached_tokens >= 192 for reply in replies) == [False, True, True, True]
    assert all(rig.worst_error(ids, reply) < TOLERANCE for reply in replies)


async def test_a_cancelled_request_leaves_the_others_exact(rig: Rig) -> None:
    doomed = [asyncio.create_task(rig.generate(prompt(70 + i, 30), max_tokens=400)) for i in range(3)]
    ids = prompt(80, 50)
    survivor = asyncio.create_task(rig.generate(ids, max_tokens=60))
    await rig.generate(prompt(81, 5), max_tokens=2)  # by now the others are being worked on
    for task in doomed:
        task.cancel()
    await asyncio.wait(doomed)
    assert all(task.cancelled() for task in doomed)
    assert rig.worst_error(ids, await survivor) < TOLERANCE
    assert rig.generator.stats().running == 0


async def test_the_counts_add_up(rig: Rig) -> None:
    before = rig.generator.stats()
    replies = await asyncio.gather(*[rig.generate(prompt(90 + i, 20), max_tokens=6) for i in range(3)])
    after = rig.generator.stats()
    assert after.running == 0
    assert after.prompt_tokens - before.prompt_tokens == 60
    assert after.sampled_tokens - before.sampled_tokens == sum(len(reply.token_ids) for reply in replies)
    assert after.busy_s > before.busy_s


async def test_after_a_publish_the_next_tokens_come_from_the_new_weights(rig: Rig) -> None:
    ids = prompt(11, 200)
    before = await rig.generate(ids, max_tokens=12)
    version = rig.generator.policy_version
    for seed in (1, 2):
        rig.change_weights(seed)
        assert rig.worst_error(ids, before) > 100 * TOLERANCE
        await rig.publish()
        # The same prompt: a stale prefix cache would answer it.
        after = await rig.generate(ids, max_tokens=12)
        assert after.policy_version == rig.generator.policy_version == version + seed
        assert after.cached_tokens == 0
        assert rig.worst_error(ids, after) < TOLERANCE


async def test_a_tied_head_follows_its_embedding(rig: Rig) -> None:
    assert rig.reference.lm_head.weight is rig.reference.model.embed_tokens.weight
    ids = prompt(12, 30)
    # Only the embedding moves: an engine with its own copy of the head would miss it in the logits.
    rig.reference.model.embed_tokens.weight.data.mul_(1.5)
    await rig.publish()
    reply = await rig.generate(ids, max_tokens=12)
    assert rig.worst_error(ids, reply) < TOLERANCE


@pytest.mark.parametrize(
    ("renamed", "told"),
    [
        ({"model__norm__weight": ""}, "model.norm.weight is missing"),
        ({"model__norm__weight": "model.other.weight"}, "model.other.weight is not a tensor of this model"),
    ],
)
async def test_a_publish_with_wrong_names_is_refused_and_nothing_is_sampled_until_a_good_one(
    rig: Rig, renamed: dict[str, str], told: str
) -> None:
    arena = rig.write_arena(**renamed)
    with pytest.raises(PublishFailed, match=told):
        await rig.generator.publish(arena, version=rig.generator.policy_version + 1)
    with pytest.raises(EngineFailed, match="not whole"):
        await rig.generate(prompt(13, 10))
    await rig.publish()
    ids = prompt(13, 10)
    assert rig.worst_error(ids, await rig.generate(ids, max_tokens=4)) < TOLERANCE


async def test_a_publish_in_another_dtype_or_shape_is_refused(rig: Rig) -> None:
    arena = rig.write_arena()
    first = arena.tensors[0]
    for odd in (msgspec.structs.replace(first, dtype="bfloat16"), msgspec.structs.replace(first, shape=[2, 2])):
        wrong = msgspec.structs.replace(arena, tensors=[odd, *arena.tensors[1:]])
        with pytest.raises(PublishFailed, match=first.name):
            await rig.generator.publish(wrong, version=9)
    await rig.publish()


async def test_bytes_that_are_not_the_trainers_are_refused_by_the_tensors_name(rig: Rig) -> None:
    arena = rig.write_arena()
    torn = arena.tensors[3]
    open_arena(arena)[torn.name].view(-1)[1] += 1
    with pytest.raises(PublishFailed, match=f"{torn.name} in the arena"):
        await rig.generator.publish(arena, version=rig.generator.policy_version + 1)
    await rig.publish()
    ids = prompt(14, 10)
    assert rig.worst_error(ids, await rig.generate(ids, max_tokens=4)) < TOLERANCE


async def test_a_publish_while_requests_are_in_flight_is_refused_and_touches_nothing(rig: Rig) -> None:
    running = [asyncio.create_task(rig.generate(prompt(150 + i, 20), max_tokens=400)) for i in range(8)]
    await rig.generate(prompt(16, 5), max_tokens=1)
    assert not all(task.done() for task in running)
    with pytest.raises(PublishFailed, match="in flight"):
        await rig.publish()
    for i, task in enumerate(running):
        assert rig.worst_error(prompt(150 + i, 20), await task) < TOLERANCE


async def test_an_empty_prompt_is_an_error_not_a_hang(rig: Rig) -> None:
    with pytest.raises(EngineFailed):
        await rig.generate([], max_tokens=1)
    await rig.generate(prompt(17, 5), max_tokens=1)
