"""Small changes of a module, one at a time, as a tired engineer makes them: each is a piece of text in place of another."""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_COMPUTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
# What people read: whether a test compares a message is another question.
_TOLD = ("logger", "logging", "warnings")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One mutant of a module.

    Attributes:
        kind: what is done, in a word or two.
        line: where it begins.
        entered: the lines of its statement, of which a test that could notice it enters one; none where it is the import
            of the module that runs it.
        place: the bytes of the module that are replaced.
        text: what they become.
    """

    kind: str
    line: int
    entered: range
    place: slice
    text: str

    def of(self, source: str) -> str:
        """The whole module, changed. As it was where the change is none that Python takes, such as an elif less."""
        data = source.encode()
        changed = (data[: self.place.start] + self.text.encode() + data[self.place.stop :]).decode()
        try:
            ast.parse(changed)
        except SyntaxError:
            return source
        return changed


def changes(source: str) -> list[Change]:
    """All mutants of a module, in the order of its lines."""
    tree = ast.parse(source)
    statements = list(_statements(tree))
    begins = [0, *itertools.accumulate(map(len, source.encode().splitlines(keepends=True)))]
    found = []
    for node in _judged(tree):
        for kind, text in _instead(node):
            place = slice(begins[node.lineno - 1] + node.col_offset, begins[node.end_lineno - 1] + node.end_col_offset)
            entered = _around(node, statements)
            found.append(Change(kind=kind, line=node.lineno, entered=entered, place=place, text=text))
    return sorted(found, key=lambda one: (one.line, one.kind))


def _statements(node: ast.AST, *, within: bool = False) -> Iterator[tuple[range, bool]]:
    """The lines of each statement, those around it first, and whether they are in a function."""
    for one in ast.iter_child_nodes(node):
        if isinstance(one, ast.stmt):
            yield range(one.lineno, one.end_lineno + 1), within
        yield from _statements(one, within=within or isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))


def _around(node: ast.AST, statements: list[tuple[range, bool]]) -> range:
    lines, within = [one for one in statements if node.lineno in one[0]][-1]
    return lines if within else range(0)


def _judged(node: ast.AST) -> Iterator[ast.AST]:
    """What may be changed: no annotations, decorators, default messages of errors, or what is told to people."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, ast.AST) and not _is_told(one):
                yield one
                yield from _judged(one)


def _is_told(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True  # a docstring
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.Import | ast.ImportFrom | ast.JoinedStr):
        return True
    call = node.value if isinstance(node, ast.Expr) else node
    owner = call.func.value if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else None
    return isinstance(owner, ast.Name) and owner.id in _TOLD


def _instead(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        yield "another comparison", _unparsed(node, ops=[_COMPARED[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.BoolOp):
        yield "and for or", _unparsed(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        yield "a condition less", _unparsed(node, values=node.values[:-1])
        yield "a condition less", _unparsed(node, values=node.values[1:])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not left out", f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.BinOp) and type(node.op) in _COMPUTED:
        yield "another operator", _unparsed(node, op=_COMPUTED[type(node.op)]())
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "the other truth", repr(not node.value)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "one more", repr(node.value + 1)
    elif isinstance(node, ast.IfExp):
        yield "a fixed choice", f"({ast.unparse(node.body)})"
        yield "a fixed choice", f"({ast.unparse(node.orelse)})"
    elif isinstance(node, ast.Call):
        for at in range(len(node.keywords)):
            yield "an argument less", _unparsed(node, keywords=node.keywords[:at] + node.keywords[at + 1 :])
    elif isinstance(node, ast.Expr | ast.AugAssign | ast.Raise | ast.Delete) or _is_kept(node):
        yield "a statement less", "pass"
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "nothing returned", "return None"
    elif isinstance(node, ast.Continue | ast.Break):
        yield "another way out", "break" if isinstance(node, ast.Continue) else "continue"
    elif isinstance(node, ast.If) and not node.orelse:
        yield "a branch less", "pass"


def _is_kept(node: ast.AST) -> bool:
    """Whether it is an assignment that outlives its function."""
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript)


def _unparsed(node: ast.AST, **fields: object) -> str:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return f"({ast.unparse(changed)})"
