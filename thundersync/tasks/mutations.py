"""Small bugs in Python functions, of the kinds that SWE-smith's procedural makers produce, as patches.

The first part of `tasks make-repairs`: a file's text in, every bug that can be put into it out. Edits are made in the
text, so that a patch shows the bug and nothing else, and each is compared with the same edit of the syntax tree: what
comes out is the intended program. Refuses to know tests, sandboxes and rows.
"""

import ast
import hashlib
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

PREFIX = "func_pm_"
"""How SWE-smith's ids name procedural kinds."""
_CONTEXT_LINES = 3
_INDENTED = b"if 1:\n"  # what makes a method's text a program of its own

_COMPARED: dict[type[ast.cmpop], tuple[bytes, type[ast.cmpop], bytes]] = {
    ast.Lt: (rb"<", ast.LtE, b"<="),
    ast.LtE: (rb"<=", ast.Lt, b"<"),
    ast.Gt: (rb">", ast.GtE, b">="),
    ast.GtE: (rb">=", ast.Gt, b">"),
    ast.Eq: (rb"==", ast.NotEq, b"!="),
    ast.NotEq: (rb"!=", ast.Eq, b"=="),
    ast.Is: (rb"\bis\b", ast.IsNot, b"is not"),
    ast.IsNot: (rb"\bis\s+not\b", ast.Is, b"is"),
    ast.In: (rb"\bin\b", ast.NotIn, b"not in"),
    ast.NotIn: (rb"\bnot\s+in\b", ast.In, b"in"),
}
_COMPUTED: dict[type[ast.operator], tuple[bytes, type[ast.operator], bytes]] = {
    ast.Add: (rb"\+", ast.Sub, b"-"),
    ast.Sub: (rb"-", ast.Add, b"+"),
    ast.Mult: (rb"\*", ast.Add, b"+"),
    ast.Div: (rb"/", ast.FloorDiv, b"//"),
    ast.FloorDiv: (rb"//", ast.Div, b"/"),
    ast.Mod: (rb"%", ast.FloorDiv, b"//"),
    ast.BitAnd: (rb"&", ast.BitOr, b"|"),
    ast.BitOr: (rb"\|", ast.BitAnd, b"&"),
}
_JOINED: dict[type[ast.boolop], tuple[bytes, type[ast.boolop], bytes]] = {
    ast.And: (rb"\band\b", ast.Or, b"or"),
    ast.Or: (rb"\bor\b", ast.And, b"and"),
}


