"""Which captured tokens a request goes on with: conversations that clients send whole, matched with what was sampled.

Place in the flow: between a session's requests and the policy's exact ids. A client sends its whole conversation each
time. Its beginning is looked up among the replies that this session has given; behind the one found, only what is new
is tokenised. So ids only grow, and no reply is ever tokenised again, however its client tells it (as text, as tool
calls, without its stop string). What was not found, or what the chat template would now write differently, is rendered
afresh and goes on as a fork. Knows nothing of HTTP, engines or rewards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal, TypeAlias

from msgspec import Struct

from thundersync.rollout.dialogue import ChatTemplateError, Renderer, Tool
from thundersync.serve.chat import Chat, extended, keys

How: TypeAlias = Literal["new", "extended", "forked"]


class Point:
    """A reply that was sampled, and through its parents everything the model was shown before it."""

    def __init__(
        self, parent: Point | None, *, ids: list[int], said: str, end_ids: list[int], shown: list[Chat], ended: bool
    ) -> None:
        self._parent = parent
        self._ids = ids
        """Since the parent: what was given, and the reply."""
        self._shown = shown
        self._length = len(said)
        self._digest = _digest(said)
        self.end_ids = end_ids
        """Ids of the template's end of turn that were sampled with it."""
        self.ended = ended
        """The model ended it itself: a text has no continuation then."""
        self.continued = False

    def ids(self) -> list[int]:
        parts: list[list[int]] = []
        point: Point | None = self
        while point is not None:
            parts.append(point._ids)
            point = point._parent
        return [token for part in reversed(parts) for token in part]

    def shown(self) -> list[Chat]:
        """Every message as the model was shown it: its own replies word by word."""
        parts: list[list[Chat]] = []
        point: Point | None = self
        while point is not None:
            parts.append(point._shown)
            point = point._parent
        return [message for part in reversed(parts) for message in part]

    def rest_of(self, whole: str) -> str | None:
        """What `whole` has behind all that was shown and said; None if it begins otherwise."""
        if len(whole) < self._length or _digest(whole[: self._length]) != self._digest:
            return None
        return whole[self._length :]


class Ask(Struct, frozen=True, kw_only=True):
    """A prompt that is ready for the engine."""

    prompt_ids: list[int]
    text: str
    """Its rendering."""
    parent: Point | None
    new_ids: list[int]
    """Behind the parent's."""
    shown: list[Chat]
    """All messages as the model is shown them; empty for a plain text."""
    new_shown: list[Chat]
    key: bytes
    how: How
    why: str = ""
    """Of a fork."""


