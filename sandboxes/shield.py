"""Clean-up that cannot be cancelled away: it runs to its end or to its limit, and only then is the caller cancelled."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def finish(work: Coroutine[Any, Any, T], *, limit_s: float) -> T:
    """Await `work` through any number of cancellations, for at most `limit_s`; then re-raise the cancellation.

    Raises: TimeoutError when the limit passed (`work` is cancelled then), or what `work` raised.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    task = loop.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done() and loop.time() < deadline:
        try:
            await asyncio.wait({task}, timeout=deadline - loop.time())
        except asyncio.CancelledError as error:
            cancelled = error
    late = not task.done()
    if late:
        task.cancel()
        await asyncio.wait({task}, timeout=1.0)
    if cancelled is not None:
        if task.done() and not task.cancelled():
            task.exception()  # retrieved, so that the loop does not report it; the cancellation goes first
        raise cancelled
    if late:
        raise TimeoutError(f"not done within {limit_s:.0f} s")
    return task.result()
