"""A door that a closing runtime shuts: nobody enters any more, and it waits for those still inside."""

import asyncio
from types import TracebackType

from sandboxes.errors import StartFailed


class Door:
    """Counts starts under way, so that closing cannot overtake one and leave its sandbox behind."""

    def __init__(self) -> None:
        self._inside = 0
        self._shut = False
        self._empty = asyncio.Event()
        self._empty.set()

    def __enter__(self) -> None:
        if self._shut:
            raise StartFailed("this runtime was closed", remedy="Make a new runtime.")
        self._inside += 1
        self._empty.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside -= 1
        if self._inside == 0:
            self._empty.set()

    async def shut(self) -> None:
        """Refuse whoever comes now; returns when nobody is inside."""
        self._shut = True
        await self._empty.wait()
