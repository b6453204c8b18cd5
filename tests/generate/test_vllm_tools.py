"""Tool calls by vLLM's parsers: those of the families, what is malformed, and names that it does not know."""

import json
from pathlib import Path

import pytest

from tests.tiny import tiny_tokenizer
from thundersync.errors import ConfigError
from thundersync.generate.vllm_tools import VllmToolParser

pytestmark = pytest.mark.vllm  # imports it, which takes seconds: in the process that has done so

BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_calls_are_taken_out_of_a_hermes_reply(folder: Path) -> None:
    parser = VllmToolParser.load("hermes", folder)
    said = 'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls \\"é\\""}}\n</tool_call>'
    content, [(name, arguments)] = parser.parse(said, [BASH])
    assert (content, name, json.loads(arguments)) == ("I look.\n", "bash", {"command": 'ls "é"'})


@pytest.mark.parametrize("said", ["no call", '<tool_call>\n{"name": bash}\n</tool_call>', "<tool_call>"])
def test_what_is_no_call_stays_text(folder: Path, said: str) -> None:
    assert VllmToolParser.load("hermes", folder).parse(said, [BASH]) == (said, [])


def test_an_unknown_parser_is_told_with_the_nearest_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean hermes\?") as caught:
        VllmToolParser.load("hermess", folder)
    assert "hermes" in caught.value.remedy and "mistral" in caught.value.remedy


def test_a_parser_of_another_family_is_told(folder: Path) -> None:
    with pytest.raises(ConfigError, match="does not suit the tokenizer"):
        VllmToolParser.load("mistral", folder)
