import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.monitor.fake_run import fake_run
from tests.monitor.viewer import Viewer, view_of
from thundersync.errors import ConfigError
from thundersync.monitor import events as e
from thundersync.monitor.client import FeedLost, NothingToWatch, SchemaMismatch, events
from thundersync.monitor.feed import LIVE, SNAPSHOT, Feed, FeedFailed, FeedInfo, Snapshot
from thundersync.rundir import RunFolder

STREAM = list(fake_run(steps=2, groups=2, size=4))
HALF = len(STREAM) // 2


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[RunFolder]:
    async with RunFolder.create(tmp_path, "run", "", False) as folder:
        yield folder


def written(run: RunFolder) -> list[e.AnyEvent | None]:
    return [e.from_line(line) for line in run.events.read_bytes().splitlines()]


async def test_what_is_emitted_is_in_the_file_and_nothing_else_is_left(run: RunFolder) -> None:
    async with Feed.open(run.path) as feed:
        info = msgspec.json.decode((run.path / "feed.json").read_bytes(), type=FeedInfo)
        assert info == FeedInfo(endpoint=feed.endpoint, pid=os.getpid(), schema=e.SCHEMA, offset=0)
        assert feed.endpoint == f"ipc://{run.path}/feed.sock"
        assert (run.path / "feed.sock").is_socket()
        for event in STREAM:
            feed.emit(event)
    assert written(run) == STREAM
    assert not (run.path / "feed.sock").exists() and not (run.path / "feed.json").exists()


async def test_two_viewers_one_of_them_late_know_the_same(run: RunFolder) -> None:
    async with Feed.open(run.path) as feed:
        early = Viewer(str(run.path))
        feed.emit(STREAM[0])
        await early.heard(STREAM[0])
        for event in STREAM[1:HALF]:
            feed.emit(event)
        await early.heard(STREAM[HALF - 1])
        late = Viewer(feed.endpoint)
        await late.heard(STREAM[HALF - 1])
        assert len(late.told) < len(early.told) == HALF
        assert view_of(late.told) == view_of(early.told) == view_of(STREAM[:HALF])
        for event in STREAM[HALF:]:
            feed.emit(event)
        await asyncio.wait_for(asyncio.gather(early.task, late.task), 60)
    assert early.told == STREAM
    assert late.told[-(len(STREAM) - HALF) :] == STREAM[HALF:]
    assert view_of(late.told) == view_of(STREAM)


async def test_viewers_that_join_while_events_pour_miss_none_and_hear_none_twice(run: RunFolder) -> None:
    flood = [e.Warned(at_s=float(number), text="") for number in range(1, 4001)]
    async with Feed.open(run.path) as feed:
        viewers = []
        for index, event in enumerate(flood):
            feed.emit(event)
            if index % 100 == 0:
                if len(viewers) < 6:
                    viewers.append(Viewer(feed.endpoint))
                await asyncio.sleep(0)
        for viewer in viewers:
            await viewer.heard(flood[-1])
    await asyncio.wait_for(asyncio.gather(*(viewer.task for viewer in viewers)), 60)
    for viewer in viewers:
        times = [int(event.at_s) for event in viewer.told]
        assert times == list(range(times[0], 4001))


async def test_a_viewer_that_stopped_reading_changes_nothing_for_the_run_and_the_others(run: RunFolder) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stopped = context.socket(zmq.SUB)
    stopped.setsockopt(zmq.RCVHWM, 1)
    stopped.setsockopt(zmq.LINGER, 0)
    text = "x" * 2000
    with contextlib.ExitStack() as stack:
        stack.callback(context.destroy, linger=0)
        async with Feed.open(run.path) as feed:
            stopped.connect(feed.endpoint)
            stopped.subscribe(LIVE)
            assert await asyncio.to_thread(stopped.poll, 30_000)  # a sign of life: it is attached
            other = Viewer(feed.endpoint)
            for number in range(20_000):
                feed.emit(e.Warned(at_s=float(number), text=text))
                if number % 500 == 0:
                    await asyncio.sleep(0)
            last = e.RunFinished(at_s=1e6, ok=True)
            feed.emit(last)
            await other.heard(last)
        await asyncio.wait_for(other.task, 60)
        assert len(run.events.read_bytes().splitlines()) == 20_001
        received = 0
        while stopped.poll(0):
            stopped.recv_multipart()
            received += 1
        # What was held for it was bounded: a queue of 10,000 here, a short one there, and what the kernel holds.
        assert received < 15_000


