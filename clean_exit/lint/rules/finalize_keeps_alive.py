"""finalize-keeps-alive: a finalizer whose callback refers to the object that it waits for."""

from __future__ import annotations

import ast

from clean_exit.lint.rules.keeping import Kept, how
from clean_exit.lint.scopes import Class
from clean_exit.lint.sites import Site
from clean_exit.lint.values import External


def on_site(site: Site, node: ast.Call) -> None:
    """Find ``weakref.finalize`` with what cannot go as long as the finalizer is there."""
    if len(node.args) < 2 or not _is_finalize(site, node.func):
        return
    target = node.args[0]
    kept = Kept.of(target)
    if kept is None:
        return
    callback = node.args[1]
    for part in [*node.args[1:], *(keyword.value for keyword in node.keywords)]:
        if said := how(site, part, kept, is_callback=part is callback):
            what = f"{ast.unparse(target)} lives to the end: its finalizer has {said}"
            site.report("finalize-keeps-alive", node, what)
            return


def _is_finalize(site: Site, func: ast.expr) -> bool:
    return any(
        (isinstance(value, External) and value.dotted == "weakref.finalize")
        or (
            isinstance(value, Class) and value.name == "finalize" and value.module.name == "weakref"
        )
        for value in site.evaluate(func)
    )
