"""The exceptions that a handler or ``contextlib.suppress`` catches."""

from __future__ import annotations

import ast
import builtins

from clean_exit.lint.evaluator import Value, dotted
from clean_exit.lint.scopes import children, last_name


def exception_names(handler: ast.ExceptHandler) -> set[str]:
    """Return the names in the head of a handler."""
    if handler.type is None:
        return {"BaseException"}
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {last_name(kind) for kind in kinds}


def caught_names(handler: ast.ExceptHandler) -> set[str]:
    """Return the names of the exceptions that go no further; none if the handler may raise."""
    if any(isinstance(node, ast.Raise) for node in children(handler.body)):
        return set()
    return exception_names(handler)


def is_suppress(node: ast.AST, value: Value | None = None) -> bool:
    """Whether an expression is ``contextlib.suppress``, by its name or its value."""
    called = node.func if isinstance(node, ast.Call) else node
    by_name = last_name(called).strip("_") == "suppress"
    return by_name or dotted(value).startswith("contextlib.suppress")


def suppressed_names(node: ast.AST) -> set[str]:
    """Return the names of the exceptions that ``suppress(...)`` catches."""
    return {last_name(one) for argument in getattr(node, "args", ())
            for one in ast.walk(argument) if last_name(one)}  # fmt: skip


def ancestors(name: str) -> set[str]:
    """Return the names of a built-in exception and of its base classes."""
    cls = getattr(builtins, name, None)
    if isinstance(cls, type) and issubclass(cls, BaseException):
        return {one.__name__ for one in cls.__mro__ if one is not object}
    return {name, "Exception", "BaseException"}
