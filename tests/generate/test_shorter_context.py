"""An engine seen through a shorter context ends its replies there, for the reason that a real one gives."""

import pytest

from tests.fakes import FakeGenerator, turns
from thundersync.generate.base import Sampling
from thundersync.generate.shorter_context import ShorterContext


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "sampled", "reason"),
    [
        (4, 3, 3, "length"),  # the reply's own limit comes first
        (4, 50, 6, "context"),
        (8, 2, 2, "length"),  # both at once: as in the engine, whose own limit is not below the reply's
        (10, 50, 0, "context"),
        (12, 50, 0, "context"),
    ],
)
async def test_a_reply_ends_where_the_shorter_context_does(
    prompt: int, max_tokens: int, sampled: int, reason: str
) -> None:
    inner = FakeGenerator(turns("a long reply, longer than the context"), policy_version=3)
    seat = ShorterContext(inner, context_tokens=10)
    reply = await seat.generate([7] * prompt, Sampling(max_tokens=max_tokens), request_id="r/1/0")
    assert (len(reply.token_ids), reply.finish_reason, reply.policy_version) == (sampled, reason, 3)


async def test_a_reply_that_ends_by_itself_is_passed_on_and_scores_see_the_whole_context() -> None:
    inner = FakeGenerator(turns("ok"))
    seat = ShorterContext(inner, context_tokens=10)
    reply = await seat.generate([7] * 4, Sampling(max_tokens=50), request_id="r/1/0")
    assert reply.finish_reason == "stop"
    assert len((await seat.score([7] * 30, start=20, request_id="s")).logprobs) == 10


async def test_its_owner_ends_the_engine() -> None:
    inner = FakeGenerator(turns("ok"))
    seat = ShorterContext(inner, context_tokens=10)
    await seat.close()
    assert not inner.closed
