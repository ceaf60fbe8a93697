"""import: an import that a destructor reaches."""

from __future__ import annotations

import ast

from clean_exit.lint.expressions import Expressions
from clean_exit.lint.frames import Frame
from clean_exit.lint.values import External, Values

_DOTTED = {"importlib.import_module", "importlib.__import__", "importlib.reload",
           "builtins.__import__", "importlib.util.find_spec"}  # fmt: skip


def on_statement(visit: Expressions, frame: Frame, node: ast.AST) -> None:
    """Find import statements.

    A handler around them makes no difference: what they are for is not done all the same.
    """
    if frame.facts.alive or not isinstance(node, (ast.Import, ast.ImportFrom)):
        return
    if isinstance(node, ast.ImportFrom):
        what = f"import {'.' * node.level}{node.module or ''}"
    else:
        what = "import " + ", ".join(alias.name for alias in node.names)
    visit.report("import", node, what, frame)


def on_call(visit: Expressions, frame: Frame, node: ast.Call, values: Values) -> None:
    """Find imports by function."""
    for value in values:
        if isinstance(value, External) and value.dotted in _DOTTED and not frame.facts.alive:
            name = ast.unparse(node.args[0]) if node.args else ""
            visit.report("import", node, f"import by {value.dotted}({name})", frame)
