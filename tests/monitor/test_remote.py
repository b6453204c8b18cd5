"""Watching from elsewhere: keys, encryption, and what is said to those who have the wrong ones."""

import asyncio
import io
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import zmq
from rich.console import Console

from tests.monitor.fake_run import fake_run
from tests.monitor.viewer import Viewer, view_of
from thundersync.errors import ConfigError
from thundersync.monitor.client import FeedLost, events
from thundersync.monitor.command import make
from thundersync.monitor.door import refuse_unsafe
from thundersync.monitor.ear import KeysRefused
from thundersync.monitor.feed import Feed, FeedInfo
from thundersync.monitor.keys import KeysFailed, ViewerKeys, make_keys, run_keys, viewer_keys
from thundersync.rundir import RunFolder

STREAM = list(fake_run(steps=1, groups=2, size=4))


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[RunFolder]:
    async with RunFolder.create(tmp_path, "run", "", False) as folder:
        yield folder


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, Path]:
    return make_keys(tmp_path / "keys")


def test_secrets_are_for_their_owner_only_and_each_side_has_the_others_public_key(made: tuple[Path, Path]) -> None:
    run, viewer = made
    for folder in (run, viewer):
        assert folder.stat().st_mode & 0o777 == 0o700
        (secret,) = folder.glob("*.key_secret")
        assert secret.stat().st_mode & 0o777 == 0o600
    assert run_keys(run).viewers == {viewer_keys(viewer).own.public}
    assert viewer_keys(viewer).run == run_keys(run).own.public


def test_more_viewers_get_keys_of_their_own_and_old_ones_stay(made: tuple[Path, Path]) -> None:
    run, viewer = made
    before = run_keys(run)
    again, other = make_keys(run.parent, "anna")
    assert again == run and run_keys(run).own == before.own
    assert run_keys(run).viewers == {viewer_keys(viewer).own.public, viewer_keys(other).own.public}
    with pytest.raises(KeysFailed, match="exists already"):
        make_keys(run.parent, "anna")
    for name in ("run", "viewers", "../out", ".hidden", ""):
        with pytest.raises(KeysFailed, match="cannot name a viewer"):
            make_keys(run.parent, name)


