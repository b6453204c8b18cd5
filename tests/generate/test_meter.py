"""Busy seconds are those with any request in flight, counted once however many there are."""

from thundersync.generate.base import Generation
from thundersync.generate.meter import Meter


def test_overlapping_requests_count_their_time_once() -> None:
    meter = Meter()
    meter.began(10.0)
    meter.began(11.0)
    assert (meter.stats(12.0).running, meter.stats(12.0).busy_s) == (2, 2.0)
    meter.ended(13.0)
    meter.ended(14.0)
    meter.began(20.0)
    meter.ended(21.0)
    assert (meter.stats(30.0).running, meter.stats(30.0).busy_s) == (0, 5.0)


def test_tokens_add_up() -> None:
    meter = Meter()
    reply = Generation(token_ids=[1, 2], logprobs=[-1.0, -2.0], finish_reason="stop", policy_version=0, cached_tokens=3)
    meter.generated(5, reply)
    meter.generated(6, reply)
    stats = meter.stats(0.0)
    assert (stats.prompt_tokens, stats.cached_tokens, stats.sampled_tokens) == (11, 6, 4)