async def test_a_viewer_that_missed_some_is_told_what_matters_of_them() -> None:
    """A publisher of the test's own drops messages at will."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = context.socket(zmq.XPUB)
    publisher.bind("tcp://127.0.0.1:*")

    def send(topic: bytes, kind: bytes, number: int, payload: bytes) -> None:
        publisher.send_multipart((topic, kind, number.to_bytes(8, "big"), payload))

    def asked() -> bytes:
        while not (message := publisher.recv()).startswith(b"\1" + SNAPSHOT):
            pass
        return message[1:]

    def packed(number: int) -> bytes:
        return e.pack(e.Warned(at_s=float(number), text=""))

    def snapshot(*numbers: int) -> bytes:
        return msgspec.msgpack.encode(Snapshot(schema=e.SCHEMA, events=[(n, packed(n)) for n in numbers]))

    def serve() -> None:
        topic = asked()
        send(LIVE, b"event", 3, packed(3))  # before its snapshot: it is in there
        send(topic, b"snapshot", 3, snapshot(1, 3))
        send(LIVE, b"event", 4, packed(4))
        send(LIVE, b"event", 9, packed(9))  # 5 to 8 were dropped
        send(asked(), b"snapshot", 10, snapshot(1, 3, 4, 7, 9, 10))
        send(LIVE, b"event", 10, packed(10))  # again, late
        send(LIVE, b"alive", 12, b"")  # 11 and 12 were dropped, and nothing follows them
        send(asked(), b"snapshot", 12, snapshot(1, 12))
        send(LIVE, b"end", 12, b"")

    try:
        server = asyncio.create_task(asyncio.to_thread(serve))
        told = [int(event.at_s) async for event in events(publisher.get_string(zmq.LAST_ENDPOINT))]
        await server
    finally:
        await asyncio.to_thread(context.destroy, linger=0)
    assert told == [1, 3, 4, 7, 9, 10, 12]


async def test_a_resumed_run_tells_the_older_commits_and_evaluations_too(run: RunFolder) -> None:
    first = STREAM[: STREAM.index(next(x for x in STREAM if isinstance(x, e.StepCommitted))) + 4]
    second = list(fake_run(steps=3, groups=2, size=4, start=1, evals=False))
    async with Feed.open(run.path) as feed:
        for event in first:
            feed.emit(event)
    with run.events.open("ab") as file:
        file.write(b'{"kind": "gauges", "at')  # torn by a kill
    async with Feed.open(run.path) as feed:
        for event in second[:-1]:
            feed.emit(event)
        viewer = Viewer(str(run.path))
        await viewer.heard(second[-2])
        feed.emit(second[-1])
        await asyncio.wait_for(viewer.task, 60)
    await run.close()
    replayed = [event async for event in events(str(run.path))]
    assert replayed == [*first, *second]
    assert view_of(viewer.told) == view_of(replayed)
    assert len(view_of(replayed).curve()) == 3


async def test_a_run_that_is_over_is_read_from_its_folder_torn_line_or_not(run: RunFolder) -> None:
    async with Feed.open(run.path) as feed:
        for event in STREAM:
            feed.emit(event)
    await run.close()
    with run.events.open("ab") as file:
        file.write(b'{"kind": "from_the_future", "at_s": 1}\n{"kind": "gau')
    assert [event async for event in events(str(run.path))] == STREAM


KILLED = """
import sys
from pathlib import Path
from tests.monitor.fake_run import fake_run
from thundersync.monitor.feed import Feed
from thundersync.rundir import RunFolder
run = RunFolder.create(sys.argv[1], "killed", "", False)
feed = Feed.open(run.path)
for event in list(fake_run(steps=2, groups=2, size=4))[:200]:
    feed.emit(event)
