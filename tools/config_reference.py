"""Writes docs/config.md from the structs: every key with its type, default and meaning, and other trainers' names.

python tools/config_reference.py          # writes it
python tools/config_reference.py --check  # fails if it is not what would be written
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from thundersync import config as structs
from thundersync.config import Config, Section
from thundersync.config_checks import PRESETS
from thundersync.config_file import _section_type
from thundersync.config_names import ALIASES, INACTIVE, REFUSED, REFUSED_VALUES, STALENESS, shown

PAGE = Path(__file__).resolve().parents[1] / "docs" / "config.md"

HEAD = """
# Configuration reference

<!-- Made by tools/config_reference.py from thundersync/config.py; edit that. -->

A configuration is a TOML file; `run CONFIG --dry-run` prints it with every default spelled out, and starts nothing.
What the tables below do not have is refused, with the nearest name; all faults are told at once.
`--set section.key=value` overrides a key on the command line. In Python, `load_config` and `config_from` read the same.

A key without a default must be given. Units are in the names (`timeout_s`, `memory_mib`); steps are commits.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD.strip(), *_sections(Config, "", ""), _presets(), _aliases(), _refused()]
    return "\n\n".join(parts) + "\n"


def _sections(kind: type[Section], prefix: str, title: str) -> Iterator[str]:
    """A section's table, then those of the sections in it."""
    hints, docs = get_type_hints(kind, include_extras=True), _docs(kind)
    rows, inner = [], []
    for field in msgspec.structs.fields(kind):
        hint = hints[field.name]
        if (section := _section_type(hint)) is not None:
            inner.append((section, f"{prefix}{field.name}", get_origin(hint) is list, docs.get(field.name, "")))
            continue
        rows.append(f"| `{field.name}` | {_type(hint)} | {_default(field)} | {_cell(docs.get(field.name, ''))} |")
    heading = f"## {title}" if title else "## The top of the file"
    text = [heading, _paragraph(inspect.getdoc(kind) or "")]
    if rows:
        text.append("\n".join(["| key | value | default | meaning |", "|---|---|---|---|", *rows]))
    yield "\n\n".join(filter(None, text))
    for section, name, several, doc in inner:
        title = f"`[{name}]`" + (f", or several `[[{name}]]`" if several else "")
        first, *rest = _sections(section, f"{name}.", title)
        yield first if not doc else first.replace("\n\n", f"\n\n{_paragraph(doc).replace('None:', 'Left out:')}\n\n", 1)
        yield from rest


def _docs(kind: type[Section]) -> dict[str, str]:
    """The string below each field."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if told and isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            found[field.target.id] = inspect.cleandoc(str(after.value.value))  # type: ignore[attr-defined]
    return found


def _type(hint: Any) -> str:
    """A type as a person would say it."""
    if get_origin(hint) is Annotated:
        bare, *marks = get_args(hint)
        return _type(bare) + "".join(_range(mark) for mark in marks if isinstance(mark, Meta))
    options = get_args(hint)
    if get_origin(hint) is Literal:
        return ", ".join(f"`{shown(option)}`" for option in options)
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_type(option) for option in options if option is not type(None))
    if get_origin(hint) is tuple and options[-1] is not ...:
        return f"{len(options)} of: {_type(options[0])}"
    if get_origin(hint) is dict:
        return "table"
    if get_origin(hint) in (list, tuple):
        return f"list of {_type(options[0])}"
    if get_origin(hint) is dict:
        return "table"
    return {int: "integer", float: "number", bool: "`true`, `false`", str: "text"}[hint]


def _range(meta: Meta) -> str:
    bounds = ((meta.ge, "at least"), (meta.gt, "above"), (meta.le, "at most"), (meta.lt, "below"))
    said = [f"{word} {bound:{'' if isinstance(bound, int) else 'g'}}" for bound, word in bounds if bound is not None]
    return f", {', '.join(said)}" if said else ""


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "must be given"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return f"`{_toml(value)}`" if value is not None else "none"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f"{value:g}" if isinstance(value, float) else shown(value)


def _presets() -> str:
    rows = [
        f"| `{kind}` | {', '.join(f'`{key} = {_toml(value)}`' for key, value in keys.items())} |"
        for kind, keys in PRESETS.items()
        if keys
    ]
    return "\n".join(
        [
            "## What `algo.type` sets",
            "",
            "In a file, the type sets the defaults of these keys ([objectives](objectives.md) says why):",
            "",
            "| type | defaults of `[algo]` |",
            "|---|---|",
            *rows,
        ]
    )


def _aliases() -> str:
    by_target: dict[str, list[str]] = {}
    for alias, target in ALIASES.items():
        by_target.setdefault(target, []).append(f"`{alias}`")
    rows = [f"| `{target}` | {', '.join(aliases)} |" for target, aliases in sorted(by_target.items())]
    head = [
        "## Names that other trainers use",
        "",
        "They are accepted, each with a note, where they mean the same in the same unit:",
        "",
        "| here | also accepted |",
        "|---|---|",
    ]
    return "\n".join([*head, *rows])


def _refused() -> str:
    rows = []
    for key, refusal in REFUSED.items():
        off = f"; accepted as {', '.join(f'`{_toml(value)}`' for value in refusal.off)}" if refusal.off else ""
        rows.append(f"| `{key}` | {_cell(refusal.why)}{off} |")
    rows += [f"| `{key} = {shown(value)}` | {_cell(why)} |" for (key, value), why in REFUSED_VALUES.items()]
    rows.append(f"| {', '.join(f'`{key}`' for key in STALENESS)} | every rollout counts in the step it was made for; "
                "accepted as `0` |")  # fmt: skip
    inactive = ", ".join(f"`{key}`" for key in INACTIVE)
    return "\n".join(
        [
            "## What is known and refused",
            "",
            "| key | why |",
            "|---|---|",
            *rows,
            "",
            f"Accepted, and said to change nothing: {inactive}.",
        ]
    )


def _paragraph(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    linked = re.sub(r"\bdocs/(\w+)\.md\b", r"[\1](\1.md)", _paragraph(text))
    return linked.replace("|", "\\|")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = page()
    if not parser.parse_args().check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE} is not what {structs.__name__} says: run python tools/config_reference.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
