"""explicit-call: ``x.__del__()``, after which the destructor runs a second time."""

from __future__ import annotations

import ast

from clean_exit.lint.sites import Site
from clean_exit.lint.values import Super


def on_site(site: Site, node: ast.Call) -> str:
    """Find calls of ``__del__``, but for those by which a destructor calls its base's."""
    func, function = node.func, site.function
    if not isinstance(func, ast.Attribute) or func.attr != "__del__":
        return ""
    if isinstance(site.evaluate(func.value), Super):
        return ""
    if function and function.name == "__del__" and node.args:
        first = node.args[0]
        if isinstance(first, ast.Name) and first.id == function.self_name:
            return ""  # Base.__del__(self), as it was written before there was super().
    return f"{ast.unparse(func)}() by hand: Python will call it once more"
