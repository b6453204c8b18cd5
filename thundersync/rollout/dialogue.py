"""A conversation as the engine sees it: exact token ids that only ever grow, with the mask of what was sampled.

Place in the flow: between the agent, which thinks in messages, and the generator, which knows only ids. Here the
chat template meets the tokens. Knows nothing of tools, sandboxes, rewards or training.

The rule is that a sampled token is never tokenised again. A reply's ids stay as they were sampled, and the next
message's ids are appended behind them. That is right only while the template renders the longer conversation as an
extension of the shorter one; where it does not (it drops earlier reasoning, trims a reply, rewrites a system line),
the dialogue forks: what was sampled stays in its own sequence, and the conversation goes on in a fresh one.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from thundersync.core.types import Message, TokenSequence
from thundersync.errors import ModelMissing, ThundersyncError
from thundersync.rollout.said import Place, Said

Tool = Mapping[str, Any]
"""A tool's declaration in the JSON schema form that chat templates take."""

_SENTINEL = "Qthundersyncreplyq"  # survives trimming, has no meaning in any template


class ChatTemplateError(ThundersyncError):
    """The model's chat template cannot render a conversation of this shape."""

    def __init__(self, detail: str) -> None:
        super().__init__(
            f"the model's chat template refuses the conversation: {detail}",
            remedy="Use an instruction-tuned model, or a system prompt with only the roles its template knows.",
        )


class ChatTokenizer(Protocol):
    """What is asked of a Hugging Face tokenizer."""

    @property
    def eos_token(self) -> str | None: ...

    @property
    def all_special_ids(self) -> list[int]: ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tools: list[Tool] | None,
        add_generation_prompt: bool,
        tokenize: bool,
    ) -> str: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


class Renderer:
    """Text and ids of conversations under one tokenizer. Safe to share between threads.

    `tools` are declared to the model where its template can (see `tools`), and left out elsewhere.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, tools: Sequence[Tool] = ()) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # a fast tokenizer used from two threads at once raises "Already borrowed"
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._end_text = self._find_end_text()
        self._end_ids = self.encode_after_special(self._end_text) if self._end_text else []
        self.tools: list[Tool] = list(tools) if tools and self._takes_tools(list(tools)) else []

    @classmethod
    def load(cls, folder: Path, *, tools: Sequence[Tool] = ()) -> Renderer:
        """A renderer for the tokenizer in a model's folder. Slow (a second or more): call it in a thread.

        Raises: ChatTemplateError, or ModelMissing where the folder has no tokenizer.
        """
        # Imported here because it takes seconds. AutoTokenizer imports torch as well, which this process does not
        # need: it is for folders in an old format only.
        if (folder / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast as Loader
        else:
            from transformers import AutoTokenizer as Loader
        try:
            tokenizer = Loader.from_pretrained(str(folder))
        except (OSError, ValueError) as error:
            raise ModelMissing(
                f"no tokenizer can be read in {folder}: {error}",
                remedy="The model's folder needs its tokenizer.json and tokenizer_config.json.",
            ) from error
        return cls(cast(ChatTokenizer, tokenizer), tools=tools)

    def text(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> str:
        """The template's own rendering. Raises: ChatTemplateError."""
        return self._text(messages, tools=self.tools, generation_prompt=generation_prompt)

    def encode(self, text: str) -> list[int]:
        """Ids of a whole rendering, which brings its own special tokens."""
        with self._lock:
            return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_after_special(self, text: str) -> list[int]:
        """Ids of a rendering's later part, as it is tokenised behind a special token.

        Some tokenizers put a space before the first word of every text, which a continuation must not get.
        """
        anchor = self._tokenizer.eos_token
        if anchor:
            anchor_ids, ids = self.encode(anchor), self.encode(anchor + text)
            if ids[: len(anchor_ids)] == anchor_ids:
                return ids[len(anchor_ids) :]
        return self.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        with self._lock:
            return self._tokenizer.decode(
                list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )

    def decode_after(self, before_ids: Sequence[int], token_ids: Sequence[int]) -> str:
        """Text of `token_ids` where they stand: a tokenizer may drop the first space of a text decoded alone."""
        base, whole = self.decode(before_ids), self.decode([*before_ids, *token_ids])
        return whole[len(base) :] if whole.startswith(base) else self.decode(token_ids)

    def split_end(self, token_ids: Sequence[int]) -> tuple[list[int], int]:
        """A reply's ids without the end of turn, and how many ids of the template's end of turn were sampled.

        A stop token that the template does not use (another EOS of the model) is no part of the text either; it
        stays in the sequence, and the template's own end of turn is still missing: the count is 0.
        """
        ids = list(token_ids)
        for count in range(min(len(self._end_ids), len(ids)), 0, -1):
            if ids[-count:] == self._end_ids[:count]:
                return ids[:-count], count
        if ids and ids[-1] in self._special_ids:
            return ids[:-1], 0
        return ids, 0

    def render(
        self, conversation: Sequence[Mapping[str, Any]], *, tools: Sequence[Tool], generation_prompt: bool = True
    ) -> str:
        """The template's rendering of messages as it takes them, tool calls and all. Raises: ChatTemplateError."""
        try:
            with self._lock:
                return self._tokenizer.apply_chat_template(
                    [dict(message) for message in conversation],
                    tools=list(tools) or None,
                    add_generation_prompt=generation_prompt,
                    tokenize=False,
                )
        except Exception as error:  # a template is a program of the model's makers: it may raise anything
            raise ChatTemplateError(str(error) or type(error).__name__) from error

    def _text(self, messages: Sequence[Message], *, tools: Sequence[Tool], generation_prompt: bool) -> str:
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        return self.render(conversation, tools=tools, generation_prompt=generation_prompt)

    def _find_end_text(self) -> str:
        """What the template puts behind every reply: common to a conversation that ends there and one that goes on."""
        asked = Message(role="user", content="a")
        replied = Message(role="assistant", content=_SENTINEL)
        last = self._text([asked, replied], tools=(), generation_prompt=False)
        more = self._text([asked, replied, asked], tools=(), generation_prompt=True)
        tails = [rendering.partition(_SENTINEL)[2] for rendering in (last, more)]
        return _common_prefix(*tails)

    def _takes_tools(self, tools: list[Tool]) -> bool:
        # Whether the template declares them, and asks for calls in the one form that we parse.
        asked = [Message(role="user", content="a")]
        try:
            return "<tool_call>" in self._text(asked, tools=tools, generation_prompt=True)
        except ChatTemplateError:
            return False


