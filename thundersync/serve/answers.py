"""A session's answer to a call, before it takes the shape of an API."""

from __future__ import annotations

from msgspec import Struct

from thundersync.core.types import FinishReason
from thundersync.serve.chat import ToolCall
from thundersync.serve.history import How


class Choice(Struct, frozen=True, kw_only=True):
    """One reply."""

    content: str
    """As the client is told it: without the request's stop string, and without the tool calls."""
    calls: list[ToolCall]
    finish_reason: FinishReason
    stopped_by: str
    """The request's stop string that ended it; empty if another reason did."""
    token_ids: list[int]
    logprobs: list[float]
    token_texts: list[str]
    """Of each token by itself; empty unless asked for."""


class Answer(Struct, frozen=True, kw_only=True):
    """All replies to one call."""

    answer_id: str
    created_s: int
    model: str
    prompt_ids: list[int]
    choices: list[Choice]
    policy_version: int
    how: How
    why: str
