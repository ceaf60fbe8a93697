"""bare-except: handlers that swallow even what ends a program."""

from __future__ import annotations

import ast

from clean_exit.lint.catching import is_suppress, named_by, suppressed
from clean_exit.lint.frames import Frame
from clean_exit.lint.scopes import children, last_name
from clean_exit.lint.values import Value

_SHOWING = {"print", "debug", "info", "warning", "warn", "error", "exception", "critical", "log",
            "write"}  # fmt: skip


def on_statement(frame: Frame, node: ast.AST) -> str:
    """Find ``except:`` and ``except BaseException:`` that do not raise again."""
    if not isinstance(node, ast.ExceptHandler):
        return ""
    names = named_by(node)
    catches_all = "BaseException" in names or {"Exception", "KeyboardInterrupt"} <= names
    raises = any(isinstance(one, ast.Raise) for one in children(node.body))
    if not catches_all or raises or _is_kept(node):
        return ""
    said = "except:" if node.type is None else f"except {ast.unparse(node.type)}:"
    return f"{said} hides Ctrl-C and every mistake"


def _is_kept(handler: ast.ExceptHandler) -> bool:
    """Whether the error is kept or told, other than by printing it."""
    shown: set[ast.AST] = set()
    for one in children(handler.body):
        if isinstance(one, ast.Call) and last_name(one.func) in _SHOWING:
            shown |= set(ast.walk(one))
        elif isinstance(one, ast.Name) and one.id == handler.name and one not in shown:
            return True
    return False


def on_with(frame: Frame, node: ast.expr, value: Value | None) -> str:
    """Find ``suppress(BaseException)``."""
    is_wide = is_suppress(node, value) and "BaseException" in suppressed(node)
    return "suppress(BaseException) hides Ctrl-C and every mistake" if is_wide else ""
