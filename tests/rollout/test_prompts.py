"""A prompt file becomes the messages that stand before a task's instruction."""

from pathlib import Path

import pytest

from thundersync.errors import ConfigError
from thundersync.rollout.prompts import load_prompt, parse_prompt


def test_the_shipped_prompt_is_a_system_message_and_two_worked_examples() -> None:
    messages = load_prompt("shell")
    assert [message.role for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert not any("<!--" in message.content for message in messages)
    for message in messages:
        if message.role == "assistant":
            opening, *commands, last, closing = message.content.splitlines()
            assert (opening, last, closing) == ("```bash", "submit", "```")
            assert commands


def test_a_path_is_read_like_a_shipped_prompt(tmp_path: Path) -> None:
    file = tmp_path / "mine.md"
    file.write_text("<!-- a note\nof two lines -->\nBe brief.\n\n## user\n\nHi.\n\n## assistant\nHo.\n")
    messages = load_prompt(str(file))
    assert [(message.role, message.content) for message in messages] == [
        ("system", "Be brief."),
        ("user", "Hi."),
        ("assistant", "Ho."),
    ]


def test_a_prompt_may_be_examples_only_and_a_deeper_heading_is_text() -> None:
    messages = parse_prompt("## user\n### user\n## userland\nHi.\n## assistant\nHo.\n", source="x")
    assert [message.content for message in messages] == ["### user\n## userland\nHi.", "Ho."]


def test_an_unknown_name_tells_the_shipped_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        load_prompt("shel")
    assert "shell" in caught.value.remedy


@pytest.mark.parametrize("text", ["## user\nHi.\n", "## assistant\nHo.\n", "## user\na\n## user\nb\n"])
def test_examples_that_do_not_alternate_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="does not alternate"):
        parse_prompt(text, source="x")
