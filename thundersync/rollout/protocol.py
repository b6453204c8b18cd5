"""The shell agent's language: what a reply means, and how a command's result is told to the model.

Place in the flow: between a reply's text and the sandbox's command, and back. Pure: values in, values out. Knows
nothing of tokens, templates, sandboxes or rewards.

A reply acts with exactly one fenced block labelled `bash` (or `sh`, or unlabelled), or, where the model's template
has tools, with exactly one call of the tool `bash`. The word `submit` alone on the last line ends the rollout; what
stands above it still runs first.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

BASH_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a bash script in the task's sandbox, in a fresh shell. "
        "Put `submit` alone on the last line when the task is done.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The script."}},
            "required": ["command"],
        },
    },
}

_SHELL_LABELS = ("bash", "sh", "")
_FENCE = re.compile(r"^[ ]{0,3}(`{3,})[ \t]*([^`\n]*?)[ \t]*$")
_TOOL_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


class Action(Struct, frozen=True, kw_only=True):
    """What a reply asks for: a script to run (may be empty when it only submits)."""

    command: str
    submit: bool = False
    via: Literal["block", "tool"] = "block"


class NoAction(Struct, frozen=True, kw_only=True):
    """A reply that asks for nothing that can be done; `reason` completes "Your reply ..."."""

    reason: str


Parsed: TypeAlias = Action | NoAction


def parse_reply(text: str, *, tools: bool = False, labels: tuple[str, ...] = ()) -> Parsed:
    """The one action of a reply. With `tools`, a tool call counts too, and goes before any block; blocks with one of
    `labels` count like those labelled `bash`."""
    if tools and "<tool_call>" in text:
        return _parse_tool_call(text)
    blocks, unclosed = _shell_blocks(text, (*_SHELL_LABELS, *labels))
    if unclosed:
        return NoAction(reason="did not close its ``` block")
    if not blocks:
        return NoAction(reason="held no ```bash block")
    if len(blocks) > 1:
        return NoAction(reason=f"held {len(blocks)} blocks where one is allowed")
    return _action(blocks[0], via="block")


def correction(why: NoAction) -> str:
    """The message that answers a reply without an action."""
    return (
        f"Your reply {why.reason}. Answer with exactly one block:\n```bash\n<commands>\n```\n"
        "Put `submit` alone on the block's last line when the task is done."
    )


def observation(
    output: str,
    *,
    exit_code: int,
    limit_chars: int,
    cut_bytes: int = 0,
    timed_out_s: float | None = None,
    oom: bool = False,
) -> str:
    """The message that answers a command: its status where it is worth a word, then its output, bounded.

    `cut_bytes` were dropped by the sandbox from the middle of `output` already; `timed_out_s` is the limit that the
    command ran into.
    """
    status = []
    if timed_out_s is not None:
        status.append(f"[stopped after {timed_out_s:g} s]")
    elif oom:
        status.append("[killed: out of memory]")
    if exit_code != 0 and timed_out_s is None:
        status.append(f"[exit code {exit_code}]")
    body = clip(output.rstrip("\n"), limit_chars=limit_chars, cut_bytes=cut_bytes)
    return "\n".join([*status, body] if body else status or ["[no output]"])


def clip(text: str, *, limit_chars: int, cut_bytes: int = 0) -> str:
    """At most `limit_chars` characters of `text`, head and tail, and between them a mark that says what is missing.

    Where the sandbox has dropped bytes from the middle too, their characters cannot be counted: both are told.
    """
    if len(text) <= limit_chars and not cut_bytes:
        return text
    kept = min(limit_chars, len(text))
    head = (kept + 1) // 2
    tail = kept - head
    cut = len(text) - kept
    missing = [f"{cut} characters"] if cut else []
    if cut_bytes:
        missing.append(f"{cut_bytes} bytes")
    return f"{text[:head]}\n[... {' and '.join(missing)} cut ...]\n{text[len(text) - tail :]}"


def _action(script: str, *, via: Literal["block", "tool"]) -> Parsed:
    lines = script.rstrip().split("\n")
    submit = lines[-1].strip() == "submit"
    command = "\n".join(lines[:-1] if submit else lines).strip("\n")
    if not command.strip():
        return Action(command="", submit=True, via=via) if submit else NoAction(reason="held an empty block")
    return Action(command=command, submit=submit, via=via)


def _shell_blocks(text: str, labels: tuple[str, ...]) -> tuple[list[str], bool]:
    """The bodies of shell blocks, and whether the last block of any kind is left open.

    A block ends at a fence of at least as many backticks without a label, as in CommonMark, so that a script that
    writes a shorter fence into a file stays whole.
    """
    blocks: list[str] = []
    body: list[str] = []
    opening, label = "", ""
    for line in text.split("\n"):
        fence = _FENCE.match(line)
        if not opening:
            if fence:
                opening, label, body = fence[1], fence[2].lower(), []
        elif fence and len(fence[1]) >= len(opening) and not fence[2]:
            if label in labels:
                blocks.append("\n".join(body))
            opening = ""
        else:
            body.append(line)
    return blocks, bool(opening)


class _BashArguments(Struct):
    command: str


class _BashCall(Struct):
    name: str
    arguments: _BashArguments | str
    """Some models write the arguments as a string of JSON."""


def _parse_tool_call(text: str) -> Parsed:
    calls = _TOOL_CALL.findall(text)
    if len(calls) > 1:
        return NoAction(reason=f"made {len(calls)} tool calls where one is allowed")
    body, closing = calls[0]
    if not closing:
        return NoAction(reason="did not close its <tool_call>")
    try:
        call = msgspec.json.decode(body.strip(), type=_BashCall)
        arguments = call.arguments
        if isinstance(arguments, str):
            arguments = msgspec.json.decode(arguments, type=_BashArguments)
    except (msgspec.DecodeError, RecursionError) as error:  # the latter: brackets without end
        return NoAction(reason=f"made a tool call that cannot be read ({error})")
    if call.name != "bash":
        return NoAction(reason=f"called the tool {call.name!r}; there is only `bash`")
    return _action(arguments.command, via="tool")
