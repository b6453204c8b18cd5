"""The programs of docs/endpoint.md, run as they stand there."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "endpoint.md"


def example(name: str) -> str:
    """The Python block below the comment `example: NAME`."""
    found = re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```\n", DOCUMENT.read_text(), re.DOTALL)
    assert found is not None, f"{DOCUMENT.name} has no example {name}"
    return found[1]


async def running(code: str) -> None:
    """Run a program in a thread: it is written for a process of its own."""
    await asyncio.to_thread(exec, compile(code, str(DOCUMENT), "exec"), {"__name__": "__main__"})