print("told", flush=True)
sys.stdin.read()
"""


def start(script: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


async def test_a_viewer_of_a_killed_run_ends_with_all_it_had_to_tell(tmp_path: Path) -> None:
    process = start(KILLED, tmp_path)
    assert process.stdin is not None and process.stdout is not None
    try:
        assert await asyncio.to_thread(process.stdout.readline) == "told\n"
        viewer = Viewer(str(tmp_path / "killed"))
        await viewer.heard(STREAM[199])
        process.kill()
        await asyncio.wait_for(viewer.task, 60)
        assert view_of(viewer.told) == view_of(STREAM[:200])
        assert [event async for event in events(str(tmp_path / "killed"))] == STREAM[:200]
    finally:
        process.kill()
        process.wait(timeout=30)
        process.stdin.close()
        process.stdout.close()


async def test_a_path_too_long_for_a_socket_is_watched_all_the_same(tmp_path: Path) -> None:
    async with RunFolder.create(tmp_path / ("deep" * 30), "run", "", False) as run:
        async with Feed.open(run.path) as feed:
            place = Path(feed.endpoint.removeprefix("ipc://")).parent
            assert place != run.path
            viewer = Viewer(str(run.path))
            feed.emit(STREAM[0])
            await viewer.heard(STREAM[0])
        await asyncio.wait_for(viewer.task, 60)
        assert not place.exists()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "tcp://localhost:*"])
async def test_a_loopback_port_can_be_bound(run: RunFolder, address: str) -> None:
    async with Feed.open(run.path, bind=address) as feed:
        assert feed.endpoint.startswith("tcp://127.0.0.1:")
        viewer = Viewer(feed.endpoint)
        feed.emit(STREAM[0])
        await viewer.heard(STREAM[0])
    await asyncio.wait_for(viewer.task, 60)


@pytest.mark.parametrize(
    ("address", "remedy"),
    [
        ("tcp://0.0.0.0:5599", "thundersync keys"),
        ("tcp://*:5599", "ssh -L"),
        ("tcp://127.evil.example:5599", "ssh -L"),
        ("tcp://192.168.1.7:5599", "ssh -L"),
        ("udp://127.0.0.1:5599", "empty"),
        ("/tmp/feed.sock", "empty"),
        (f"ipc:///tmp/{'x' * 120}", "empty"),
    ],
)
async def test_an_open_or_impossible_address_is_refused_with_a_remedy(
    run: RunFolder, address: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        Feed.open(run.path, bind=address)
    assert not (run.path / "feed.json").exists()


async def test_a_port_in_use_is_refused_with_a_remedy(run: RunFolder, tmp_path: Path) -> None:
    async with Feed.open(run.path, bind="tcp://127.0.0.1:*") as feed:
        with pytest.raises(ConfigError, match="another port"):
            Feed.open(tmp_path, bind=feed.endpoint)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
async def test_a_full_disk_is_told_to_the_run(run: RunFolder) -> None:
    run.events.symlink_to("/dev/full")
    feed = Feed.open(run.path)
    feed.emit(STREAM[0])
    with pytest.raises(FeedFailed, match="No space left"):
        await feed.close()
    with pytest.raises(FeedFailed, match="Free space"):
        feed.emit(STREAM[0])
    assert not (run.path / "feed.json").exists() and not (run.path / "feed.sock").exists()


async def test_nothing_is_lost_in_silence_after_the_close(run: RunFolder) -> None:
    feed = Feed.open(run.path)
    await feed.close()
    await feed.close()
    with pytest.raises(FeedFailed, match="closed"):
        feed.emit(STREAM[0])


async def test_a_value_the_wire_cannot_carry_is_refused_where_it_is_emitted(run: RunFolder) -> None:
    async with Feed.open(run.path) as feed:
        with pytest.raises(TypeError):
            feed.emit(e.Warned(at_s=1.0, text=object()))  # type: ignore[arg-type]
        feed.emit(STREAM[0])
    assert written(run) == [STREAM[0]]


async def test_what_cannot_be_watched_is_named(run: RunFolder, tmp_path: Path) -> None:
    for target in (str(tmp_path / "absent"), "nonsense://nowhere"):
        with pytest.raises(NothingToWatch, match="its address"):
            _ = [event async for event in events(target)]
    with pytest.raises(FeedLost):
        _ = [event async for event in events(f"ipc://{tmp_path}/nobody", silence_s=1.0)]
    line = json.loads(e.to_line(STREAM[0])) | {"schema": e.SCHEMA + 1}
    run.events.write_text(json.dumps(line) + "\n")
    await run.close()
    with pytest.raises(SchemaMismatch):
        _ = [event async for event in events(str(run.path))]
