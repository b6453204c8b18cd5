"""The commands `monitor` and `keys`: which face a run gets, and what is said about new keys.

Between the command line and the viewers. Knows nothing of events.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from thundersync.monitor.keys import make_keys, viewer_keys
from thundersync.monitor.view import drawable, pipe, show


async def look(target: str, *, plain: bool, json: bool, keys: Path | None, console: Console) -> None:
    """Show a run: as JSON lines, as plain lines, or, on a terminal that can draw, as the app.

    Raises: KeysFailed, KeysRefused, NothingToWatch, FeedLost, SchemaMismatch.
    """
    own = viewer_keys(keys) if keys is not None else None
    if json:
        await pipe(target, sys.stdout, keys=own, say=_Saying())
    elif plain or not drawable(console):
        await show(target, plain=True, console=console, keys=own, say=_Saying())
    else:
        from thundersync.monitor.app.app import watch  # textual is imported only where it draws

        await watch(target, keys=own, console=console)


def make(folder: Path, viewer: str, console: Console) -> int:
    """Make keys, and say what to do with them. Raises: KeysFailed."""
    run, own = make_keys(folder, viewer)
    console.print(
        f"{run}: stays with the run\n"
        f'  [monitor]\n  bind = "tcp://0.0.0.0:5599"\n  keys = "{run}"\n'
        f"{own}: for who watches; copy it to their machine over a safe way\n"
        f"  python -m thundersync monitor tcp://HOST:5599 --keys {own.name}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return 0


class _Saying:
    """What is waited for, once, to standard error: pipes carry only what was asked for."""

    def __init__(self) -> None:
        self._said = ""

    def __call__(self, text: str) -> None:
        if text and text != self._said:
            print(text, file=sys.stderr, flush=True)
        self._said = text
