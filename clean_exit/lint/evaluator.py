"""Find the values of expressions in the source, without running anything."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Union

from clean_exit.lint.project import Project
from clean_exit.lint.scopes import (
    BUILTINS,
    Assignment,
    Class,
    Function,
    Imported,
    Module,
    Scope,
    assignments_in,
    inside,
    lambda_of,
    last_name,
    mangle,
    module_of,
    unmangle,
)

_PASSING_ON = {"partial", "partialmethod", "staticmethod", "classmethod"}
_TRANSPARENT = {"Optional", "Annotated", "Final", "ClassVar", "Union", "Required", "Self"}
_WITHOUT_MEMBERS = {"object", "Generic", "Protocol", "ABC"}


@dataclass(frozen=True)
class Instance:
    """An object of a class of the project.

    Attributes:
        cls: Its class.
        is_self: Whether it is the object that is destroyed.
        is_new: Whether the code that was followed creates it, so that others may not know it.
    """

    cls: Class
    is_self: bool = False
    is_new: bool = False


@dataclass(frozen=True)
class Bound:
    """A method with its object."""

    function: Function
    receiver: Instance | Class


@dataclass(frozen=True)
class External:
    """A value from outside the project: its dotted name, with ``()`` for the result of a call."""

    dotted: str


@dataclass(frozen=True)
class Super:
    """The result of ``super()``: the members of the classes after one class."""

    receiver: Instance
    after: Class


Value = Union[Module, Class, Function, Instance, Bound, External, Super]  # noqa: UP007
Variables = Mapping[tuple[Scope, str], Value]


@dataclass(frozen=True)
class Env:
    """The environment of an expression.

    Attributes:
        scope: The scope around the expression.
        receiver: The object of the method around it.
        variables: The values of variables that the way there has set, such as arguments.
    """

    scope: Scope
    receiver: Instance | Class | None = None
    variables: Variables = field(default_factory=dict)


@dataclass(frozen=True)
class Named:
    """The bindings of a name.

    Attributes:
        kind: The kind of the scope that binds it.
        scope: The scope that binds it.
        bindings: The definitions, imports and assigned expressions.
    """

    kind: Literal["local", "closure", "class", "global", "builtin", "unknown"]
    scope: Scope
    bindings: tuple[object, ...] = ()


def dotted(value: Value | None) -> str:
    """Return the dotted name of a value from outside the project; "" for other values."""
    return value.dotted if isinstance(value, External) else ""


def is_project_value(value: Value | None) -> bool:
    """Whether a value is defined in the project, so that its source can be read."""
    return isinstance(value, (Class, Function, Instance, Bound))


class Evaluator:
    """Evaluates expressions without running them, and caches base classes and assignments.

    If an expression may have several values, the first known one is used.
    """

    def __init__(self, project: Project) -> None:
        self.project = project
        self._mro: dict[Class, tuple[list[Class], bool]] = {}
        self._assignments: dict[Class, dict[str, list[tuple[Function, Assignment]]]] = {}
        self._busy: set[tuple[object, str]] = set()

    def evaluate(self, node: ast.AST, env: Env) -> Value | None:
        """Return the value of an expression; None if it is not known."""
        if isinstance(node, ast.Name):
            return self._name(node, env)
        if isinstance(node, ast.Attribute):
            base = self.evaluate(node.value, env)
            return self._attribute_of(
                base, mangle(node.attr, getattr(env.scope, "owner", None)), env
            )
        if isinstance(node, ast.Call):
            return self._result(node, env)
        if isinstance(node, ast.Lambda):
            return lambda_of(node, env.scope)
        return None

    # Names

    def named(self, scope: Scope, name: str, seen: frozenset[Module] = frozenset()) -> Named:
        """Return the bindings of a name in a scope.

        Args:
            scope: The scope that uses the name.
            name: The name.
            seen: The modules whose ``import *`` has been followed already.
        """
        here = scope
        while not isinstance(here, Module):
            if isinstance(here, Class):
                if name in here.names:
                    return Named("class", here, tuple(here.names[name]))
                here = here.scope
                continue
            if name in here.local_names:
                bound = tuple(here.names.get(name, ()))
                return Named("local" if here is scope else "closure", here, bound)
            here = here.parent or here.module
        module = module_of(here)
        if name in module.names:
            return Named("global", module, tuple(module.names[name]))
        if name in BUILTINS:
            return Named("builtin", module)
        for star in module.stars:
            source = self.project.find(module, star.module, star.level)
            if source and source not in seen:
                there = self.named(source, name, seen | {module})
                if there.kind == "global" and there.bindings:
                    return there
        return Named("global" if module.stars else "unknown", module)

    def _name(self, node: ast.Name, env: Env) -> Value | None:
        found = self.named(env.scope, node.id)
        if found.kind == "builtin":
            return External(f"builtins.{node.id}")
        key = (found.scope, node.id)
        if key in env.variables:
            return env.variables[key]
        receiver = env.receiver if found.scope is env.scope else None
        if isinstance(found.scope, Function) and node.id in found.scope.all_parameters:
            return self._parameter(found.scope, node.id, receiver)
        if key in self._busy:
            return None  # The name is bound to an expression that uses the name.
        self._busy.add(key)
        try:
            return self._bound(found, Env(found.scope, receiver, env.variables))
        finally:
            self._busy.discard(key)

    def _bound(self, found: Named, env: Env) -> Value | None:
        """Return the first known value of a name."""
        return _first(self._binding(one, env) for one in found.bindings)

    def _binding(self, binding: object, env: Env) -> Value | None:
        if isinstance(binding, (Class, Function)):
            return binding
        if isinstance(binding, Imported):
            return self._imported(module_of(env.scope), binding)
        return self.evaluate(binding, env) if isinstance(binding, ast.expr) else None

    def _parameter(
        self, function: Function, name: str, receiver: Instance | Class | None
    ) -> Value | None:
        """Return the value of a parameter: the object, or by its annotation or default."""
        owner = function.owner
        if owner and name == function.self_name:
            if function.is_of_class or function.name == "__new__":
                return (receiver.cls if isinstance(receiver, Instance) else receiver) or owner
            return receiver if isinstance(receiver, Instance) else Instance(owner)
        outer: Scope = function.owner or function.parent or function.module
        known = self.annotated(function.all_parameters[name].annotation, outer)
        default = function.defaults.get(name)
        return known or (self.evaluate(default, Env(outer)) if default else None)

    # Modules

    def _imported(self, module: Module, imported: Imported) -> Value | None:
        source = self.project.find(module, imported.module, imported.level)
        if imported.name is None:
            return source or External(imported.module)
        if source:
            return self._of_module(source, imported.name)
        return None if imported.level else External(f"{imported.module}.{imported.name}")

    def _of_module(self, module: Module, name: str) -> Value | None:
        """Return the value of a name in a module, or the submodule of that name."""
        key = (module, name)
        if key in self._busy:
            return None  # Two modules import the name from each other.
        self._busy.add(key)
        try:
            is_own = name in module.names or not module.is_package
            below = None if is_own else self.project.find(module, name, 1)
            found = self.named(module, name)
            known: Value | None = below
            if below is None and found.kind == "global":
                known = self._bound(found, Env(module))
        finally:
            self._busy.discard(key)
        return known

    # Classes and their objects

    def mro(self, cls: Class) -> tuple[list[Class], bool]:
        """Return a class and its bases in method resolution order, and whether all are known."""
        if cls not in self._mro:
            self._mro[cls] = ([cls], False)  # Ends the recursion if a class is its own base.
            orders, complete = [], True
            for base in cls.node.bases:
                plain = base.value if isinstance(base, ast.Subscript) else base
                known = self.evaluate(plain, Env(cls.outer or cls.scope))
                if isinstance(known, Class) and known is not cls:
                    order, whole = self.mro(known)
                    orders.append(order)
                    complete = complete and whole
                elif last_name(plain) not in _WITHOUT_MEMBERS:
                    complete = False
            self._mro[cls] = ([cls, *_merge(orders)], complete)
        return self._mro[cls]

    def member(
        self, cls: Class, name: str, after: Class | None = None
    ) -> tuple[Class, object] | None:
        """Find a member, a function or an expression, and the class that defines it.

        Args:
            cls: The class.
            name: The name, as Python stores it.
            after: Search only the classes after this one, as ``super()`` does.
        """
        order, _ = self.mro(cls)
        if after is not None:
            order = order[order.index(after) + 1 :] if after in order else []
        for one in order:
            if (plain := unmangle(name, one)) in one.members:
                return one, one.members[plain]
        return None

    def method(self, cls: Class, name: str) -> Function | None:
        """Find a method of a class, its own or an inherited one."""
        found = self.member(cls, name)
        return found[1] if found and isinstance(found[1], Function) else None

    def assignments(self, cls: Class) -> dict[str, list[tuple[Function, Assignment]]]:
        """Return the assignments to each attribute in the class's own methods."""
        if cls not in self._assignments:
            found: dict[str, list[tuple[Function, Assignment]]] = {}
            for function in cls.methods:
                for node in inside(function.node):
                    for one in assignments_in(node, function):
                        found.setdefault(one.name, []).append((function, one))
            self._assignments[cls] = found
        return self._assignments[cls]

    def _attribute_of(self, base: Value | None, name: str, env: Env) -> Value | None:
        if isinstance(base, Module):
            return self._of_module(base, name)
        if isinstance(base, External):
            return External(f"{base.dotted}.{name}")
        if isinstance(base, Instance):
            return base.cls if name == "__class__" else self._attribute(base, name)
        if not isinstance(base, (Class, Super)):
            return None
        if isinstance(base, Class):
            found = self.member(base, name)
        else:
            found = self.member(base.receiver.cls, name, base.after)
        if found is None and isinstance(base, Class):  # What a class method sets.
            return self._attribute(Instance(base), name)
        owner, value = found or (None, None)
        if isinstance(value, Function):
            return self._bind(value, base if isinstance(base, Class) else base.receiver)
        return self.evaluate(value, Env(owner)) if owner and isinstance(value, ast.expr) else None

    def _attribute(self, receiver: Instance, name: str) -> Value | None:
        """Return the value of an object's attribute: by an assignment, else by its annotation."""
        cls, key = receiver.cls, (receiver.cls, name)
        owner, found = self.member(cls, name) or (cls, None)
        if isinstance(found, Function):
            return self._bind(found, receiver)
        if key in self._busy:
            return None
        self._busy.add(key)
        try:
            for one in self.mro(cls)[0]:
                for function, assignment in self.assignments(one).get(name, ()):
                    env = Env(function, receiver)
                    known = self.evaluate(assignment.value, env) if assignment.value else None
                    known = known or self.annotated(assignment.annotation, function)
                    if known:
                        return known
                if known := self.annotated(one.annotations.get(name), one):
                    return known
            is_value = isinstance(found, ast.expr)
            return self.evaluate(found, Env(owner)) if is_value else None  # type: ignore[arg-type]
        finally:
            self._busy.discard(key)

    def _bind(self, function: Function, receiver: Instance | Class) -> Value | None:
        if function.is_of_class:
            return Bound(function, receiver.cls if isinstance(receiver, Instance) else receiver)
        is_method = isinstance(receiver, Instance) and not function.is_static
        return Bound(function, receiver) if is_method else function

    # Annotations and calls

    def annotated(self, node: ast.expr | None, scope: Scope) -> Value | None:
        """Return an object of the annotated class."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                node = ast.parse(node.value, mode="eval").body
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                return None
        parts: list[ast.expr] = []
        if isinstance(node, ast.BinOp):
            parts = [node.left, node.right]
        elif isinstance(node, ast.Subscript):
            inner, name = node.slice, last_name(node.value)
            parts = list(inner.elts) if isinstance(inner, ast.Tuple) else [inner]
            parts = parts[:1] if name == "Annotated" else parts
            parts = parts if name in _TRANSPARENT else [node.value]
        elif isinstance(node, (ast.Name, ast.Attribute)):
            value = self.evaluate(node, Env(scope))
            if isinstance(value, External) and not value.dotted.startswith("builtins."):
                return External(f"{value.dotted}()")
            return Instance(value) if isinstance(value, Class) else None
        return _first(self.annotated(one, scope) for one in parts)

    def _returned(self, function: Function) -> Value | None:
        """Return the value of a call by the return annotation of the function."""
        return self.annotated(getattr(function.node, "returns", None), function.module)

    def _result(self, node: ast.Call, env: Env) -> Value | None:
        """Return the value of a call."""
        name, first = last_name(node.func), node.args[0] if node.args else None
        if name == "super" and isinstance(node.func, ast.Name):
            method = env.scope if isinstance(env.scope, Function) else None
            while method and not method.owner:
                method = method.parent
            if method is None or method.owner is None:
                return None
            known = env.receiver if isinstance(env.receiver, Instance) else Instance(method.owner)
            return Super(known, method.owner)
        if first is not None and name in _PASSING_ON:
            return self.evaluate(first, env)
        if first is not None and name == "type" and len(node.args) == 1:
            of = self.evaluate(first, env)
            return of.cls if isinstance(of, Instance) else None
        if name == "getattr" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            read = ast.Attribute(node.args[0], str(node.args[1].value), ast.Load())
            return self.evaluate(read, env)
        called = self.evaluate(node.func, env)
        if isinstance(called, Class):
            return Instance(called, is_new=True)
        if isinstance(called, External):
            return External(f"{called.dotted}()")
        function = called.function if isinstance(called, Bound) else called
        return self._returned(function) if isinstance(function, Function) else None


def _first(values: Iterable[Value | None]) -> Value | None:
    return next((value for value in values if value is not None), None)


def _merge(orders: list[list[Class]]) -> list[Class]:
    """Merge the orders of the bases: a class that several bases share comes after all of them."""
    every = [cls for order in orders for cls in order]
    return [cls for at, cls in enumerate(every) if cls not in every[at + 1 :]]
