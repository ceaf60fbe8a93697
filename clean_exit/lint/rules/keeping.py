"""finalize-keeps-alive, atexit-keeps-alive: callbacks that refer to an object, which then stays."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from clean_exit.lint.scopes import Class, Function, inside, last_name, passed
from clean_exit.lint.sites import Site
from clean_exit.lint.values import Instance, Super, dotted

_MOST_STEPS = 5


def finalize_keeps_alive(site: Site, node: ast.Call) -> str:
    """Find ``weakref.finalize`` with what cannot go as long as the finalizer is there."""
    if len(node.args) < 2 or not _is_finalize(site, node.func):
        return ""
    said = _how_any(site, node, 1, _Kept.of(node.args[0]))
    target = ast.unparse(node.args[0])
    return f"{target} lives to the end: its finalizer has {said}" if said else ""


def atexit_keeps_alive(site: Site, node: ast.Call) -> str:
    """Find ``atexit.register`` with a method's object, unless the class takes it back."""
    method = site.method
    if not node.args or method is None or method.owner is None or method.self_name is None:
        return ""
    if dotted(site.evaluate(node.func)) != "atexit.register":
        return ""
    is_of_type = any(last_name(base) == "type" for base in method.owner.node.bases[:1])
    if is_of_type or _is_taken_back(method.owner):
        return ""
    said = _how_any(site, node, 0, _Kept.of(ast.Name(method.self_name, ast.Load())))
    return f"{method.self_name} lives to the end: atexit has {said}" if said else ""


def _is_finalize(site: Site, func: ast.expr) -> bool:
    value = site.evaluate(func)
    said = f"{value.module.name}.{value.name}" if isinstance(value, Class) else dotted(value)
    return said == "weakref.finalize"


def _is_taken_back(owner: Class) -> bool:
    """Whether another method than the destructor, which cannot run any more, unregisters."""
    return any(
        isinstance(one, ast.Call) and last_name(one.func) == "unregister"
        for function in owner.methods
        if function.name != "__del__"
        for one in inside(function.node)
    )


@dataclass(frozen=True)
class _Kept:
    """An object by the expression that names it, and the variable that this begins with."""

    said: str
    root: str

    @classmethod
    def of(cls, node: ast.expr) -> _Kept | None:
        """Return what an expression names: a variable, or an attribute of one."""
        inner = node
        while isinstance(inner, ast.Attribute):
            inner = inner.value
        return cls(ast.dump(node), inner.id) if isinstance(inner, ast.Name) else None


def _how_any(site: Site, node: ast.Call, callback: int, kept: _Kept | None) -> str:
    """Say how the callback of a call, or what it is given, refers to an object."""
    given = [*node.args[callback:], *(keyword.value for keyword in node.keywords)]
    found = (_how(site, one, kept, is_callback=one is node.args[callback])
             for one in given if kept)  # fmt: skip
    return next(filter(None, found), "")


def _how(
    site: Site, node: ast.AST, kept: _Kept, depth: int = 0, *, is_callback: bool = False
) -> str:
    """Say how an expression refers to an object; nothing if it does not, as far as is known.

    An attribute that is called is a method, where nothing else is known; one that is only an
    argument is a value.
    """
    if depth > _MOST_STEPS:
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
    if isinstance(node, ast.Name):
        return _variable(site, node, kept, depth)
    if isinstance(node, (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Starred)):
        held = node.values if isinstance(node, ast.Dict) else ast.iter_child_nodes(node)
        return _first(site, held, kept, depth)
    return ""


def _first(site: Site, nodes: Iterable[ast.AST], kept: _Kept, depth: int) -> str:
    return next((said for one in nodes if (said := _how(site, one, kept, depth + 1))), "")


def _variable(site: Site, node: ast.Name, kept: _Kept, depth: int) -> str:
    found = site.evaluator.named(site.scope, node.id)
    if found.kind not in {"local", "closure"}:
        return ""
    for binding in found.bindings:
        if isinstance(binding, Function) and any(
            _closes_over(binding, name) for name in _names(site, kept)
        ):
            return "a closure over it"
        if isinstance(binding, ast.expr) and (said := _how(site, binding, kept, depth + 1)):
            return said
    return ""


def _names(site: Site, kept: _Kept) -> set[str]:
    """Return the variables that are the object, or that hold it: ``me`` after ``me = self``."""
    names = site.function.names if site.function else {}
    return {kept.root} | {
        name
        for name, bound in names.items()
        if any(isinstance(one, ast.expr) and ast.dump(one) == kept.said for one in bound)
    }


def _closes_over(function: Function, name: str, seen: frozenset[str] = frozenset()) -> bool:
    """Whether a function inside of another one uses its variable, itself or by its neighbours."""
    if name in function.local_names or function.parent is None or function.name in seen:
        return False
    names = {n.id for n in ast.walk(function.node) if isinstance(n, ast.Name)}
    if name in names:
        return True
    around = function.parent.names
    return any(
        isinstance(other, Function) and _closes_over(other, name, seen | {function.name})
        for used in names & set(around)
        for other in around[used]
    )


def _is_bound(site: Site, node: ast.Attribute, kept: _Kept, is_callback: bool) -> bool:
    """Whether an attribute is a method that is bound to the object."""
    holder = node.value
    if isinstance(site.evaluate(holder), Super):
        own = ast.Name(site.method.self_name or "", ast.Load()) if site.method else holder
        return ast.dump(own) == kept.said
    if ast.dump(holder) != kept.said:
        # A method of what holds the object, as self.close is for self.pool.
        is_holder = isinstance(holder, ast.Name) and holder.id == kept.root
        return is_holder and _is_method(site, holder, node.attr, sure=True)
    return _is_method(site, holder, node.attr, sure=not is_callback)


def _refers_back(site: Site, holder: ast.expr, kept: _Kept) -> bool:
    """Whether a part was made with the object as an argument, and keeps that as an attribute."""
    made: list[object] = []
    if isinstance(holder, ast.Name):
        made += site.evaluator.named(site.scope, holder.id).bindings
    elif isinstance(holder, ast.Attribute):
        owner = site.evaluate(holder.value)
        if isinstance(owner, Instance):
            set_by = site.evaluator.assignments(owner.cls).get(holder.attr, ())
            made += [stored.value for _, stored in set_by]
    for call in made:
        if not isinstance(call, ast.Call):
            continue
        cls = site.evaluate(call.func)
        found = site.evaluator.method(cls, "__init__") if isinstance(cls, Class) else None
        if not found:
            continue
        given = passed(found, call, bound=True)
        names = {name for name, value in given.items() if ast.dump(value) == kept.said}
        if any(isinstance(one, ast.Assign) and isinstance(one.value, ast.Name)
               and one.value.id in names and isinstance(one.targets[0], ast.Attribute)
               for one in inside(found.node)):  # fmt: skip
            return True
    return False


def _is_method(site: Site, holder: ast.expr, name: str, *, sure: bool) -> bool:
    value = site.evaluate(holder)
    if not isinstance(value, Instance):
        return not sure and not isinstance(value, Class)
    if method := site.evaluator.method(value.cls, name):
        return not (method.is_static or method.is_property or method.is_of_class)
    order, complete = site.evaluator.linear(value.cls)
    known = site.evaluator.member(value.cls, name) or any(
        name in site.evaluator.assignments(cls) for cls in order
    )
    return not (known or complete or sure)
