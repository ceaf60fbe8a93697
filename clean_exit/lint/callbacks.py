"""The rules that apply to any call: ``x.__del__()``, and callbacks that keep an object alive."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
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

_MAX_STEPS = 5


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
    """Yield every call of a module; a decorator is a call with the decorated function."""
    scopes: list[tuple[Scope, ast.AST]] = [(module, module.source.tree)]
    scopes += [(one, node) for node, one in module.definitions.items()]
    for scope, top in scopes:
        site = Site(evaluator, scope)
        for node in inside(top):
            if isinstance(node, ast.Call):
                yield site, node
            elif isinstance(node, ast.Lambda):
                scopes.append((lambda_of(node, scope), node))
            elif isinstance(node, ast.FunctionDef) and not isinstance(scope, Class):
                for decorator in node.decorator_list:
                    decorated = ast.copy_location(ast.Name(node.name, ast.Load()), decorator)
                    yield site, ast.copy_location(ast.Call(decorator, [decorated], []), decorator)


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
    reference = _reference_in_call(site, node, 1, _Target.of(node.args[0]))
    target = ast.unparse(node.args[0])
    return f"{target} is never collected: its finalizer holds {reference}" if reference else ""


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
    is_metaclass = any(last_name(base) == "type" for base in method.owner.node.bases[:1])
    if is_metaclass or _unregisters(method.owner):
        return ""
    target = _Target.of(ast.Name(method.self_name, ast.Load()))
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


@dataclass(frozen=True)
class _Target:
    """The object that must not stay alive: the dump of its expression, and the first variable."""

    dump: str
    root: str

    @classmethod
    def of(cls, node: ast.expr) -> _Target | None:
        """Return the target of a variable, or of an attribute of one."""
        inner = node
        while isinstance(inner, ast.Attribute):
            inner = inner.value
        return cls(ast.dump(node), inner.id) if isinstance(inner, ast.Name) else None


def _reference_in_call(site: Site, node: ast.Call, callback: int, target: _Target | None) -> str:
    """Describe how the callback of a call, or one of its arguments, refers to an object."""
    arguments = [*node.args[callback:], *(keyword.value for keyword in node.keywords)]
    found = (_reference(site, one, target, is_callback=one is node.args[callback])
             for one in arguments if target)  # fmt: skip
    return next(filter(None, found), "")


def _reference(
    site: Site, node: ast.AST, target: _Target, depth: int = 0, *, is_callback: bool = False
) -> str:
    """Describe how an expression refers to an object; "" if no reference is known.

    If nothing else is known, an attribute is a method where it is the callback, and a value where
    it is an argument.
    """
    if depth > _MAX_STEPS:
        return ""
    if ast.dump(node) == target.dump:
        return "the object itself"
    if isinstance(node, ast.Attribute):
        if _is_bound_to(site, node, target, is_callback):
            return "a bound method of it"
        return ""
    if isinstance(node, ast.Lambda):
        function = lambda_of(node, site.scope)
        used = {n.id for n in ast.walk(node.body) if isinstance(n, ast.Name)}
        if _names(site, target) & (used - set(function.all_parameters)):
            return "a lambda that uses it"
        return _first_reference(site, function.defaults.values(), target, depth)
    if isinstance(node, ast.Call) and last_name(node.func) in {"partial", "MethodType"}:
        inner = [*node.args, *(keyword.value for keyword in node.keywords)]
        return "a partial that contains it" if _first_reference(site, inner, target, depth) else ""
    if isinstance(node, ast.Name):
        return _variable(site, node, target, depth)
    if isinstance(node, (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Starred)):
        held = node.values if isinstance(node, ast.Dict) else ast.iter_child_nodes(node)
        return _first_reference(site, held, target, depth)
    return ""


def _first_reference(site: Site, nodes: Iterable[ast.AST], target: _Target, depth: int) -> str:
    return next(filter(None, (_reference(site, one, target, depth + 1) for one in nodes)), "")


def _variable(site: Site, node: ast.Name, target: _Target, depth: int) -> str:
    found = site.evaluator.named(site.scope, node.id)
    if found.kind not in {"local", "closure"}:
        return ""
    for binding in found.bindings:
        if isinstance(binding, Function) and any(
            _closes_over(binding, name) for name in _names(site, target)
        ):
            return "a closure that uses it"
        if isinstance(binding, ast.expr) and (
            reference := _reference(site, binding, target, depth + 1)
        ):
            return reference
    return ""


def _names(site: Site, target: _Target) -> set[str]:
    """Return the variables that hold the object: ``me`` after ``me = self``."""
    names = site.function.names if site.function else {}
    return {target.root} | {
        name
        for name, bound in names.items()
        if any(isinstance(one, ast.expr) and ast.dump(one) == target.dump for one in bound)
    }


def _closes_over(function: Function, name: str, seen: frozenset[str] = frozenset()) -> bool:
    """Whether an inner function uses a variable of the outer one, or calls one that does."""
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


def _is_bound_to(site: Site, node: ast.Attribute, target: _Target, is_callback: bool) -> bool:
    """Whether an attribute is a bound method of the object."""
    holder = node.value
    if isinstance(site.evaluate(holder), Super):
        own = ast.Name(site.method.self_name or "", ast.Load()) if site.method else holder
        return ast.dump(own) == target.dump
    if ast.dump(holder) != target.dump:
        # A method of the object that holds the target, as self.close does for self.pool.
        is_holder = isinstance(holder, ast.Name) and holder.id == target.root
        return is_holder and _is_method(site, holder, node.attr, sure=True)
    return _is_method(site, holder, node.attr, sure=not is_callback)


def _is_method(site: Site, holder: ast.expr, name: str, *, sure: bool) -> bool:
    value = site.evaluate(holder)
    if not isinstance(value, Instance):
        return not sure and not isinstance(value, Class)
    if method := site.evaluator.method(value.cls, name):
        return not (method.is_static or method.is_property or method.is_of_class)
    order, complete = site.evaluator.mro(value.cls)
    known = site.evaluator.member(value.cls, name) or any(
        name in site.evaluator.assignments(cls) for cls in order
    )
    return not (known or complete or sure)
