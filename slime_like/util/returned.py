"""Values that a user's function returns, read from its source without calling it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
PREDICATES = ("all", "any", "bool", "hasattr", "isinstance", "issubclass", "len")
COLLECTIONS = (ast.List, ast.Tuple, ast.Set, ast.Dict, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True, slots=True)
class FunctionReturns:
    """The return statements of a function. A call raises, runs one of them, or returns None at the end of the function."""

    file: str
    statements: tuple[tuple[int, ast.expr | None], ...]  # line, value
    always_none: bool  # each call that returns returns None, and there is no raise statement


def returns_of(function: Callable[..., Any]) -> FunctionReturns | None:
    """Return the return statements of a function, a method or the ``__call__`` of an object.

    Return None for a class, and for a function whose return statements do not determine the result of a call: one that is
    decorated or wraps another one, is a generator function or a lambda, or has no source.
    """
    if inspect.isclass(function):
        return None
    try:
        function = function if inspect.isroutine(function) else function.__call__
        if hasattr(function, "__wrapped__"):  # inspect would read the source of the other one
            return None
        lines, first_line = inspect.getsourcelines(function)
        (node,) = ast.parse(textwrap.dedent("".join(lines))).body
        file = inspect.getsourcefile(function)
    except (OSError, TypeError, SyntaxError, ValueError, AttributeError):
        return None
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.decorator_list or file is None:
        return None
    nodes = list(_own_nodes(node))
    if any(isinstance(item, (ast.Yield, ast.YieldFrom)) for item in nodes):
        return None
    statements = [(first_line + item.lineno - 1, item.value) for item in nodes if isinstance(item, ast.Return)]
    raises = any(isinstance(item, ast.Raise) for item in nodes)
    return FunctionReturns(file, tuple(statements), not raises and all(_is_none(value) for _, value in statements))


def may_be_filter_result(value: ast.expr | None) -> bool:
    """Return whether the value of an expression may be a valid result of a group filter: None or a non-empty string.

    Return True if the value cannot be determined. Both branches of a conditional expression must be possible results; of the
    operands of ``and`` and ``or``, one is enough.
    """
    match value:
        case ast.Constant(value=constant):
            return constant is None or (isinstance(constant, str) and constant != "")
        case ast.Compare() | ast.UnaryOp(op=ast.Not()):
            return False
        case ast.BoolOp(values=values):
            return any(may_be_filter_result(item) for item in values)
        case ast.IfExp(body=body, orelse=other):
            return may_be_filter_result(body) and may_be_filter_result(other)
        case ast.Call(func=ast.Name(id=name)):
            return name not in PREDICATES
        case _:
            return not isinstance(value, COLLECTIONS)


def _is_none(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function except those inside the functions, lambdas and classes that it contains."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, SCOPES):
            yield from _own_nodes(child)
