"""The gauges: shares and rates over the latest samples, for each engine and for all."""

import asyncio

from tests.fakes import FakeGenerator, turns
from thundersync.generate.base import EngineStats
from thundersync.monitor import events as e
from thundersync.monitor.gauges import GaugeReader, _engine


def test_an_engines_figures_are_what_changed_between_two_samples() -> None:
    first = EngineStats(running=1, busy_s=10.0, prompt_tokens=1000, cached_tokens=500, sampled_tokens=100)
    last = EngineStats(
        running=3, busy_s=14.0, prompt_tokens=3000, cached_tokens=2000, sampled_tokens=300, asked_tokens=512,
        kv_tokens=2048,
    )  # fmt: skip
    assert _engine(first, last, 5.0) == e.EngineGauge(
        running=3, busy=0.8, tokens_per_s=40.0, prompt_tokens_per_s=400.0, cached_share=0.75, kv_asked=0.25
    )
    idle = _engine(first, first, 5.0)
    assert idle.cached_share == idle.kv_asked == idle.busy == 0.0


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
