"""Which exceptions a handler, or ``contextlib.suppress``, keeps from going on."""

from __future__ import annotations

import ast
import builtins

from clean_exit.lint.scopes import children, last_name
from clean_exit.lint.values import Value, dotted

_OF_THE_SYSTEM = {"OSError", "IOError", "EnvironmentError", "error"}


def caught_by(handler: ast.ExceptHandler) -> set[str]:
    """Return the names of what a handler catches for good; nothing if it may raise again."""
    if any(isinstance(node, ast.Raise) for node in children(handler.body)):
        return set()
    return named_by(handler)


def is_suppress(node: ast.AST, value: Value | None = None) -> bool:
    """Whether this is ``contextlib.suppress``, by its name or by what is known of its value."""
    called = node.func if isinstance(node, ast.Call) else node
    by_name = last_name(called).strip("_") == "suppress"
    return by_name or dotted(value).startswith("contextlib.suppress")


def suppressed(node: ast.AST) -> set[str]:
    """Return the names of what ``suppress(...)`` catches, where one of several may be chosen."""
    return {last_name(one) for argument in getattr(node, "args", ())
            for one in ast.walk(argument) if last_name(one)}  # fmt: skip


def ancestors(name: str) -> set[str]:
    """Return the names of a built-in exception and of the classes above it."""
    cls = getattr(builtins, name, None)
    if isinstance(cls, type) and issubclass(cls, BaseException):
        return {one.__name__ for one in cls.__mro__ if one is not object}
    return {name, "Exception", "BaseException"}


def is_expected(cause: ast.AST | None, handlers: list[ast.ExceptHandler]) -> bool:
    """Whether one of the handlers is there for the error that such a thing usually has."""
    kinds = {name for handler in handlers for name in named_by(handler)}
    if kinds & {"Exception", "BaseException"}:
        return True
    if isinstance(cause, (ast.Import, ast.ImportFrom)):
        return bool(kinds & {"ImportError", "ModuleNotFoundError"})
    if isinstance(cause, ast.Subscript):
        return bool(kinds & {"KeyError", "IndexError", "LookupError"})
    if isinstance(cause, ast.Raise):
        raised = cause.exc.func if isinstance(cause.exc, ast.Call) else cause.exc
        return raised is not None and bool(kinds & ancestors(last_name(raised)))
    if isinstance(cause, ast.Call) and last_name(cause.func) in {"int", "float"}:
        return "ValueError" in kinds
    return isinstance(cause, ast.Call) and bool(kinds & _OF_THE_SYSTEM)


def named_by(handler: ast.ExceptHandler) -> set[str]:
    """Return the names of what a handler is for."""
    if handler.type is None:
        return {"BaseException"}
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {last_name(kind) for kind in kinds}
