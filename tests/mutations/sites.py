"""The places of a module where a mutation is possible, and what each becomes. Source in, source
out: nothing is run here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_OPPOSITE = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_REMOVABLE = (ast.Expr, ast.AugAssign, ast.Delete, ast.Raise, ast.Assign)
_TALK = ("logger.", "super().__init__", "drop_traceback")
"""Statements that begin so are left alone: lines of a log, and what only keeps reference cycles
away.
"""


@dataclass(frozen=True, order=True)
class Mutation:
    """One change: bytes `start` to `end` of a file become `new`. `line`: where, `what`: what was
    changed, for a reader.
    """

    path: str
    line: int
    start: int
    end: int
    new: str
    what: str

    def of(self, source: bytes) -> bytes:
        """Return the source with the change."""
        return source[: self.start] + self.new.encode() + source[self.end :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


def sites(path: str, source: bytes) -> list[Mutation]:
    """Return all mutations of a module's functions, in order. `path` names the module in them."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Mutation] = []

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[(node.end_lineno or 0) - 1] + (
            node.end_col_offset or 0
        )

    def text(node: ast.expr | ast.stmt) -> str:
        return source[slice(*span(node))].decode()

    def add(node: ast.expr | ast.stmt, new: str, what: str) -> None:
        found.append(Mutation(path, node.lineno, *span(node), new, what))

    for node in _inside_functions(ast.parse(source)):
        if not isinstance(node, ast.expr | ast.stmt):
            continue
        short = " ".join(text(node).split())[:80]
        match node:
            case ast.stmt() if (
                isinstance(node, _REMOVABLE)
                and not _is_needed(node)
                and not short.startswith(_TALK)
            ):
                add(node, "pass", f"without `{short}`")
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                add(test, f"not ({text(test)})", f"not: `{' '.join(text(test).split())[:80]}`")
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPPOSITE:
                other = _OPPOSITE[type(op)]
                add(node, f"(({text(left)}) {other} ({text(right)}))", f"`{short}` with {other}")
            case ast.BoolOp(op=op, values=values):
                word = " and " if isinstance(op, ast.And) else " or "
                for left_out in values:
                    rest = word.join(f"({text(one)})" for one in values if one is not left_out)
                    add(node, f"({rest})", f"`{short}` without `{text(left_out)[:60]}`")
            case ast.Constant(value=bool(value)):
                add(node, str(not value), f"{value} is {not value}")
            case ast.Constant(value=int(value) | float(value)):
                add(node, f"({value} + 1)", f"{value} is {value + 1}")
            case ast.BinOp(op=ast.Add() | ast.Sub() as op, left=left, right=right):
                sign = "-" if isinstance(op, ast.Add) else "+"
                add(node, f"(({text(left)}) {sign} ({text(right)}))", f"`{short}` with {sign}")
            case ast.Call(keywords=keywords):
                for one in keywords:
                    if one.arg and not (
                        isinstance(one.value, ast.Constant)
                        and one.value.value in (None, True, False)
                    ):
                        add(one.value, "None", f"{one.arg}=None in `{short}`")
    return sorted(set(found))


def _inside_functions(node: ast.AST, *, inside: bool = False) -> Iterator[ast.AST]:
    """Yield the nodes of functions' bodies, without what only a reader of a message or of a
    debugger sees.
    """
    if inside:
        yield node
    if isinstance(node, ast.AnnAssign | ast.JoinedStr | ast.Raise | ast.Assert):
        return
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for child in ast.iter_child_nodes(node):
            yield from _inside_functions(child, inside=inside)
    elif node.name != "__repr__":
        for statement in node.body:
            yield from _inside_functions(statement, inside=True)


def _is_needed(node: ast.stmt) -> bool:
    """Return whether a statement is a docstring, or makes a name that others use: without it
    nothing runs.
    """
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant | ast.Yield | ast.YieldFrom)
    if isinstance(node, ast.Assign):
        return any(
            isinstance(part, ast.Name)
            for target in node.targets
            for part in ast.walk(target)
            if _is_stored(part)
        )
    return False


def _is_stored(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store)
