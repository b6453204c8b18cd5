"""Bugs are put into functions as they are written: each patch applies, and what it makes is another program."""

import ast
import subprocess
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from tests.tasks.toy import PURSE
from thundersync.tasks import mutations
from thundersync.tasks.mutations import in_seeded_order, mutations_of
from thundersync.tasks.swe import kind_of


def applied(folder: Path, source: str, patch: str) -> str:
    """`source` with `patch`, by git."""
    file = folder / "a.py"
    file.write_bytes(source.encode())
    subprocess.run(["git", "apply", "--whitespace=nowarn", "-"], input=patch.encode(), cwd=folder, check=True)
    return file.read_bytes().decode()


def variants(folder: Path, source: str) -> dict[str, list[str]]:
    """By kind, what each bug makes of `source`."""
    found: dict[str, list[str]] = {}
    for each in mutations_of("a.py", source.encode()):
        found.setdefault(each.kind.removeprefix("func_pm_"), []).append(applied(folder, source, each.patch))
    return found


def test_every_patch_applies_and_changes_the_program_and_nothing_else(tmp_path: Path) -> None:
    for source in (PURSE, Path(mutations.__file__).read_text()[:9000].rpartition("\ndef ")[0] + "\n"):
        for each in mutations_of("a.py", source.encode())[::3]:
            bad = applied(tmp_path, source, each.patch)
            assert ast.dump(ast.parse(bad)) != ast.dump(ast.parse(source)), each.patch
            changed = sum(line[:1] in "+-" for line in each.patch.splitlines()[2:])
            assert changed <= 1 + source.count("\n")


@pytest.mark.parametrize(
    ("body", "kind", "wanted"),
    [
        ("return a < b", "op_change", {"return a <= b"}),
        ("return a is  not b", "op_change", {"return a is b"}),
        ("return (a) + (  # both\n        b)", "op_change", {"return (a) - (  # both\n        b)"}),
        ("return a and b", "op_change", {"return a or b"}),
        ("return a - b", "op_swap", {"return b - a"}),
        ("return a[7]", "op_change_const", {"return a[8]", "return a[6]"}),
        ("return f(a, 'ä', c=1)", "arg_swap", {"return f('ä', a, c=1)"}),
        ("if a:\n        return b", "ctrl_invert_if", {"if not (a):\n        return b"}),
        ("if a:\n        return b", "remove_cond", {"pass"}),
        ("b = 1\n    return b", "remove_assign", {"return b"}),
        ("for each in a:\n        b()\n    return 2", "remove_loop", {"return 2"}),
        ("with a:\n        b()\n        c()", "remove_wrapper", {"b()\n    c()"}),
        ("try:\n        b()\n    finally:\n        c()", "remove_wrapper", {"b()"}),
    ],
)
def test_each_kind_of_bug_is_made(tmp_path: Path, body: str, kind: str, wanted: set[str]) -> None:
    def source(text: str) -> str:
        return f"import x\n\n\ndef f(a, b):\n    {text}\n"

    assert set(variants(tmp_path, source(body))[kind]) == {source(text) for text in wanted}
    inside = f"class A:\n{textwrap.indent(source(body).partition('x' + chr(10))[2].strip(), '    ')}\n"
    assert kind in variants(tmp_path, inside), "in a method too"


def test_an_elif_goes_alone_and_a_line_that_holds_more_stays(tmp_path: Path) -> None:
    source = "def f(a):\n    if a:\n        b()\n    elif a > 1:\n        c()\n"
    source += "    x = 1; y = 2\n    if a: z = 3\n    return a\n"
    found = variants(tmp_path, source)
    assert source.replace("    elif a > 1:\n        c()\n", "") in found["remove_cond"]
    assert "remove_assign" not in found


@pytest.mark.parametrize(
    "source", [b"def f(:\n", b"def f():\n    return '\xff'\n", b"def f():\n    return 1", b"x = 1\n"]
)
def test_a_file_that_cannot_be_edited_has_no_bugs(source: bytes) -> None:
    assert mutations_of("a.py", source) == []


def test_line_ends_survive(tmp_path: Path) -> None:
    source = "def f(a):\r\n    b = 1\r\n    return a < b\r\n"
    assert source.replace("a < b", "a <= b") in variants(tmp_path, source)["op_change"]


def test_the_order_is_the_seeds_and_mixes_kinds() -> None:
    found = mutations_of("src/purse.py", PURSE.encode())
    assert len({each.digest for each in found}) == len(found)
    order = in_seeded_order(found, seed=1)
    assert order == in_seeded_order(list(reversed(found)), seed=1) != in_seeded_order(found, seed=2)
    kinds = Counter(each.kind for each in found)
    assert Counter(each.kind for each in order) == kinds
    assert len({each.kind for each in order[: len(kinds)]}) == len(kinds)
    assert kind_of(f"pypi__purse.01234567.{order[0].kind}__{order[0].digest}") == order[0].kind
