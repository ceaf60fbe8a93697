"""bare-except: handlers that swallow even what ends a program."""

from __future__ import annotations

import ast

from clean_exit.lint.catching import is_suppress, suppressed
from clean_exit.lint.expressions import Expressions
from clean_exit.lint.frames import Frame
from clean_exit.lint.scopes import children, last_name
from clean_exit.lint.values import Values

_SHOWING = {"print", "debug", "info", "warning", "warn", "error", "exception", "critical", "log",
            "write"}  # fmt: skip


def on_statement(visit: Expressions, frame: Frame, node: ast.AST) -> None:
    """Find ``except:`` and ``except BaseException:`` that do not raise again."""
    if not isinstance(node, ast.ExceptHandler):
        return
    kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    names = {last_name(kind) if kind else "BaseException" for kind in kinds}
    catches_all = "BaseException" in names or {"Exception", "KeyboardInterrupt"} <= names
    raises = any(isinstance(one, ast.Raise) for one in children(node.body))
    if catches_all and not raises and not _is_kept(node):
        said = "except:" if node.type is None else f"except {ast.unparse(node.type)}:"
        visit.report("bare-except", node, f"{said} hides Ctrl-C and every mistake", frame)


def _is_kept(handler: ast.ExceptHandler) -> bool:
    """Whether the error is kept or told, other than by printing it."""
    shown: set[int] = set()
    for one in children(handler.body):
        if isinstance(one, ast.Call) and last_name(one.func) in _SHOWING:
            shown |= {id(below) for below in ast.walk(one)}
        elif isinstance(one, ast.Name) and one.id == handler.name and id(one) not in shown:
            return True
    return False


def on_with(visit: Expressions, frame: Frame, node: ast.expr, values: Values) -> None:
    """Find ``suppress(BaseException)``."""
    if is_suppress(node, values) and "BaseException" in suppressed(node):
        what = "suppress(BaseException) hides Ctrl-C and every mistake"
        visit.report("bare-except", node, what, frame)
