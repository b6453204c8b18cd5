"""Clean-up under cancellation, and the door of a closing runtime."""

import asyncio

import pytest

from sandboxes.door import Door
from sandboxes.errors import StartFailed
from sandboxes.shield import finish


async def test_finish_gives_the_result_or_the_error() -> None:
    async def work(fail: bool) -> int:
        await asyncio.sleep(0)
        if fail:
            raise ValueError("broken")
        return 3

    assert await finish(work(False), limit_s=10) == 3
    with pytest.raises(ValueError, match="broken"):
        await finish(work(True), limit_s=10)


async def test_work_is_done_before_the_cancellation_is_seen() -> None:
    gate, done = asyncio.Event(), []

    async def work() -> None:
        await gate.wait()
        done.append(1)

    task = asyncio.create_task(finish(work(), limit_s=10))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [1]


async def test_work_that_never_ends_is_given_up_at_the_limit() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        await finish(work(), limit_s=0.01)
    assert ended.is_set()


async def test_a_shut_door_lets_nobody_in_and_waits_for_those_inside() -> None:
    door = Door()
    with door:
        shutting = asyncio.create_task(door.shut())
        await asyncio.sleep(0)
        assert not shutting.done()
        with pytest.raises(StartFailed), door:
            pass
        assert not shutting.done()
    await shutting
