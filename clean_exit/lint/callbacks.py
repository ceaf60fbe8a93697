"""The rules that apply to any call: ``x.__del__()``, and callbacks that keep an object alive."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from clean_exit.lint.evaluator import Env, Evaluator, Instance, Super, Value, dotted
from clean_exit.lint.scopes import (
    Class,
    Function,
    Module,
    Scope,
    inside,
    lambda_of,
    last_name,
)


@dataclass(frozen=True)
class Site:
    """The place of a call: its scope, and what evaluates expressions there."""

    evaluator: Evaluator
    scope: Scope

    @property
    def function(self) -> Function | None:
        """The function around the call, if there is one."""
        return self.scope if isinstance(self.scope, Function) else None

    @property
    def method(self) -> Function | None:
        """The method around the call, possibly with functions between, if it has an object."""
        function = self.function
        while function and not function.owner:
            function = function.parent
        if function is None or function.name in {"__new__", "__init_subclass__"}:
            return None
        return function if function.self_name and not function.is_of_class else None

    def evaluate(self, node: ast.AST) -> Value | None:
        """Return the value of an expression if it is known."""
        return self.evaluator.evaluate(node, Env(self.scope))


def call_sites(evaluator: Evaluator, module: Module) -> Iterator[tuple[Site, ast.Call]]:
    """Yield every call of a module."""
    scopes: list[tuple[Scope, ast.AST]] = [(module, module.source.tree)]
    scopes += [(one, node) for node, one in module.definitions.items()]
    for scope, top in scopes:
        site = Site(evaluator, scope)
        for node in inside(top):
            if isinstance(node, ast.Call):
                yield site, node
            elif isinstance(node, ast.Lambda):
                scopes.append((lambda_of(node, scope), node))


def explicit_call(site: Site, node: ast.Call) -> str:
    """Find calls of ``__del__``, except the call of the base class's destructor."""
    func, function = node.func, site.function
    if not isinstance(func, ast.Attribute) or func.attr != "__del__":
        return ""
    if isinstance(site.evaluate(func.value), Super):
        return ""
    if function and function.name == "__del__" and node.args:
        first = node.args[0]
        if isinstance(first, ast.Name) and first.id == function.self_name:
            return ""  # Base.__del__(self), the form without super().
    return f"{ast.unparse(func)}() is called explicitly; Python calls it again"


def finalize_keeps_alive(site: Site, node: ast.Call) -> str:
    """Find ``weakref.finalize`` with a callback or argument that refers to the object."""
    if len(node.args) < 2 or not _is_finalize(site, node.func):
        return ""
    target = node.args[0]
    is_named = isinstance(target, (ast.Name, ast.Attribute))
    reference = _reference_in_call(site, node, 1, target) if is_named else ""
    return (
        f"{ast.unparse(target)} is never collected: its finalizer holds {reference}"
        if reference
        else ""
    )


def atexit_keeps_alive(site: Site, node: ast.Call) -> str:
    """Find ``atexit.register`` with a reference to an object whose destructor then runs too late.

    Without a destructor, it is a usual way to end an object that exists once in the program.
    """
    method = site.method
    if not node.args or method is None or method.owner is None or method.self_name is None:
        return ""
    if dotted(site.evaluate(node.func)) != "atexit.register":
        return ""
    if not site.evaluator.method(method.owner, "__del__"):
        return ""
    if _unregisters(method.owner):
        return ""
    target = ast.Name(method.self_name, ast.Load())
    if reference := _reference_in_call(site, node, 0, target):
        return f"the destructor cannot run before exit: atexit holds {reference}"
    return ""


def runs_only_after_exit_callback(evaluator: Evaluator, cls: Class) -> bool:
    """Whether ``__init__`` registers a method of the object at exit, and nothing takes it back.

    The callback keeps the object, so the destructor finds it closed already.
    """
    init = evaluator.method(cls, "__init__")
    if init is None or init.owner is None or _unregisters(init.owner):
        return False
    return any(
        isinstance(node, ast.Call) and bool(atexit_keeps_alive(Site(evaluator, init), node))
        for node in inside(init.node)
    )


RULES: Sequence[tuple[str, Callable[[Site, ast.Call], str]]] = (
    ("explicit-call", explicit_call),
    ("finalize-keeps-alive", finalize_keeps_alive),
    ("atexit-keeps-alive", atexit_keeps_alive),
)


def _is_finalize(site: Site, func: ast.expr) -> bool:
    value = site.evaluate(func)
    name = f"{value.module.name}.{value.name}" if isinstance(value, Class) else dotted(value)
    return name == "weakref.finalize"


def _unregisters(owner: Class) -> bool:
    """Whether a method unregisters; the destructor does not count, as it never runs."""
    return any(
        isinstance(one, ast.Call) and last_name(one.func) == "unregister"
        for function in owner.methods
        if function.name != "__del__"
        for one in inside(function.node)
    )


def _reference_in_call(site: Site, node: ast.Call, callback: int, target: ast.expr) -> str:
    """Describe how the callback of a call, or one of its arguments, refers to an object."""
    arguments = [*node.args[callback:], *(keyword.value for keyword in node.keywords)]
    found = (_reference(site, one, target, one is node.args[callback]) for one in arguments)
    return next(filter(None, found), "")


def _reference(site: Site, node: ast.expr, target: ast.expr, is_callback: bool = False) -> str:
    """Describe how an expression refers to an object, a variable or an attribute of one."""
    if ast.dump(node) == ast.dump(target):
        return "the object itself"
    if isinstance(node, ast.Attribute) and _is_bound_to(site, node, target, is_callback):
        return "a bound method of it"
    if isinstance(node, ast.Call) and last_name(node.func) in {"partial", "MethodType"}:
        inner = [*node.args, *(keyword.value for keyword in node.keywords)]
        held = any(_reference(site, one, target, one is inner[0]) for one in inner)
        return "a partial that contains it" if held else ""
    function: object = None
    if isinstance(node, ast.Lambda):
        function = lambda_of(node, site.scope)
    elif isinstance(node, ast.Name):
        named = site.evaluator.named(site.scope, node.id)
        function = named.bindings[-1] if named.bindings and named.kind != "global" else None
        if isinstance(function, (ast.Attribute, ast.Lambda, ast.Call)):
            return _reference(site, function, target)
    if not isinstance(function, Function) or not (function.parent or function.name == "lambda"):
        return ""
    used = {n.id for part in function.body for n in ast.walk(part) if isinstance(n, ast.Name)}
    if _root(target) in used - function.local_names:
        what = "lambda" if function.name == "lambda" else "closure"
        return f"a {what} that uses it"
    return ""


def _root(node: ast.expr) -> str:
    """Return the variable at the start of a chain of attributes."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return last_name(node)


def _is_bound_to(site: Site, node: ast.Attribute, target: ast.expr, is_callback: bool) -> bool:
    """Whether an attribute is a bound method of the object, or of the object that holds it.

    If nothing else is known, an attribute is a method where it is the callback, and a value where
    it is an argument.
    """
    holder, value = ast.dump(node.value), site.evaluate(node.value)
    is_unknown = is_callback and holder == ast.dump(target)
    if isinstance(value, Super):
        return isinstance(target, ast.Name)
    if holder not in (ast.dump(target), ast.dump(ast.Name(_root(target), ast.Load()))):
        return False
    if not isinstance(value, Instance):
        return is_unknown and not isinstance(value, Class)
    if method := site.evaluator.method(value.cls, node.attr):
        return not (method.is_static or method.is_property or method.is_of_class)
    return is_unknown
