"""atexit-keeps-alive: an exit callback that refers to an object, which then never goes earlier."""

from __future__ import annotations

import ast

from clean_exit.lint.rules.keeping import Kept, how
from clean_exit.lint.scopes import inside, last_name
from clean_exit.lint.sites import Site
from clean_exit.lint.values import External


def on_site(site: Site, node: ast.Call) -> None:
    """Find ``atexit.register`` with a method's object, unless the class takes it back."""
    if not node.args or not (isinstance(node.func, ast.Name) or last_name(node.func) == "register"):
        return
    if External("atexit.register") not in site.evaluate(node.func):
        return
    method = site.method
    if method is None or method.owner is None or method.self_name is None:
        return
    if last_name(method.owner.node.bases[0] if method.owner.node.bases else node) == "type":
        return
    kept = Kept.of(ast.Name(method.self_name, ast.Load()))
    if kept is None or _is_taken_back(site):
        return
    callback = node.args[0]
    for part in [*node.args, *(keyword.value for keyword in node.keywords)]:
        if said := how(site, part, kept, is_callback=part is callback):
            what = f"{method.self_name} lives to the end: atexit has {said}"
            site.report("atexit-keeps-alive", node, what)
            return


def _is_taken_back(site: Site) -> bool:
    """Whether another method than the destructor, which cannot run any more, unregisters."""
    owner = site.method.owner if site.method else None
    return owner is not None and any(
        isinstance(one, ast.Call) and last_name(one.func) == "unregister"
        for name, function in owner.members.items()
        if name != "__del__"
        for one in inside(function.node)
    )