class History:
    """The replies of one session."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._by_key: dict[bytes, Point] = {}
        self._plain: list[Point] = []
        self._replies = 0

    @property
    def replies(self) -> int:
        return self._replies

    def ask(self, messages: Sequence[Chat], *, tools: Sequence[Tool]) -> Ask:
        """The exact ids for the reply to `messages`. Takes milliseconds for long ones: call it in a thread.

        Raises: ChatTemplateError.
        """
        chain = keys(messages)
        known = next((i for i in range(len(messages), 0, -1) if chain[i] in self._by_key), 0)
        if not known:
            replied = any(message["role"] == "assistant" for message in messages)
            why = "it holds replies that were not sampled here" if replied else "it is a conversation of its own"
            return self._afresh(messages, tools, chain[-1], why)
        parent = self._by_key[chain[known]]
        shown = [*parent.shown(), *messages[known:]]
        try:
            text = self._renderer.render(shown, tools=tools)
        except ChatTemplateError:
            # Some templates answer tools only behind a message that holds the calls as such.
            return self._afresh(messages, tools, chain[-1], "the chat template wants tool calls apart from the text")
        tail_ids = self._tail(parent, text)
        if tail_ids is None:
            why = "the chat template writes what was said differently now"
            return self._afresh(messages, tools, chain[-1], why, shown=shown)
        return Ask(
            prompt_ids=[*parent.ids(), *tail_ids],
            text=text,
            parent=parent,
            new_ids=tail_ids,
            shown=shown,
            new_shown=list(messages[known:]),
            key=chain[-1],
            how="forked" if parent.continued else "extended",
            why=f"what it goes on from has been gone on with, {known} messages in" if parent.continued else "",
        )

    def ask_text(self, prompt: str) -> Ask:
        """The exact ids for the continuation of a text. Call it in a thread, too."""
        fits = [
            (rest, point) for point in self._plain if not point.ended and (rest := point.rest_of(prompt)) is not None
        ]
        if not fits:
            return self._fresh_ask(self._renderer.encode(prompt), prompt, [], b"", "it is a text of its own")
        rest, parent = min(fits, key=lambda fit: len(fit[0]))
        return self._plain_ask(parent, self._renderer.encode(rest) if rest else [], prompt)

    def ask_ids(self, prompt_ids: list[int]) -> Ask:
        """The same for exact ids."""
        text = self._renderer.decode(prompt_ids)
        known = [(ids, point) for point in self._plain if prompt_ids[: len(ids := point.ids())] == ids]
        if not known:
            return self._fresh_ask(prompt_ids, text, [], b"", "they are ids of their own")
        ids, parent = max(known, key=lambda fit: len(fit[0]))
        return self._plain_ask(parent, prompt_ids[len(ids) :], text)

    def take(self, ask: Ask, *, text: str, token_ids: Sequence[int], visible: Chat | None) -> None:
        """A reply was given to `ask`: `text` as the model said it, without its end; `visible` as the client is told."""
        spoken, end = self._renderer.split_end(token_ids)
        point = Point(
            ask.parent,
            ids=[*ask.new_ids, *token_ids],
            said=ask.text + text,
            end_ids=list(token_ids[len(token_ids) - end :]),
            shown=[*ask.new_shown, {"role": "assistant", "content": text}] if visible is not None else [],
            ended=len(spoken) < len(token_ids),
        )
        if ask.parent is not None:
            ask.parent.continued = True
        self._replies += 1
        if visible is not None:
            self._by_key[extended(ask.key, visible)] = point
        else:
            self._plain.append(point)

    def _plain_ask(self, parent: Point, tail_ids: list[int], text: str) -> Ask:
        return Ask(
            prompt_ids=[*parent.ids(), *tail_ids],
            text=text,
            parent=parent,
            new_ids=tail_ids,
            shown=[],
            new_shown=[],
            key=b"",
            how="forked" if parent.continued else "extended",
            why="what it goes on from has been gone on with" if parent.continued else "",
        )

    def _tail(self, parent: Point, text: str) -> list[int] | None:
        """Ids that take the parent's to `text`; None where the template does not extend what was sampled."""
        rest = parent.rest_of(text)
        if not rest:
            return None
        ids = self._renderer.encode_after_special(rest)
        ended = len(parent.end_ids)
        # The end-of-turn ids that were not sampled (a limit or a stop string ended the reply) come along here.
        return ids[ended:] if ids[:ended] == parent.end_ids else None

    def _afresh(
        self, messages: Sequence[Chat], tools: Sequence[Tool], key: bytes, why: str, *, shown: list[Chat] | None = None
    ) -> Ask:
        told = list(messages) if shown is None else shown
        text = self._renderer.render(told, tools=tools)
        return self._fresh_ask(self._renderer.encode(text), text, told, key, why)

    def _fresh_ask(self, ids: list[int], text: str, shown: list[Chat], key: bytes, why: str) -> Ask:
        return Ask(
            prompt_ids=ids,
            text=text,
            parent=None,
            new_ids=ids,
            shown=shown,
            new_shown=shown,
            key=key,
            how="forked" if self._replies else "new",
            why=why if self._replies else "",
        )


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
