"""What an agent function talks to: the policy of its step, with every token captured exactly as it was sampled.

Place in the flow: between an agent function, which thinks in messages or in token ids, and `sampler`. What was sampled
is never tokenised again: a conversation that goes on gets new ids behind the old ones, and whatever does not extend
what was sampled (an edited history, a template that rewrites) goes on in a sequence of its own. Knows nothing of
sandboxes, rewards or training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

from thundersync.core.types import FinishReason, Message, TokenSequence
from thundersync.generate.base import Generation, Sampling
from thundersync.rollout.dialogue import Dialogue, GrowingSequence, Renderer, Replied
from thundersync.rollout.said import Place, Said
from thundersync.rollout.sampler import Sampler

MessageLike: TypeAlias = Message | Mapping[str, str]
"""A `Message`, or a dictionary with `role` and `content`."""


class Reply(Struct, frozen=True, kw_only=True):
    """What the policy said, and the tokens it said it with."""

    text: str
    """Without the end of turn."""
    prompt_ids: list[int]
    """Everything the model was shown, token by token."""
    token_ids: list[int]
    """Sampled, the end of turn included; shape [T]."""
    logprobs: list[float]
    """Natural log of the probability each token was sampled with; shape [T]."""
    finish_reason: FinishReason
    policy_version: int
    extends: bool
    """The prompt extends an earlier reply of this rollout token by token. False: it began a sequence of its own."""

    @property
    def message(self) -> Message:
        """To be appended to the conversation as it is: an edited reply would begin a new sequence."""
        return Message(role="assistant", content=self.text)


class Policy:
    """One rollout's view of the policy. Every reply is one of the rollout's turns and will be learned from.

    Raises, from both ways to sample: LimitReached when the rollout may sample no more, EngineFailed, StaleRollout.
    Calls may run side by side; sampling settings are the run's, because they define the policy that is trained.
    """

    def __init__(self, sampler: Sampler, renderer: Renderer, *, sampling: Sampling, opening: Sequence[Message]) -> None:
        self._sampler = sampler
        self._renderer = renderer
        self._sampling = sampling
        self._opening = list(opening)
        self._idle: list[_Conversation | _Ids] = []
        """Lines that end in a reply and may be gone on with."""
        self._lines: list[_Conversation | _Ids] = []
        self._sequences: list[GrowingSequence] = []
        """In the order of their first sampled token."""
        self.forks = 0
        """Times that a history with replies in it did not extend what had been sampled."""

    @property
    def rollout_id(self) -> str:
        return self._sampler.rollout_id

    @property
    def policy_version(self) -> int:
        return self._sampler.policy_version

    @property
    def opening(self) -> list[Message]:
        """The run's system prompt, if one is configured, and the task's instruction. A conversation that begins with
        them shares their computation with its whole group."""
        return list(self._opening)

    @property
    def turns_left(self) -> int:
        """Replies that this rollout may still ask for (rollout.max_turns)."""
        return self._sampler.turns_left

    @property
    def seconds_left(self) -> float:
        return self._sampler.seconds_left

    async def chat(
        self, messages: Sequence[MessageLike], *, max_tokens: int | None = None, stop: Sequence[str] | None = None
    ) -> Reply:
        """The policy's reply to a conversation. Append `reply.message` and what answers it, and ask again.

        `max_tokens` can only lower the run's; `stop` replaces the run's stop strings for this reply. Raises also:
        ChatTemplateError where the model's template refuses the conversation, ValueError for what is no message.
        """
        told = [_message(each) for each in messages]
        line = self._continued(told)
        if line is None:
            if any(message.role == "assistant" for message in told):
                self.tell_fork("the conversation does not go on from what was sampled")
            line = _Conversation(await asyncio.to_thread(Dialogue, self._renderer, told))
            self._lines.append(line)
        else:
            dialogue = line.dialogue
            before = dialogue.forks
            await asyncio.to_thread(dialogue.follow, *told[len(dialogue.messages) :])
            if dialogue.forks > before:
                self.tell_fork("the model's template rewrites its history")
        return await self._reply(line, self._asked(max_tokens, stop))

    async def sample(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        told: Sequence[Message] = (),
    ) -> Reply:
        """The policy's continuation of exact token ids. Ids that begin with all of an earlier reply's extend it.

        `told`: the conversation that the ids stand for, where there is one, for whoever reads the rollout later.
        """
        ids = list(token_ids)
        fits = [each for each in self._idle if isinstance(each, _Ids) and each.begins(ids)]
        line = max(fits, key=lambda each: len(each.growing.token_ids), default=None)
        if line is None:
            line, known = _Ids(GrowingSequence(ids)), 0
            self._lines.append(line)
        else:
            self._idle.remove(line)
            known = len(line.growing.token_ids)
            line.growing.grow(ids[known:], None)
        line.asked = list(told)
        try:
            return await self._reply(line, self._asked(max_tokens, stop))
        except BaseException:
            # Nothing was sampled: the line can still be gone on with.
            line.growing.shrink(known)
            if known:
                self._idle.append(line)
            else:
                self._lines.remove(line)
            raise

    async def encode(self, messages: Sequence[MessageLike]) -> list[int]:
        """The ids of a conversation as the model's template renders it, up to the reply's first token."""
        told = [_message(each) for each in messages]
        return await asyncio.to_thread(lambda: self._renderer.encode(self._renderer.text(told)))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return await asyncio.to_thread(self._renderer.decode, token_ids)

    def close(self) -> None:
        """The rollout is over: what is asked from now on raises LimitReached."""
        self._sampler.close()

    def sequences(self) -> list[TokenSequence]:
        """Every sequence with a sampled token, cut behind the last one."""
        return [growing.cut() for growing in list(self._sequences) if any(growing.sampled)]

    def said(self) -> Said:
        """Every conversation as it was, one after another; ids that are no conversation as decoded text."""
        messages: list[Message] = []
        found: list[tuple[GrowingSequence, int, Place]] = []
        for line in list(self._lines):
            begin = len(messages)
            told, replies = line.read(self._renderer)
            messages += told
            for growing, start, message in replies:
                place = Place(message=None if message is None else begin + message, conversation=begin)
                found.append((growing, start, place))
        # Now, not before: a sequence that comes meanwhile has its number before its reply is anywhere.
        number = {id(growing): index for index, growing in enumerate(list(self._sequences))}
        places = {(number[id(growing)], start): place for growing, start, place in found}
        return Said(messages=messages, sequences=self.sequences(), places=places)

    def tell_fork(self, reason: str) -> None:
        """What is sampled next does not go on from what was: whoever gives token ids knows why."""
        self.forks += 1
        self._sampler.tell_fork(reason)

    def _asked(self, max_tokens: int | None, stop: Sequence[str] | None) -> Sampling:
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens = {max_tokens}: a reply has at least one token")
        return msgspec.structs.replace(
            self._sampling,
            max_tokens=min(max_tokens or self._sampling.max_tokens, self._sampling.max_tokens),
            stop=self._sampling.stop if stop is None else tuple(stop),
        )

    def _continued(self, told: Sequence[Message]) -> _Conversation | None:
        """The conversation that `told` goes on with, the longest first; nobody else may go on with it meanwhile."""
        found = [each for each in self._idle if isinstance(each, _Conversation) and each.begins(told)]
        if not found:
            return None
        line = max(found, key=lambda each: len(each.dialogue.messages))
        self._idle.remove(line)
        return line

    async def _reply(self, line: _Conversation | _Ids, sampling: Sampling) -> Reply:
        growing = line.growing
        extends = any(growing.sampled)
        prompt_ids = list(growing.token_ids)
        generation = await self._sampler.sample(prompt_ids, sampling, sequence=lambda: self._place(growing))
        text = line.take(generation, self._renderer)
        self._idle.append(line)
        return Reply(
            text=text,
            prompt_ids=prompt_ids,
            token_ids=generation.token_ids,
            logprobs=generation.logprobs,
            finish_reason=generation.finish_reason,
            policy_version=generation.policy_version,
            extends=extends,
        )

    def _place(self, growing: GrowingSequence) -> int:
        """A sequence's index in the rollout; it gets one with its first sampled token."""
        for index, known in enumerate(self._sequences):
            if known is growing:
                return index
        self._sequences.append(growing)
        return len(self._sequences) - 1


