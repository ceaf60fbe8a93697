"""explicit-call: ``x.__del__()``, after which the destructor runs a second time."""

from __future__ import annotations

import ast

from clean_exit.lint.sites import Site
from clean_exit.lint.values import Super


def on_site(site: Site, node: ast.Call) -> None:
    """Find calls of ``__del__``, but for those by which a destructor calls its base's."""
    func = node.func
    if not isinstance(func, ast.Attribute) or func.attr != "__del__":
        return
    if isinstance(func.value, ast.Call) and ast.unparse(func.value.func) == "super":
        return
    if any(isinstance(value, Super) for value in site.evaluate(func.value)):
        return
    function = site.function
    if function and function.name == "__del__" and node.args:
        first = node.args[0]
        if isinstance(first, ast.Name) and first.id == function.self_name:
            return  # Base.__del__(self), as it was written before there was super().
    what = f"{ast.unparse(func)}() by hand: Python will call it once more"
    site.report("explicit-call", node, what)
