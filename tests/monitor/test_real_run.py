"""A real run on a tiny model, watched from afar while it goes on."""

import asyncio
from pathlib import Path

import pytest

from tests.endtoend.rig import config
from tests.monitor.viewer import Viewer
from tests.tiny import tiny_model
from thundersync.engine import Engine
from thundersync.monitor import answers
from thundersync.monitor import events as e
from thundersync.monitor.archive import Transcript, sampled_ids
from thundersync.monitor.ear import ask
from thundersync.monitor.keys import make_keys, viewer_keys

pytestmark = pytest.mark.slow


async def test_a_keyed_viewer_reads_rollouts_while_they_live_and_sees_each_engine(tmp_path: Path) -> None:
    ours, theirs = make_keys(tmp_path / "keys")
    model = tiny_model(tmp_path / "model")
    watched = config(
        tmp_path, model, monitor__bind="tcp://127.0.0.1:*", monitor__keys=str(ours), rollout__max_turns=4, max_steps=2
    )
    keys = viewer_keys(theirs)
    read: list[Transcript] = []

    async with Engine(watched) as engine:
        remote = engine.parts.feed.remote
        viewer = Viewer(remote, keys=keys)

        async def look() -> None:
            """Ask for each rollout as soon as it has said something."""
            known: set[str] = set()
            while not viewer.task.done():
                for event in viewer.told[:]:
                    if isinstance(event, e.TurnGenerated) and event.rollout_id not in known:
                        known.add(event.rollout_id)
                        topic = answers.question(answers.ROLLOUT, event.rollout_id)
                        found = answers.transcript(await ask(remote, topic, keys=keys))
                        if found is not None:
                            read.append(found)
                await asyncio.sleep(0.01)

        looking = asyncio.create_task(look())
        results = [result async for result in engine.steps()]
        looking.cancel()
        await asyncio.wait({looking})
    await asyncio.wait_for(viewer.task, 60)
    assert len(results) == 2 and read
    ended = {rollout.rollout_id: rollout for result in results for rollout in result.rollouts}
    for transcript in read:
        rollout = ended[transcript.rollout_id]
        assert transcript.messages == rollout.messages[: len(transcript.messages)]
        ids = [token for sequence in transcript.sequences for token in sequence.token_ids]
        assert ids == [token for sequence in rollout.sequences for token in sequence.token_ids][: len(ids)]
        assert set(transcript.texts) == sampled_ids(transcript) != set()
    gauges = [event for event in viewer.told if isinstance(event, e.Gauges)]
    assert gauges and all(len(each.engines) == 1 for each in gauges)
    assert any(each.engines[0].prompt_tokens_per_s > 0 for each in gauges)
    assert all(0.0 <= each.engines[0].cached_share <= 1.0 for each in gauges)