class _Conversation:
    """A line of messages."""

    def __init__(self, dialogue: Dialogue) -> None:
        self.dialogue = dialogue

    @property
    def growing(self) -> GrowingSequence:
        return self.dialogue.growing

    def begins(self, told: Sequence[Message]) -> bool:
        known = self.dialogue.messages
        return len(known) < len(told) and told[: len(known)] == known

    def take(self, generation: Generation, renderer: Renderer) -> str:
        return self.dialogue.reply(generation.token_ids, generation.logprobs)

    def read(self, renderer: Renderer) -> tuple[list[Message], Sequence[_Read]]:
        replies = self.dialogue.replies  # first: a reply that comes meanwhile may be among the messages only
        return self.dialogue.messages, replies


class _Ids:
    """A line of token ids that are no conversation to us."""

    def __init__(self, growing: GrowingSequence) -> None:
        self.growing = growing
        self.asked: list[Message] = []
        """The conversation that is sampled from now, where the ids are one."""
        self._told: list[Message] = []
        """It, and the last reply."""
        self._replies: list[tuple[int, int]] = []
        """First token of each reply, and its place in the conversation."""

    def begins(self, ids: Sequence[int]) -> bool:
        known = self.growing.token_ids
        return len(known) <= len(ids) and ids[: len(known)] == known

    def take(self, generation: Generation, renderer: Renderer) -> str:
        spoken, _ = renderer.split_end(generation.token_ids)
        text = renderer.decode_after(self.growing.token_ids[-8:], spoken)
        start = len(self.growing.token_ids)
        self.growing.grow(generation.token_ids, generation.logprobs)
        self._told = [*self.asked, Message(role="assistant", content=text)] if self.asked else []
        self._replies.append((start, len(self.asked)))
        return text

    def read(self, renderer: Renderer) -> tuple[list[Message], Sequence[_Read]]:
        """What was told of them; else runs of given and of sampled tokens, as text."""
        replies, told = list(self._replies), self._told
        if told or not replies:
            found = [
                (self.growing, start, at if at < len(told) and told[at].role == "assistant" else None)
                for start, at in replies
            ]
            return list(told or self.asked), found
        ids, sampled = list(self.growing.token_ids), list(self.growing.sampled)
        messages: list[Message] = []
        places: dict[int, int] = {}
        begin = 0
        for end in range(1, len(sampled) + 1):
            if end == len(sampled) or sampled[end] != sampled[begin]:
                role: Literal["assistant", "user"] = "assistant" if sampled[begin] else "user"
                places |= dict.fromkeys((start for start, _ in replies if begin <= start < end), len(messages))
                messages.append(Message(role=role, content=renderer.decode(ids[begin:end])))
                begin = end
        return messages, [(self.growing, start, places.get(start)) for start, _ in replies]


_Read: TypeAlias = Replied | tuple[GrowingSequence, int, int | None]
"""A reply's sequence, its first token there, and its index among the messages of its line, if it has one."""


def _message(given: MessageLike) -> Message:
    if isinstance(given, Message):
        return given
    try:
        return msgspec.convert(dict(given), Message)
    except (TypeError, ValueError, msgspec.ValidationError) as error:
        raise ValueError(f"{given!r} is no message: {error}") from error
