"""Nothing is published under somebody who asks the engines beside a step."""

import asyncio

import pytest

from thundersync.gate import Gate


async def test_a_publish_waits_for_those_inside_and_newcomers_wait_for_it() -> None:
    gate, seen = Gate(), list[str]()
    inside, leave = asyncio.Event(), asyncio.Event()

    async def ask(name: str) -> None:
        async with gate.passing():
            seen.append(f"{name} in")
            inside.set()
            await leave.wait()
            seen.append(f"{name} out")

    async def publish() -> None:
        async with gate.closed():
            seen.append("published")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ask("first"))
        await inside.wait()
        publishing = tasks.create_task(publish())
        await asyncio.sleep(0)
        tasks.create_task(ask("second"))
        await asyncio.sleep(0)
        assert not publishing.done()
        leave.set()
    assert seen == ["first in", "first out", "published", "second in", "second out"]


async def test_whoever_is_cancelled_holds_nobody_up() -> None:
    gate, inside = Gate(), asyncio.Event()

    async def ask() -> None:
        async with gate.passing():
            inside.set()
            await asyncio.Event().wait()

    asking = asyncio.create_task(ask())
    await inside.wait()

    async def publish() -> None:
        async with gate.closed():
            await asyncio.Event().wait()

    cancelled = asyncio.create_task(publish())
    await asyncio.sleep(0)
    cancelled.cancel()
    asking.cancel()
    for task in (cancelled, asking):
        with pytest.raises(asyncio.CancelledError):
            await task
    async with gate.closed():
        pass
    async with gate.passing():
        pass