class Mutation(Struct, frozen=True, kw_only=True):
    """One bug. `patch` puts it into the file `path` (relative to the repository), as `git apply` takes it."""

    kind: str
    path: str
    patch: str

    @property
    def digest(self) -> str:
        """Eight letters and digits, the end of an instance id."""
        number = int.from_bytes(hashlib.sha256(self.patch.encode()).digest()[:8], "big")
        letters = "abcdefghijklmnopqrstuvwxyz0123456789"
        return "".join(letters[number // 36**place % 36] for place in range(8))


class _Edit(Struct, frozen=True):
    """Bytes `start`..`end` of an entity's text become `text`."""

    start: int
    end: int
    text: bytes


class _Change(Struct, frozen=True):
    kind: str
    edits: list[_Edit]
    do: Callable[[], None]
    """The same to the tree."""
    undo: Callable[[], None]


def mutations_of(path: str, source: bytes) -> list[Mutation]:
    """Every bug of every function in the file; none where it is not UTF-8, no Python, or does not end with a line."""
    try:
        source.decode()
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    if not source.endswith(b"\n"):
        return []
    lines = source.splitlines(keepends=True) if b"\r" not in source.replace(b"\r\n", b"") else []
    found: dict[str, Mutation] = {}
    for function in _functions(tree.body):
        first, last = function.lineno - 1, (function.end_lineno or function.lineno)
        if last > len(lines):  # separators that only one of the two counts
            return []
        for kind, new in _variants(b"".join(lines[first:last]), indented=function.col_offset > 0):
            patch = _patch(path, lines, first, last, new)
            found.setdefault(patch, Mutation(kind=PREFIX + kind, path=path, patch=patch))
    return list(found.values())


def in_seeded_order(mutations: Sequence[Mutation], *, seed: int) -> list[Mutation]:
    """All of them, kinds in turn, so that any number of the first ones is a mixture."""
    chosen = random.Random(f"repairs {seed}")
    kinds: dict[str, list[Mutation]] = defaultdict(list)
    for each in sorted(mutations, key=lambda mutation: (mutation.path, mutation.patch)):
        kinds[each.kind].append(each)
    for each_kind in kinds.values():
        chosen.shuffle(each_kind)
    order: list[Mutation] = []
    while len(order) < len(mutations):
        order += [each.pop() for each in kinds.values() if each]
    return order


def _functions(body: Sequence[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods, not those inside others."""
    for each in body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield each
        else:
            for name in ("body", "orelse", "finalbody"):
                yield from _functions(getattr(each, name, []))


def _variants(text: bytes, *, indented: bool) -> Iterator[tuple[str, bytes]]:
    """Kinds, and the function's text with one bug each."""
    text = _INDENTED + text if indented else text
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a decorator's or a string's continuation at the left margin
        return
    place = _Places(text)
    function = tree.body[0]
    if isinstance(function, ast.If):  # not what was put around it
        function = function.body[0]
    for change in _changes(function, place):
        new = text
        for edit in sorted(change.edits, key=lambda edit: -edit.start):
            new = new[: edit.start] + edit.text + new[edit.end :]
        change.do()
        wanted = ast.dump(tree)
        change.undo()
        try:
            same = ast.dump(ast.parse(new)) == wanted
        except (SyntaxError, ValueError):
            same = False
        if same and new != text:
            yield change.kind, new[len(_INDENTED) :] if indented else new


class _Places:
    """Where nodes stand in a text, in bytes."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: ast.expr | ast.stmt) -> bytes:
        return self.text[self.start(node) : self.end(node)]

    def lines(self, node: ast.stmt) -> tuple[int, int] | None:
        """The whole lines of a statement; None if something else begins on its first one."""
        first = self._starts[node.lineno - 1]
        assert node.end_lineno is not None
        if self.text[first : self.start(node)].strip():
            return None
        return first, self._starts[node.end_lineno]


def _changes(function: ast.stmt, place: _Places) -> Iterator[_Change]:
    for node in ast.walk(function):
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARED:
                word, new_op, new_word = _COMPARED[type(op)]
                yield from _operator(node, "ops", [new_op()], (left, right), word, new_word, place)
                if isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
                    yield _swap("op_swap", left, right, node, ("left", "comparators"), (right, [left]), place)
            case ast.BinOp(left=left, op=operator, right=right):
                if type(operator) in _COMPUTED:
                    symbol, new_operator, new_symbol = _COMPUTED[type(operator)]
                    yield from _operator(node, "op", new_operator(), (left, right), symbol, new_symbol, place)
                if isinstance(operator, ast.Sub | ast.Div | ast.FloorDiv | ast.Mod | ast.Pow):
                    yield _swap("op_swap", left, right, node, ("left", "right"), (right, left), place)
            case ast.BoolOp(op=boolean, values=[left, right]):
                word, new_boolean, new_word = _JOINED[type(boolean)]
                yield from _operator(node, "op", new_boolean(), (left, right), word, new_word, place)
            case ast.Constant(value=int() as value) if not isinstance(value, bool):
                for new in (value + 1, value - 1):
                    if new >= 0:  # else it is no constant but an operator and one
                        edit = _Edit(place.start(node), place.end(node), str(new).encode())
                        yield _set("op_change_const", [edit], node, ("value",), (new,))
            case ast.Call(args=[first, second, *rest]) if not isinstance(first, ast.Starred) and not isinstance(
                second, ast.Starred
            ):
                yield _swap("arg_swap", first, second, node, ("args",), ([second, first, *rest],), place)
            case ast.If(test=test):
                edits = [_Edit(place.start(test), place.end(test), b"not (" + place.of(test) + b")")]
                yield _set("ctrl_invert_if", edits, node, ("test",), (ast.UnaryOp(ast.Not(), test),))
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list):  # a lambda's and a conditional expression's is none
                for index in range(len(body)):
                    yield from _removals(node, name, body, index, place)


def _removals(owner: ast.AST, name: str, body: list[ast.stmt], index: int, place: _Places) -> Iterator[_Change]:
    """The statement at `index` gone, or nothing but what it wraps."""
    kinds: dict[type[ast.stmt], str] = {
        ast.Assign: "remove_assign",
        ast.AugAssign: "remove_assign",
        ast.If: "remove_cond",
        ast.For: "remove_loop",
        ast.While: "remove_loop",
    }
    statement = body[index]
    lines = place.lines(statement)
    if lines is None:
        return
    indent = place.text[lines[0] : place.start(statement)]
    if kind := kinds.get(type(statement)):
        if place.of(statement).startswith(b"elif"):
            yield _set(kind, [_Edit(*lines, b"")], owner, (name,), ([],))
        elif len(body) == 1:
            yield _set(kind, [_Edit(*lines, indent + b"pass\n")], owner, (name,), ([ast.Pass()],))
        else:
            yield _set(kind, [_Edit(*lines, b"")], owner, (name,), ([*body[:index], *body[index + 1 :]],))
    if isinstance(statement, ast.With | ast.Try) and (inner := place.lines(statement.body[0])) is not None:
        end = place.lines(statement.body[-1])
        deeper = place.text[inner[0] : place.start(statement.body[0])]
        if end is not None and deeper.startswith(indent):
            text = place.text[inner[0] : end[1]]
            shallow = re.sub(rb"^" + deeper, indent, text, flags=re.MULTILINE)
            new = [*body[:index], *statement.body, *body[index + 1 :]]
            yield _set("remove_wrapper", [_Edit(*lines, shallow)], owner, (name,), (new,))


def _operator(
    node: ast.AST,
    name: str,
    new: object,
    sides: tuple[ast.expr, ast.expr],
    word: bytes,
    new_word: bytes,
    place: _Places,
) -> Iterator[_Change]:
    """Another operator between two sides, where parentheses and comments may stand as well."""
    start = place.end(sides[0])
    if match := re.search(word, place.text[start : place.start(sides[1])]):
        edit = _Edit(start + match.start(), start + match.end(), new_word)
        yield _set("op_change", [edit], node, (name,), (new,))


def _swap(
    kind: str,
    one: ast.expr,
    other: ast.expr,
    node: ast.AST,
    names: tuple[str, ...],
    values: tuple[object, ...],
    place: _Places,
) -> _Change:
    edits = [
        _Edit(place.start(one), place.end(one), place.of(other)),
        _Edit(place.start(other), place.end(other), place.of(one)),
    ]
    return _set(kind, edits, node, names, values)


def _set(kind: str, edits: list[_Edit], node: ast.AST, names: tuple[str, ...], values: tuple[object, ...]) -> _Change:
    before = [getattr(node, name) for name in names]

    def put(given: Sequence[object]) -> None:
        for name, value in zip(names, given, strict=True):
            setattr(node, name, value)

    return _Change(kind, edits, lambda: put(values), lambda: put(before))


def _patch(path: str, lines: list[bytes], first: int, last: int, new: bytes) -> str:
    """The lines `first`..`last` become `new`, as one hunk with no more than what differs and its context."""
    old_lines, new_lines = lines[first:last], new.splitlines(keepends=True)
    head = 0
    while head < min(len(old_lines), len(new_lines)) and old_lines[head] == new_lines[head]:
        head += 1
    tail = 0
    while tail < min(len(old_lines), len(new_lines)) - head and old_lines[-1 - tail] == new_lines[-1 - tail]:
        tail += 1
    out, into = old_lines[head : len(old_lines) - tail], new_lines[head : len(new_lines) - tail]
    at, end = first + head, last - tail
    before, after = lines[max(0, at - _CONTEXT_LINES) : at], lines[end : end + _CONTEXT_LINES]
    around = len(before) + len(after)
    start = at - len(before) + 1
    hunk = [f"@@ -{start},{around + len(out)} +{start},{around + len(into)} @@\n".encode()]
    for mark, group in ((b" ", before), (b"-", out), (b"+", into), (b" ", after)):
        hunk += [mark + line for line in group]
    return f"--- a/{path}\n+++ b/{path}\n" + b"".join(hunk).decode()
