"""Hands on a terminal: keys in, the screen out, for tasks whose programs have a screen of their own.

The replies are those of Terminus 2, Terminal-Bench's reference agent: a JSON object with `commands` (keystrokes, and
how long to wait for their effect) and `task_complete`, which is asked back once. What the policy is told is what the
terminal shows since the last time. Knows nothing of tokens or rewards.
"""

import asyncio
import json
import re
import time
from collections.abc import Callable

import msgspec
from msgspec import Struct

from sandboxes.base import Sandbox
from sandboxes.terminal import Terminal
from thundersync.core.types import Message
from thundersync.rollout.hands import Told
from thundersync.rollout.protocol import Action, NoAction, clip

LOOK_S = 0.1
"""How often the screen is looked at while keys take effect."""
QUIET_LOOKS = 3
"""A shell that waits for its next command, on a screen that stayed as it is for so many looks, has had its effect."""
_NAMED = re.compile(
    r"([CMS]-)+\S+|Enter|Escape|Up|Down|Left|Right|Tab|BTab|Space|BSpace|IC|DC|Home|End|PageUp|PageDown|F\d{1,2}"
)
_SURE = (
    "Is the task complete? It will be checked as it is, and nothing can be changed any more. "
    'If it is, say {"commands": [], "task_complete": true} once more; else go on.'
)


class Keystrokes(Struct, frozen=True):
    keystrokes: str
    """Typed as they are, line breaks too; or the name of one key (`C-c`, `Up`)."""
    duration: float = 1.0
    """Seconds to wait for their effect; less where the shell is done before."""


class _Reply(Struct, frozen=True):
    commands: list[Keystrokes] = []
    task_complete: bool = False


class TerminalAction(Action, frozen=True, kw_only=True):
    keys: tuple[Keystrokes, ...] = ()


class TerminalHands:
    """One terminal, opened with the first action."""

    def __init__(self, sandbox: Sandbox, *, limit_chars: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._terminal = Terminal(sandbox)
        self._limit_chars = limit_chars
        self._clock = clock
        self._open = False
        self._asked = False
        self._shown = ""

    def read(self, reply: str) -> Action | NoAction:
        start = reply.find("{")
        if start < 0:
            return NoAction(reason="held no JSON object")
        try:
            # Not strict: small models write line breaks into strings as they are.
            found, _ = json.JSONDecoder(strict=False).raw_decode(reply[start:])
            asked = msgspec.convert(found, _Reply)
            text = "".join(each.keystrokes for each in asked.commands)
            text.encode()  # an escaped half of a surrogate pair is no text, and neither a terminal nor a file takes it
        except (ValueError, RecursionError, msgspec.ValidationError) as error:
            return NoAction(reason=f"held JSON that cannot be read ({error})")
        if not asked.commands and not asked.task_complete:
            return NoAction(reason="held no commands")
        return TerminalAction(command=text, submit=asked.task_complete, keys=tuple(asked.commands))

    def correct(self, why: NoAction) -> str:
        return (
            f"Your reply {why.reason}. Answer with one JSON object:\n"
            '{"commands": [{"keystrokes": "ls\\n", "duration": 0.5}], "task_complete": false}'
        )

    async def act(self, action: Action, *, limit_s: float) -> Told:
        assert isinstance(action, TerminalAction)
        sure, self._asked = action.submit and self._asked, action.submit
        await self._press(action.keys, limit_s)
        if sure:
            return Told(message=Message(role="user", content=""), submitted=True)
        seen = clip(await self._look(), limit_chars=self._limit_chars)
        return Told(message=Message(role="user", content=f"{seen}\n\n{_SURE}" if action.submit else seen))

    async def _press(self, keys: tuple[Keystrokes, ...], limit_s: float) -> None:
        deadline_s = self._clock() + limit_s
        if not self._open:
            await self._terminal.start()
            self._open = True
        for each in keys:
            before = await self._terminal.screen()
            if _NAMED.fullmatch(each.keystrokes):
                await self._terminal.press([each.keystrokes])
            elif each.keystrokes:
                await self._terminal.type(each.keystrokes)
            await self._settle(before, min(self._clock() + max(0.0, each.duration), deadline_s))

    async def _settle(self, before: str, until_s: float) -> None:
        """Until the shell is back and its screen at rest, or the time is over."""
        quiet, last = 0, before
        while (left_s := until_s - self._clock()) > 0:
            await asyncio.sleep(min(LOOK_S, left_s))
            screen = await self._terminal.screen()
            quiet = quiet + 1 if screen == last != before else 0
            last = screen
            if quiet >= QUIET_LOOKS and not await self._terminal.busy():
                return

    async def _look(self) -> str:
        """What is new since the last look; the whole screen where a program has drawn over it."""
        now = await self._terminal.screen(with_history=True)
        old, self._shown = self._shown, now
        if old and now.startswith(old):
            # From the line on that was there, so that a prompt and what was typed at it are read together.
            return now[old.rfind("\n") + 1 :]
        return await self._terminal.screen() or "[the screen is empty]"