def test_keys_that_are_missing_open_or_broken_are_refused_with_a_remedy(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    run, viewer = made
    with pytest.raises(KeysFailed, match="did you mean"):
        viewer_keys(run.parent)
    with pytest.raises(KeysFailed, match="thundersync keys"):
        viewer_keys(tmp_path / "absent")
    with pytest.raises(KeysFailed, match="DIR/run"):
        run_keys(viewer)
    (run / "run.key_secret").chmod(0o644)
    with pytest.raises(KeysFailed, match="chmod 600"):
        run_keys(run)
    (viewer / "run.key").write_text("nonsense")
    with pytest.raises(KeysFailed, match=r"run\.key"):
        viewer_keys(viewer)
    (run / "run.key_secret").chmod(0o600)
    for key in (run / "viewers").iterdir():
        key.unlink()
    with pytest.raises(KeysFailed, match="nobody could watch"):
        run_keys(run)


def test_the_command_makes_keys_and_says_what_to_do_with_them(tmp_path: Path) -> None:
    paper = Console(file=io.StringIO(), width=60)
    assert make(tmp_path / "k", "viewer", paper) == 0
    assert isinstance(paper.file, io.StringIO)
    said = paper.file.getvalue()
    assert f'keys = "{tmp_path / "k" / "run"}"' in said and "--keys viewer" in said
    assert run_keys(tmp_path / "k" / "run").viewers


async def test_a_viewer_with_keys_hears_everything_and_one_on_this_machine_needs_none(
    run: RunFolder, made: tuple[Path, Path]
) -> None:
    async with Feed.open(run.path, bind="tcp://127.0.0.1:*", keys=run_keys(made[0])) as feed:
        info = msgspec.json.decode((run.path / "feed.json").read_bytes(), type=FeedInfo)
        assert info.endpoint.startswith("ipc://") and info.remote == feed.remote != info.endpoint
        for event in STREAM[:50]:
            feed.emit(event)
        there = Viewer(feed.remote, keys=viewer_keys(made[1]))
        here = Viewer(str(run.path))
        await there.heard(STREAM[49])
        await here.heard(STREAM[49])
        for event in STREAM[50:]:
            feed.emit(event)
        await asyncio.wait_for(asyncio.gather(there.task, here.task), 60)
    assert view_of(there.told) == view_of(here.told) == view_of(STREAM)


async def refused(endpoint: str, keys: ViewerKeys | None) -> str:
    """What a viewer is told; it must not take as long as silence would."""
    with pytest.raises(KeysRefused) as told:
        async with asyncio.timeout(20):
            _ = [event async for event in events(endpoint, keys=keys, silence_s=3600.0)]
    return str(told.value)


async def test_wrong_keys_are_told_apart_at_once(run: RunFolder, made: tuple[Path, Path], tmp_path: Path) -> None:
    ours, (other_run, other) = viewer_keys(made[1]), make_keys(tmp_path / "other")
    stranger = msgspec.structs.replace(viewer_keys(other), run=ours.run)
    async with Feed.open(run.path, bind="tcp://127.0.0.1:*", keys=run_keys(made[0])) as feed:
        assert "talks only to viewers with keys" in await refused(feed.remote, None)
        assert "the keys are not those of the run" in await refused(feed.remote, viewer_keys(other))
        assert "does not let this viewer in" in await refused(feed.remote, stranger)
        allowed = Viewer(feed.remote, keys=ours)  # who was refused has changed nothing
        feed.emit(STREAM[0])
        await allowed.heard(STREAM[0])
    await asyncio.wait_for(allowed.task, 60)
    async with Feed.open(run.path, bind="tcp://127.0.0.1:*") as feed:
        assert "has no keys" in await refused(feed.endpoint, ours)
    assert other_run.is_dir()


async def test_nothing_readable_crosses_the_wire(run: RunFolder, made: tuple[Path, Path]) -> None:
    """A proxy of the test's own carries the bytes and looks at them."""
    seen = bytearray()

    async with Feed.open(run.path, bind="tcp://127.0.0.1:*", keys=run_keys(made[0])) as feed:
        port = int(feed.remote.rpartition(":")[2])

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(65536):
                seen.extend(data)
                writer.write(data)
            writer.close()

        async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(carry(reader, there_writer), carry(there_reader, writer), return_exceptions=True)

        server = await asyncio.start_server(proxy, "127.0.0.1", 0)
        async with server:
            address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            viewer = Viewer(address, keys=viewer_keys(made[1]))
            feed.emit(STREAM[0])
            await viewer.heard(STREAM[0])
            await viewer.leave()
    assert len(seen) > 500 and b"SmolLM2" not in seen and b"run_started" not in seen


async def test_an_open_address_needs_keys_and_keys_need_an_address(run: RunFolder, made: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="nobody could attach"):
        Feed.open(run.path, keys=run_keys(made[0]))
    with pytest.raises(ConfigError, match="thundersync keys"):
        refuse_unsafe("tcp://0.0.0.0:5599", keyed=False)
    refuse_unsafe("tcp://0.0.0.0:5599", keyed=True)
    refuse_unsafe("tcp://127.0.0.1:5599", keyed=False)
    assert not (run.path / "feed.json").exists()


async def test_without_a_gate_that_answers_nobody_gets_in(made: tuple[Path, Path]) -> None:
    """ZeroMQ lets every key in where nobody is asked; the socket itself must insist."""
    from thundersync.monitor.door import lock

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = context.socket(zmq.XPUB)
    try:
        lock(publisher, run_keys(made[0]))
        publisher.bind("tcp://127.0.0.1:*")
        with pytest.raises((FeedLost, KeysRefused)):
            endpoint = publisher.get_string(zmq.LAST_ENDPOINT)
            _ = [event async for event in events(endpoint, keys=viewer_keys(made[1]), silence_s=1.5)]
        assert not publisher.poll(0)  # it has not even heard the question
    finally:
        await asyncio.to_thread(context.destroy, linger=0)


async def test_what_is_waited_for_is_said_at_once_and_taken_back(run: RunFolder, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/later"
    began_s = time.monotonic()
    viewer = Viewer(address)
    await viewer.told_something()
    assert "nobody answers yet" in viewer.said[0]
    assert time.monotonic() - began_s < 25  # long before the silence is an error
    async with Feed.open(run.path, bind=address) as feed:
        feed.emit(STREAM[0])
        await viewer.heard(STREAM[0])
    await asyncio.wait_for(viewer.task, 60)
    assert viewer.said[-1] == ""
