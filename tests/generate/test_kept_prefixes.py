"""Cache memory of the transformers engine: the longest prefix is found, and the budget holds."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from thundersync.generate.kept_prefixes import CacheMemory, common_prefix

TOKENS = st.lists(st.integers(0, 2), max_size=30)


def memory(tokens: int) -> CacheMemory:
    made = CacheMemory(
        layers=2, kv_heads=1, head_size=4, dtype=torch.float32, device=torch.device("cpu"), budget_bytes=0
    )
    made._budget_bytes = tokens * made.token_bytes
    return made


@given(left=TOKENS, right=TOKENS)
def test_the_common_prefix_is_the_longest_equal_start(left: list[int], right: list[int]) -> None:
    length = common_prefix(left, right)
    assert left[:length] == right[:length]
    assert length == min(len(left), len(right)) or left[length] != right[length]


def test_the_next_turn_takes_over_the_memory_of_the_last() -> None:
    caches = memory(1024)
    first = caches.open(list(range(20)), 60)
    assert first is not None
    first.token_ids = list(range(30))
    caches.close(first)
    assert caches.open(list(range(40)), 64) is first


def test_a_turn_that_needs_more_room_gets_a_copy_of_what_is_known() -> None:
    caches = memory(1024)
    first = caches.open(list(range(20)), 60)
    assert first is not None
    first.kv.normal_()
    first.token_ids = list(range(30))
    caches.close(first)
    second = caches.open(list(range(40)), 200)
    assert second is not None
    assert second is not first
    assert second.token_ids == list(range(30))
    assert torch.equal(second.kv[:, :, :, :30], first.kv[:, :, :, :30])


def test_rollouts_of_one_prompt_copy_it_from_a_live_one() -> None:
    caches = memory(1024)
    prompt = list(range(50))
    first = caches.open(prompt, 100)
    assert first is not None
    first.token_ids = [*prompt, 7, 8]
    second = caches.open(prompt, 100)
    assert second is not None
    # All but the last token, whose logits are needed.
    assert second.token_ids == prompt[:-1]


def test_the_least_recently_used_prefix_makes_room_and_live_sequences_never_do() -> None:
    caches = memory(3 * 64)
    opened = [caches.open([i] * 20, 64) for i in range(2)]
    for i, cache in enumerate(opened):
        assert cache is not None
        cache.token_ids = [i] * 20
        caches.close(cache)
    live = [caches.open([8] * 20, 64), caches.open([9] * 20, 64)]
    assert None not in live
    # The second was used last, so its prefix is still there; the first's is gone.
    again = caches.open([1] * 40, 64)
    assert again is opened[1]
    assert caches.open([0] * 40, 64) is None


def test_a_lone_sequence_larger_than_the_budget_still_runs() -> None:
    assert memory(64).open([1] * 10, 640) is not None


def test_forgetting_drops_every_kept_prefix() -> None:
    caches = memory(1024)
    first = caches.open([1] * 20, 64)
    assert first is not None
    first.token_ids = [1] * 20
    caches.close(first)
    caches.forget()
    second = caches.open([1] * 40, 64)
    assert second is not None
    assert second.token_ids == []
