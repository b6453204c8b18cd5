"""Tool calls out of a reply's text, by vLLM's own parsers: each model family writes them in its own way.

Knows vLLM's structures; nothing of engines, sessions or HTTP. Needs no GPU and no engine.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thundersync.errors import ConfigError


class VllmToolParser:
    """Takes the calls out of whole replies. Safe to share between threads."""

    def __init__(self, name: str, parser: Any, tokenizer: Any) -> None:
        self.name = name
        self._parser = parser
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # parsers keep the tokenizer, which one thread at a time may use

    @classmethod
    def load(cls, name: str, folder: Path) -> VllmToolParser:
        """vLLM's parser of that name for the tokenizer in a model's folder. Takes seconds: call it in a thread.

        Raises: ConfigError for a name that vLLM does not know, or a parser that this tokenizer does not suit.
        """
        from transformers import AutoTokenizer
        from vllm.tool_parsers import ToolParserManager

        known = ToolParserManager.list_registered()
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            raise ConfigError(
                f"serve.tool_parser = {name!r} is not a tool parser of vLLM"
                + (f"; did you mean {near[0]}?" if near else ""),
                remedy=f"It has: {', '.join(known)}.",
            )
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
        try:
            kind = ToolParserManager.get_tool_parser(name)
            kind(tokenizer)
        except Exception as error:  # parsers look for their model's special tokens, each in its own way
            raise ConfigError(
                f"serve.tool_parser = {name!r} does not suit the tokenizer in {folder}: {error}",
                remedy="Choose the parser of the model's family.",
            ) from error
        return cls(name, kind, tokenizer)

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
        """The text without its calls, and each call's name and arguments (JSON).

        Text that holds none, or none that can be read, stays whole: a malformed call is something the policy said.
        """
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest(messages=[], tools=[dict(tool) for tool in tools])
        with self._lock:
            try:
                found = self._parser(self._tokenizer, request.tools).extract_tool_calls(text, request)
            except Exception:  # what a parser of each family raises on malformed calls is its own affair
                return text, []
        if not found.tools_called:
            return text, []
        return found.content or "", [(call.function.name, call.function.arguments) for call in found.tool_calls]