class Dialogue:
    """One rollout's conversation: what to send to the engine next, and everything that was sampled so far.

    The order is: `prompt_ids` -> `reply` -> `follow` -> `prompt_ids` -> ... Raises ChatTemplateError where the
    template refuses the messages.
    """

    def __init__(self, renderer: Renderer, messages: Sequence[Message]) -> None:
        self._renderer = renderer
        self._messages = list(messages)
        self._text = renderer.text(self._messages)
        """The template's rendering that `_open` stands for, up to the last reply's first token."""
        self._open = GrowingSequence(renderer.encode(self._text))
        self._done: list[GrowingSequence] = []
        self._reply_text = ""
        self._end_sampled = 0
        self._replies: list[Replied] = []
        self.forks = 0

    @property
    def messages(self) -> list[Message]:
        return list(self._messages)

    @property
    def replies(self) -> list[Replied]:
        """What was sampled so far, in order."""
        return list(self._replies)

    @property
    def prompt_ids(self) -> list[int]:
        """Ids of everything so far: the next generation's prompt."""
        return list(self._open.token_ids)

    @property
    def growing(self) -> GrowingSequence:
        """The sequence that the next or the last reply belongs to."""
        return self._open

    @property
    def sequence_index(self) -> int:
        """Of the sequence that the next or the last reply belongs to."""
        return len(self._done)

    def reply(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> str:
        """Take a sampled reply (both of shape [T]); returns its text without the end of turn."""
        if len(token_ids) != len(logprobs):
            raise ValueError(f"{len(token_ids)} sampled ids came with {len(logprobs)} logprobs")
        spoken, self._end_sampled = self._renderer.split_end(token_ids)
        # Eight ids are more than any character takes, so that the decoder sees what stands before the reply.
        self._reply_text = self._renderer.decode_after(self._open.token_ids[-8:], spoken)
        start = len(self._open.token_ids)
        self._open.grow(token_ids, logprobs)
        self._replies.append(Replied(self._open, start, len(self._messages)))
        self._messages.append(Message(role="assistant", content=self._reply_text))
        return self._reply_text

    def follow(self, *messages: Message) -> None:
        """Append what answers the last reply. Forks where the template does not extend what was sampled."""
        self._messages.extend(messages)
        whole = self._renderer.text(self._messages)
        said = self._text + self._reply_text
        tail_ids = self._renderer.encode_after_special(whole[len(said) :]) if whole.startswith(said) else []
        ended = self._end_sampled
        sampled_end = self._open.token_ids[len(self._open.token_ids) - ended :]
        if tail_ids and tail_ids[:ended] == sampled_end:
            # The end-of-turn ids that were not sampled (a limit or a stop string ended the reply) come along here.
            self._open.grow(tail_ids[ended:], None)
        else:
            self._done.append(self._open)
            self._open = GrowingSequence(self._renderer.encode(whole))
            self.forks += 1
        self._text = whole

    def sequences(self) -> list[TokenSequence]:
        """Every sequence with a sampled token, cut behind the last one: nothing is learnt from what follows it."""
        return [growing.cut() for growing in (*self._done, self._open) if any(growing.sampled)]

    def said(self) -> Said:
        """The conversation so far."""
        replies = self.replies  # first: what is said meanwhile is among the messages then
        number = {id(growing): index for index, growing in enumerate((*self._done, self._open))}
        places = {
            (number[id(reply.growing)], reply.start): Place(message=reply.message, conversation=0) for reply in replies
        }
        return Said(messages=self.messages, sequences=self.sequences(), places=places)


class Replied(NamedTuple):
    """One reply of a conversation."""

    growing: GrowingSequence
    start: int
    """Its first token."""
    message: int
    """Index among the conversation's messages."""


class GrowingSequence:
    """A token sequence under construction: what was given and what was sampled, in order."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.token_ids = list(prompt_ids)
        self.sampled = [False] * len(self.token_ids)
        self.logprobs = [0.0] * len(self.token_ids)

    def grow(self, token_ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        """Append ids: sampled with `logprobs`, or given by the template and the world (None)."""
        self.token_ids.extend(token_ids)
        self.sampled.extend([logprobs is not None] * len(token_ids))
        self.logprobs.extend([0.0] * len(token_ids) if logprobs is None else logprobs)

    def shrink(self, length: int) -> None:
        """Forget everything behind the first `length` ids."""
        for values in (self.token_ids, self.sampled, self.logprobs):
            del values[length:]

    def cut(self) -> TokenSequence:
        end = len(self.sampled) - self.sampled[::-1].index(True)
        return TokenSequence(
            token_ids=self.token_ids[:end],
            sampled=self.sampled[:end],
            logprobs=self.logprobs[:end],
            prompt_tokens=self.sampled.index(True),
        )


def _common_prefix(one: str, other: str) -> str:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return one[:length]
