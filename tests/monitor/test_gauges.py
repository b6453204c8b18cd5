"""The gauges: shares and rates over the latest samples, for each engine and for all."""

import asyncio
import time

from tests.fakes import FakeGenerator, turns
from thundersync.generate.base import EngineStats
from thundersync.monitor import events as e
from thundersync.monitor.gauges import GaugeReader, Sample, _engine
from thundersync.monitor.lag import Lag, LoopProbe


def test_an_engines_figures_are_what_changed_between_two_samples() -> None:
    first = EngineStats(running=1, busy_s=10.0, prompt_tokens=1000, cached_tokens=500, sampled_tokens=100)
    last = EngineStats(
        running=3, busy_s=14.0, prompt_tokens=3000, cached_tokens=2000, sampled_tokens=300, asked_tokens=512,
        kv_tokens=2048,
    )  # fmt: skip
    assert _engine(first, first, last, 5.0, 5.0) == e.EngineGauge(
        running=3, busy=0.8, tokens_per_s=40.0, prompt_tokens_per_s=400.0, cached_share=0.75, kv_asked=0.25
    )
    idle = _engine(first, first, first, 5.0, 5.0)
    assert idle.cached_share == idle.kv_asked == idle.busy == 0.0


def test_long_replies_are_told_by_the_minute_and_not_as_nothing_and_a_burst() -> None:
    def sample(second: float) -> EngineStats:
        """A reply of 3000 tokens each 30 seconds."""
        return EngineStats(
            running=1, busy_s=second, prompt_tokens=0, cached_tokens=0, sampled_tokens=3000 * int(second // 30)
        )

    reader = GaugeReader(generators=[], workers=[], queue=lambda: (0, 0), tools_running=lambda: 0, emit=print)
    rates = []
    for half in range(400):
        reader._samples.append(Sample(half / 2, [sample(half / 2)], 0.0))
        rates.append(reader._gauges(0.0, Lag()).engines[0])
    assert all(50.0 <= each.tokens_per_s <= 160.0 for each in rates[130:])
    assert all(each.busy == 1.0 for each in rates[1:])


async def test_a_reader_tells_of_every_engine() -> None:
    told: list[e.AnyEvent] = []
    came = asyncio.Event()

    def emit(event: e.AnyEvent) -> None:
        told.append(event)
        came.set()

    engines = [FakeGenerator(turns("x")), FakeGenerator(turns("x"))]
    reader = GaugeReader(generators=engines, workers=[], queue=lambda: (2, 3), tools_running=lambda: 4, emit=emit)
    reading = asyncio.create_task(reader.run())
    await asyncio.wait_for(came.wait(), 60)
    reading.cancel()
    await asyncio.wait({reading})
    gauges = [event for event in told if isinstance(event, e.Gauges)]
    assert gauges and len(gauges[0].engines) == 2
    assert (gauges[0].queue_pieces, gauges[0].open_slots, gauges[0].tools_running) == (2, 3, 4)


async def test_a_block_of_the_loop_is_met_wherever_it_falls() -> None:
    """One that begins and ends between two gauges, as the timer of the gauges themselves would never see."""
    told: list[e.Gauges] = []
    came = asyncio.Event()

    def emit(event: e.AnyEvent) -> None:
        if isinstance(event, e.Gauges):
            told.append(event)
            came.set()

    reader = GaugeReader(generators=[], workers=[], queue=lambda: (0, 0), tools_running=lambda: 0, emit=emit)
    reading = asyncio.create_task(reader.run())
    await asyncio.wait_for(came.wait(), 60)
    reader.take_lag()
    before, came = len(told), asyncio.Event()
    await asyncio.sleep(0.03)
    time.sleep(0.3)  # noqa: ASYNC251  the block; the next gauges are due after it
    assert reader.take_lag() >= 0.28  # at once, for whoever ends a step
    await asyncio.wait_for(came.wait(), 60)
    reading.cancel()
    await asyncio.wait({reading})
    gauges = told[before]
    assert gauges.loop_lag_max_ms >= 280
    assert 0.0 <= gauges.loop_lag_p50_ms <= gauges.loop_lag_p99_ms <= gauges.loop_lag_max_ms
    # The timer that was overdue has fired since, and counts no second time: not for what is measured next. On a busy
    # machine something else may have come late, so only the order of the two is certain.
    assert reader.take_lag() < told[before].loop_lag_max_ms / 1000


async def test_the_probe_ends_with_its_reader_and_leaves_no_timer() -> None:
    probe = LoopProbe()
    probe.start()
    await asyncio.sleep(0.05)
    assert probe.lag().max_s >= 0.0
    probe.stop()
    await asyncio.sleep(0.05)
    probe.take_max_s()
    assert probe.lag() == Lag() and probe.take_max_s() == 0.0
