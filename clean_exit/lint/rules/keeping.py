"""Whether an exit callback or a finalizer refers to an object, and so keeps it alive."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from clean_exit.lint.arguments import match_arguments
from clean_exit.lint.scopes import Class, Function, inside, last_name
from clean_exit.lint.sites import Site
from clean_exit.lint.values import Instance, Super

_DEEPEST = 5


@dataclass(frozen=True)
class Kept:
    """An object by the expression that names it, and the variable that this begins with."""

    said: str
    root: str

    @classmethod
    def of(cls, node: ast.expr) -> Kept | None:
        """Return what an expression names: a variable, or an attribute of one."""
        inner = node
        while isinstance(inner, ast.Attribute):
            inner = inner.value
        return cls(ast.dump(node), inner.id) if isinstance(inner, ast.Name) else None


def how(
    site: Site, node: ast.expr, kept: Kept, depth: int = 0, *, is_callback: bool = False
) -> str:
    """Say how an expression refers to an object; nothing if it does not, as far as is known.

    An attribute that is called is a method, where nothing else is known; one that is only an
    argument is a value.
    """
    if depth > _DEEPEST:
        return ""
    if ast.dump(node) == kept.said:
        return "the object itself"
    if isinstance(node, ast.Attribute):
        if _is_bound(site, node, kept, is_callback):
            return "a bound method of it"
        back = _refers_back(site, node.value, kept)
        is_method = back and _is_method(site, node.value, node.attr, sure=True)
        return "a bound method of what refers to it" if is_method else ""
    if isinstance(node, ast.Lambda):
        names = {n.id for n in ast.walk(node.body) if isinstance(n, ast.Name)}
        given = node.args
        own = {one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
        if _names(site, kept) & (names - own):
            return "a lambda over it"
        defaults = [one for one in (*given.defaults, *given.kw_defaults) if one]
        return _first(site, defaults, kept, depth)
    if isinstance(node, ast.Call) and last_name(node.func) in {"partial", "MethodType"}:
        inner = [*node.args, *(keyword.value for keyword in node.keywords)]
        return "a partial with it" if _first(site, inner, kept, depth) else ""
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return _first(site, node.elts, kept, depth)
    if isinstance(node, ast.Dict):
        return _first(site, node.values, kept, depth)
    if isinstance(node, ast.Starred):
        return how(site, node.value, kept, depth + 1)
    if isinstance(node, ast.Name):
        return _variable(site, node, kept, depth)
    return ""


def _first(site: Site, nodes: list[ast.expr], kept: Kept, depth: int) -> str:
    return next((said for one in nodes if (said := how(site, one, kept, depth + 1))), "")


def _variable(site: Site, node: ast.Name, kept: Kept, depth: int) -> str:
    found = site.evaluator.named(site.scope, node.id)
    if found.kind not in {"local", "closure"}:
        return ""
    for binding in found.bindings:
        if isinstance(binding, Function) and any(
            _closes_over(binding, name) for name in _names(site, kept)
        ):
            return "a closure over it"
        if isinstance(binding, ast.expr) and (said := how(site, binding, kept, depth + 1)):
            return said
    return ""


def _names(site: Site, kept: Kept) -> set[str]:
    """Return the variables that are the object, or that hold it: ``me`` after ``me = self``."""
    scope = site.scope
    if not isinstance(scope, Function):
        return {kept.root}
    also = (
        name
        for name, bindings in scope.names.items()
        if any(isinstance(one, ast.expr) and ast.dump(one) == kept.said for one in bindings)
    )
    return {kept.root, *also}


def _closes_over(function: Function, name: str, seen: frozenset[str] = frozenset()) -> bool:
    """Whether a function inside of another one uses its variable, itself or by its neighbours."""
    if name in function.local_names or function.parent is None or function.name in seen:
        return False
    names = {n.id for n in ast.walk(function.node) if isinstance(n, ast.Name)}
    default = {n.id for d in function.defaults.values() for n in [d] if isinstance(n, ast.Name)}
    if name in names or name in default:
        return not _only_early(function, name, default)
    around = function.parent.names
    return any(
        isinstance(other, Function) and _closes_over(other, name, seen | {function.name})
        for used in names & set(around)
        for other in around[used]
    )


def _only_early(function: Function, name: str, default: set[str]) -> bool:
    """Whether a name is used in defaults alone, and there only to read something of it."""
    body = function.node.body if isinstance(function.node.body, list) else [function.node.body]
    used = any(isinstance(n, ast.Name) and n.id == name for one in body for n in ast.walk(one))
    return not used and name not in default


def _is_bound(site: Site, node: ast.Attribute, kept: Kept, is_callback: bool) -> bool:
    """Whether an attribute is a method that is bound to the object."""
    holder = node.value
    if any(isinstance(value, Super) for value in site.evaluate(holder)):
        own = ast.Name(site.method.self_name or "", ast.Load()) if site.method else holder
        return ast.dump(own) == kept.said
    if ast.dump(holder) != kept.said:
        # A method of what holds the object, as self.close is for self.pool.
        is_holder = isinstance(holder, ast.Name) and holder.id == kept.root
        return is_holder and _is_method(site, holder, node.attr, sure=True)
    return _is_method(site, holder, node.attr, sure=not is_callback)


def _refers_back(site: Site, holder: ast.expr, kept: Kept) -> bool:
    """Whether a part was made with the object as an argument, and keeps that as an attribute."""
    made: list[object] = []
    if isinstance(holder, ast.Name):
        made += site.evaluator.named(site.scope, holder.id).bindings
    elif isinstance(holder, ast.Attribute):
        for owner in site.evaluate(holder.value):
            if isinstance(owner, Instance):
                set_by = site.evaluator.assignments(owner.cls).get(holder.attr, ())
                made += [getattr(by, "value", None) for _, by in set_by]
    for call in made:
        if not isinstance(call, ast.Call):
            continue
        for cls in site.evaluate(call.func):
            found = site.evaluator.member(cls, "__init__") if isinstance(cls, Class) else None
            if not found or not isinstance(found[1], Function):
                continue
            given = match_arguments(found[1], call, bound=True)
            names = {name for name, value in given.items() if ast.dump(value) == kept.said}
            if any(isinstance(one, ast.Assign) and isinstance(one.value, ast.Name)
                   and one.value.id in names and isinstance(one.targets[0], ast.Attribute)
                   for one in inside(found[1].node)):  # fmt: skip
                return True
    return False


def _is_method(site: Site, holder: ast.expr, name: str, *, sure: bool) -> bool:
    values = site.evaluate(holder)
    for value in values:
        if isinstance(value, Class):
            return False
        if not isinstance(value, Instance):
            continue
        found = site.evaluator.member(value.cls, name)
        if found and isinstance(found[1], Function):
            method = found[1]
            return not (
                method.is_static or method.is_property or "classmethod" in method.decorators
            )
        order, complete = site.evaluator.linear(value.cls)
        assigned = any(name in site.evaluator.assignments(cls) for cls in order)
        return not (found or assigned or complete or sure)
    return not sure
