"""Generic bug operators on a function's syntax tree. None of them knows a template.

`sites(function, kind)` lists places; each is a callable that applies the bug in place and returns the callable that
takes it back. The kinds do not overlap: what is inside a slice, an index or a range() belongs to "bound" alone.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

Undo = Callable[[], None]
Site = Callable[[], Undo]

BUG_KINDS = ("compare", "constant", "negate", "arith", "name", "drop", "bound")
EXTRA_KINDS = ("logic",)  # too few templates have such a place: hard split only

_COMPARE: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq, ast.GtE),
    ast.NotEq: (ast.Eq, ast.Lt),
}
_ARITH: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub, ast.Mult),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add, ast.Sub),
    ast.FloorDiv: (ast.Mult, ast.Mod),
    ast.Mod: (ast.FloorDiv, ast.Sub),
}


_ORDERED = (ast.Add, ast.Sub, ast.FloorDiv, ast.Mod)  # + on strings and lists


def sites(function: ast.FunctionDef, kind: str) -> list[Site]:
    """Places of `function` where a bug of `kind` fits, in source order. Raises KeyError for an unknown kind."""
    return list(_OPERATORS[kind](function))


def _replace(owner: Any, field: str, new: object) -> Site:
    def apply() -> Undo:
        old = getattr(owner, field)
        setattr(owner, field, new)
        return lambda: setattr(owner, field, old)

    return apply


def _walk(node: ast.AST, *, in_bound: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """All nodes below and including `node`, with True for those inside a slice, an index or a range()."""
    yield node, in_bound
    for field, value in ast.iter_fields(node):
        begins = (isinstance(node, ast.Subscript) and field == "slice") or (_is_range(node) and field == "args")
        for child in value if isinstance(value, list) else (value,):
            if isinstance(child, ast.AST):
                yield from _walk(child, in_bound=in_bound or begins)


def _is_range(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range"


def _compare(function: ast.FunctionDef) -> Iterator[Site]:
    for node, _ in _walk(function):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            for operator in _COMPARE.get(type(node.ops[0]), ()):
                yield _replace(node, "ops", [operator()])


def _constant(function: ast.FunctionDef) -> Iterator[Site]:
    for node, in_bound in _walk(function):
        if isinstance(node, ast.Constant) and type(node.value) is int and not in_bound:
            yield _replace(node, "value", node.value + 1)
            yield _replace(node, "value", node.value - 1)


def _negate(function: ast.FunctionDef) -> Iterator[Site]:
    for node, _ in _walk(function):
        if isinstance(node, (ast.If, ast.IfExp)):
            yield _replace(node, "test", ast.UnaryOp(op=ast.Not(), operand=node.test))


def _arith(function: ast.FunctionDef) -> Iterator[Site]:
    for node, in_bound in _walk(function):
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and not in_bound:
            for operator in _ARITH.get(type(node.op), ()):
                yield _replace(node, "op", operator())


def _name(function: ast.FunctionDef) -> Iterator[Site]:
    """Another variable of the function, or the operands of one operation swapped."""
    variables = [argument.arg for argument in function.args.args]
    fixed: set[int] = set()  # names that are called, or whose object is changed in place
    for node, _ in _walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id not in variables:
            variables.append(node.id)
        elif isinstance(node, ast.Call):
            fixed.add(id(node.func))
        elif isinstance(node, ast.Attribute) or (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)):
            fixed.add(id(node.value))
    for node, in_bound in _walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in fixed and not in_bound:
            for other in variables:
                if other != node.id:
                    yield _replace(node, "id", other)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, _ORDERED) and not in_bound:
            yield _swap_operands(node)


def _swap_operands(node: ast.BinOp) -> Site:
    def apply() -> Undo:
        left, right = node.left, node.right
        node.left, node.right = right, left

        def undo() -> None:
            node.left, node.right = left, right

        return undo

    return apply


def _drop(function: ast.FunctionDef) -> Iterator[Site]:
    """A statement left out, a guard left out, or a return moved into the loop before it."""
    for node, _ in _walk(function):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for place, statement in enumerate(body):
            if isinstance(statement, (ast.Assign, ast.AugAssign)) and len(body) > 1:
                yield _replace(node, "body", body[:place] + body[place + 1 :])
            if isinstance(statement, ast.If):
                rest = [] if isinstance(statement.body[-1], ast.Return) else body[place + 1 :]
                yield _replace(node, "body", body[:place] + statement.body + rest)
            if isinstance(statement, ast.For) and body[place + 1 :] and isinstance(body[place + 1], ast.Return):
                yield _replace(statement, "body", [*statement.body, body[place + 1]])


def _bound(function: ast.FunctionDef) -> Iterator[Site]:
    for node, _ in _walk(function):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            is_slice = isinstance(node.slice, ast.Slice)
            owner = node.slice if is_slice else node
            for field in ("lower", "upper") if is_slice else ("slice",):
                end = getattr(owner, field)
                if end is not None:
                    yield from (_replace(owner, field, _shift(end, delta)) for delta in (1, -1))
        elif isinstance(node, ast.Call) and _is_range(node):
            for place, argument in enumerate(node.args):
                for delta in (1, -1):
                    yield _replace(node, "args", [*node.args[:place], _shift(argument, delta), *node.args[place + 1 :]])


def _shift(expression: ast.expr, delta: int) -> ast.expr:
    """`expression + delta`, written as a person would."""
    value = _int(expression)
    if value is not None:
        return ast.Constant(value + delta)
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, (ast.Add, ast.Sub)):
        offset = _int(expression.right)
        if offset is not None:
            total = (offset if isinstance(expression.op, ast.Add) else -offset) + delta
            return _plus(expression.left, total) if total else expression.left
    return _plus(expression, delta)


def _plus(expression: ast.expr, offset: int) -> ast.expr:
    operator = ast.Add() if offset > 0 else ast.Sub()
    return ast.BinOp(left=expression, op=operator, right=ast.Constant(abs(offset)))


def _int(expression: ast.expr) -> int | None:
    if isinstance(expression, ast.Constant) and type(expression.value) is int:
        return expression.value
    if isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.USub):
        inner = _int(expression.operand)
        return None if inner is None else -inner
    return None


def _logic(function: ast.FunctionDef) -> Iterator[Site]:
    for node, _ in _walk(function):
        if isinstance(node, ast.BoolOp):
            yield _replace(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())


_OPERATORS: dict[str, Callable[[ast.FunctionDef], Iterator[Site]]] = {
    "compare": _compare,
    "constant": _constant,
    "negate": _negate,
    "arith": _arith,
    "name": _name,
    "drop": _drop,
    "bound": _bound,
    "logic": _logic,
}
