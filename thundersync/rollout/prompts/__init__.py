"""The prompts an agent starts from: a system message and worked examples, read from small Markdown files.

Before the first turn of every rollout. Refuses to know chat templates, tokens and tasks. `shell.md` documents the
format at its top.
"""

import re
from pathlib import Path
from typing import Literal, cast

from thundersync.core.types import Message
from thundersync.errors import ConfigError

_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_HEADING = re.compile(r"^## (system|user|assistant|tool)[ \t]*$", re.MULTILINE)


def load_prompt(name_or_path: str) -> list[Message]:
    """The messages that stand before a task's instruction: one system message, then the worked examples.

    `name_or_path` is the name of a prompt shipped here (`shell`), or the path of a file in the same format.

    Raises: ConfigError when there is no such prompt, or when its examples do not alternate user and assistant.
    """
    path = Path(__file__).parent / f"{name_or_path}.md"
    if not re.fullmatch(r"[\w-]+", name_or_path) or not path.is_file():
        path = Path(name_or_path).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        shipped = ", ".join(sorted(file.stem for file in Path(__file__).parent.glob("*.md")))
        raise ConfigError(
            f"no prompt {name_or_path!r}: it is neither a shipped one nor a readable file ({error})",
            remedy=f"Set rollout.system_prompt to the path of a file, or to one of: {shipped}.",
        ) from error
    return parse_prompt(text, source=str(name_or_path))


def parse_prompt(text: str, *, source: str) -> list[Message]:
    """Split a prompt file at its headings; what stands before the first one is the system message."""
    front, *rest = _HEADING.split(_COMMENT.sub("", text))
    messages = [Message(role="system", content=front.strip())] if front.strip() else []
    for role, content in zip(rest[::2], rest[1::2], strict=True):
        messages.append(
            Message(role=cast(Literal["system", "user", "assistant", "tool"], role), content=content.strip())
        )
    roles = [message.role for message in messages if message.role != "system"]
    if any(role != ("user", "assistant")[index % 2] for index, role in enumerate(roles)) or len(roles) % 2:
        raise ConfigError(
            f"the prompt {source!r} does not alternate: its messages are {', '.join(roles)}",
            remedy="Worked examples are `## user` then `## assistant`, and the last one is the assistant's.",
        )
    return messages
