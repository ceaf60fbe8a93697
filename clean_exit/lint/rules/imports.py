"""import: an import that a destructor reaches."""

from __future__ import annotations

import ast

from clean_exit.lint.frames import Frame
from clean_exit.lint.values import Value, dotted

_DOTTED = {"importlib.import_module", "importlib.__import__", "importlib.reload",
           "builtins.__import__", "importlib.util.find_spec"}  # fmt: skip


def on_statement(frame: Frame, node: ast.AST) -> str:
    """Find import statements.

    A handler around them makes no difference: what they are for is not done all the same.
    """
    if frame.facts.alive or not isinstance(node, (ast.Import, ast.ImportFrom)):
        return ""
    if isinstance(node, ast.ImportFrom):
        return f"import {'.' * node.level}{node.module or ''}"
    return "import " + ", ".join(alias.name for alias in node.names)


def on_call(frame: Frame, node: ast.Call, value: Value | None) -> str:
    """Find imports by function."""
    if dotted(value) not in _DOTTED or frame.facts.alive:
        return ""
    return f"import by {dotted(value)}({ast.unparse(node.args[0]) if node.args else ''})"
