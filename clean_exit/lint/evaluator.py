"""Says what an expression is, as far as its source tells, without running anything."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import replace

from clean_exit.lint.attributes import Stored, mangle, stores, unmangle
from clean_exit.lint.project import Project
from clean_exit.lint.scopes import (
    BUILTINS,
    Class,
    Function,
    Imported,
    Module,
    Scope,
    inside,
    lambda_of,
    last_name,
    module_of,
)
from clean_exit.lint.values import Bound, Env, External, Instance, Named, Super, Value

_MOST_STEPS = 12
_PASSING_ON = {"partial", "partialmethod", "staticmethod", "classmethod"}
_TRANSPARENT = {"Optional", "Annotated", "Final", "ClassVar", "Union", "Required", "Self"}
_WITHOUT_MEMBERS = {"object", "Generic", "Protocol", "ABC"}


class Evaluator:
    """Evaluates expressions without running them; remembers base classes and assignments.

    Where an expression may be several things, the first that is known is taken.
    """

    def __init__(self, project: Project) -> None:
        self.project = project
        self._linear: dict[Class, tuple[list[Class], bool]] = {}
        self._assignments: dict[Class, dict[str, list[tuple[Function, Stored]]]] = {}
        self._busy: set[tuple[object, str]] = set()

    def evaluate(self, node: ast.AST, env: Env) -> Value | None:
        """Return what an expression is; None if that is not known."""
        if env.depth > _MOST_STEPS:
            return None
        env = replace(env, depth=env.depth + 1)
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
        if isinstance(node, ast.Starred):
            return self._element(node.value, env)
        parts: Iterable[ast.expr] = ()
        if isinstance(node, (ast.NamedExpr, ast.Await)):
            parts = [node.value]
        elif isinstance(node, ast.BoolOp):
            parts = node.values
        elif isinstance(node, ast.IfExp):
            parts = [node.body, node.orelse]
        return _first(self.evaluate(one, env) for one in parts)

    # Names

    def named(self, scope: Scope, name: str, seen: frozenset[Module] = frozenset()) -> Named:
        """Say what binds a name that is used in a scope; `seen` are modules on the way there."""
        here = scope
        while not isinstance(here, Module):
            if isinstance(here, Class):
                if name in here.names:
                    return Named("class", here, tuple(here.names[name]))
                here = here.scope
                continue
            if name in here.declared_global:
                break
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
        if key in env.given:
            return env.given[key]
        receiver = env.receiver if found.scope is env.scope else None
        if isinstance(found.scope, Function) and node.id in found.scope.all_parameters:
            return self._parameter(found.scope, node.id, receiver, env.depth)
        if key in self._busy:
            return None  # It is bound to something that is made of it.
        self._busy.add(key)
        try:
            return self._bound(found, Env(found.scope, receiver, env.depth + 1, env.given))
        finally:
            self._busy.discard(key)

    def _bound(self, found: Named, env: Env) -> Value | None:
        """Return the first of a name's bindings that is known."""
        return _first(self._binding(one, env) for one in found.bindings)

    def _binding(self, binding: object, env: Env) -> Value | None:
        if isinstance(binding, (Class, Function)):
            return binding
        if isinstance(binding, Imported):
            return self._imported(module_of(env.scope), binding)
        return self.evaluate(binding, env) if isinstance(binding, ast.expr) else None

    def _parameter(
        self, function: Function, name: str, receiver: Instance | Class | None, depth: int
    ) -> Value | None:
        """Return what a parameter is: the object, of its annotation's class, its default."""
        owner = function.owner
        if owner and name == function.self_name:
            if function.is_of_class or function.name == "__new__":
                return (receiver.cls if isinstance(receiver, Instance) else receiver) or owner
            return receiver if isinstance(receiver, Instance) else Instance(owner)
        outer: Scope = function.owner or function.parent or function.module
        known = self.annotated(function.all_parameters[name].annotation, outer, depth + 1)
        default = function.defaults.get(name)
        return known or (self.evaluate(default, Env(outer, None, depth + 1)) if default else None)

    # Modules

    def _imported(self, module: Module, imported: Imported) -> Value | None:
        source = self.project.find(module, imported.module, imported.level)
        if imported.name is None:
            return source or External(imported.module)
        if source:
            return self._of_module(source, imported.name)
        if imported.level:  # from . import name, without an __init__.py
            nothing = bool(imported.module)
            return None if nothing else self.project.find(module, imported.name, imported.level)
        return External(f"{imported.module}.{imported.name}")

    def _of_module(self, module: Module, name: str) -> Value | None:
        """Return what a module binds a name to, or a module below it."""
        key = (module, name)
        if key in self._busy:
            return None  # Two modules that import each other's names.
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
        bound = module.names.get(name, ())
        if known or not module.name or not all(isinstance(one, Imported) for one in bound):
            return known
        return External(f"{module.name}.{name}")

    # Classes and their objects

    def linear(self, cls: Class) -> tuple[list[Class], bool]:
        """Return a class and its bases in the order of lookup, and whether all are known."""
        if cls not in self._linear:
            self._linear[cls] = ([cls], False)  # For a class that is its own base, by mistake.
            orders, complete = [], True
            for base in cls.node.bases:
                plain = base.value if isinstance(base, ast.Subscript) else base
                known = self.evaluate(plain, Env(cls.outer or cls.scope))
                if isinstance(known, Class) and known is not cls:
                    order, whole = self.linear(known)
                    orders.append(order)
                    complete = complete and whole
                elif last_name(plain) not in _WITHOUT_MEMBERS:
                    complete = False
            self._linear[cls] = ([cls, *_merge(orders)], complete)
        return self._linear[cls]

    def member(
        self, cls: Class, name: str, after: Class | None = None
    ) -> tuple[Class, object] | None:
        """Find what a class has by a name, in itself or its bases: a function or an expression."""
        order, _ = self.linear(cls)
        if after is not None:
            order = order[order.index(after) + 1 :] if after in order else []
        for one in order:
            if (plain := unmangle(name, one)) in one.members:
                return one, one.members[plain]
        return None

    def method(self, cls: Class, name: str) -> Function | None:
        """Find a method of a class, its own or inherited."""
        found = self.member(cls, name)
        return found[1] if found and isinstance(found[1], Function) else None

    def assignments(self, cls: Class) -> dict[str, list[tuple[Function, Stored]]]:
        """Return, for each attribute, where the class's own methods set it."""
        if cls not in self._assignments:
            found: dict[str, list[tuple[Function, Stored]]] = {}
            for function in cls.methods:
                for node in inside(function.node):
                    for one in stores(node, function):
                        found.setdefault(one.name, []).append((function, one))
            self._assignments[cls] = found
        return self._assignments[cls]

    def _attribute_of(self, base: Value | None, name: str, env: Env) -> Value | None:
        if isinstance(base, Module):
            return self._of_module(base, name)
        if isinstance(base, External):
            return External(f"{base.dotted}.{name}")
        if isinstance(base, Instance):
            return base.cls if name == "__class__" else self._attribute(base, name, env.depth)
        if not isinstance(base, (Class, Super)):
            return None
        if isinstance(base, Class):
            found = self.member(base, name)
        else:
            found = self.member(base.receiver.cls, name, base.after)
        owner, value = found or (None, None)
        if isinstance(value, Function):
            return self._bind(value, base if isinstance(base, Class) else base.receiver)
        return self.evaluate(value, Env(owner)) if owner and isinstance(value, ast.expr) else None

    def _attribute(self, receiver: Instance, name: str, depth: int) -> Value | None:
        """Return what an attribute of an object is: what it is set to, before its annotation."""
        cls, key = receiver.cls, (receiver.cls, name)
        owner, found = self.member(cls, name) or (cls, None)
        if isinstance(found, Function):
            return self._bind(found, receiver)
        if key in self._busy or depth > _MOST_STEPS:
            return None
        self._busy.add(key)
        try:
            for one in self.linear(cls)[0]:
                for function, stored in self.assignments(one).get(name, ()):
                    env = Env(function, receiver, depth + 1)
                    known = self.evaluate(stored.value, env) if stored.value else None
                    known = known or self.annotated(stored.annotation, function, depth + 1)
                    if known:
                        return known
                if known := self.annotated(one.annotations.get(name), one, depth + 1):
                    return known
            is_value = isinstance(found, ast.expr)
            return self.evaluate(found, Env(owner, None, depth + 1)) if is_value else None  # type: ignore[arg-type]
        finally:
            self._busy.discard(key)

    def _bind(self, function: Function, receiver: Instance | Class) -> Value | None:
        if function.is_property:
            return self._returned(function, 1)
        if function.is_of_class:
            return Bound(function, receiver.cls if isinstance(receiver, Instance) else receiver)
        is_method = isinstance(receiver, Instance) and not function.is_static
        return Bound(function, receiver) if is_method else function

    # Annotations and calls

    def annotated(self, node: ast.expr | None, scope: Scope, depth: int = 0) -> Value | None:
        """Return an object of the class that an annotation names."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                node = ast.parse(node.value, mode="eval").body
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                return None
        if depth > _MOST_STEPS:
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
            value = self.evaluate(node, Env(scope, None, depth + 1))
            if isinstance(value, External) and not value.dotted.startswith("builtins."):
                return External(f"{value.dotted}()")
            return Instance(value) if isinstance(value, Class) else None
        return _first(self.annotated(one, scope, depth + 1) for one in parts)

    def _element(self, node: ast.expr, env: Env) -> Value | None:
        """Return an element of a display, or of what is annotated ``list[C]``."""
        if isinstance(node, (ast.Tuple, ast.List)):
            return _first(self.evaluate(one, env) for one in node.elts)
        said: list[tuple[ast.expr | None, Scope]] = []
        if isinstance(node, ast.Name) and isinstance(env.scope, Function):
            parameter = env.scope.all_parameters.get(node.id)
            said = [(parameter.annotation, env.scope.module)] if parameter else []
        elif isinstance(node, ast.Attribute):
            base = self.evaluate(node.value, env)
            for cls in self.linear(base.cls)[0] if isinstance(base, Instance) else ():
                set_by = self.assignments(cls).get(node.attr, ())
                said.append((cls.annotations.get(node.attr), cls))
                said += [(stored.annotation, function) for function, stored in set_by]
        held = [(one.slice, scope) for one, scope in said if isinstance(one, ast.Subscript)]
        parts = [
            (one.elts[-1] if isinstance(one, ast.Tuple) else one, scope) for one, scope in held
        ]
        return _first(self.annotated(one, scope, env.depth) for one, scope in parts)

    def _returned(self, function: Function, depth: int) -> Value | None:
        """Return what the annotation of a function's result allows."""
        return self.annotated(getattr(function.node, "returns", None), function.module, depth)

    def _result(self, node: ast.Call, env: Env) -> Value | None:
        """Return what a call gives."""
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
        if first is not None and name == "cast" and len(node.args) == 2:
            return self.annotated(first, env.scope, env.depth)
        if name == "getattr" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            read = ast.Attribute(node.args[0], str(node.args[1].value), ast.Load())
            return self.evaluate(read, env)
        called = self.evaluate(node.func, env)
        if isinstance(called, Class):
            return Instance(called)
        if isinstance(called, External):
            return External(f"{called.dotted}()")
        function = called.function if isinstance(called, Bound) else called
        return self._returned(function, env.depth) if isinstance(function, Function) else None


def _first(values: Iterable[Value | None]) -> Value | None:
    return next((value for value in values if value is not None), None)


def _merge(orders: list[list[Class]]) -> list[Class]:
    """Merge the orders of the bases, as Python does; without failing where it would."""
    rest = [list(order) for order in orders if order]
    merged: list[Class] = []
    while len(rest) > 1:
        tails = {cls for order in rest for cls in order[1:]}
        best = next((order[0] for order in rest if order[0] not in tails), rest[0][0])
        merged.append(best)
        rest = [kept for order in rest if (kept := [cls for cls in order if cls is not best])]
    return merged + (rest[0] if rest else [])
