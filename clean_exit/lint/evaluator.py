"""Says what an expression may be, as far as its source tells; what is not known is left out."""

from __future__ import annotations

import ast
from dataclasses import replace

from clean_exit.lint.attributes import mangle, stores, unmangle
from clean_exit.lint.elements import Elements
from clean_exit.lint.project import Project
from clean_exit.lint.scopes import (
    BUILTINS,
    Class,
    Function,
    Imported,
    Item,
    Module,
    Scope,
    inside,
    lambda_of,
    last_name,
)
from clean_exit.lint.values import Bound, Env, External, Instance, Named, Super, Value, Values

_DEEPEST = 12
_MOST = 4  # Alternatives of one expression; with more of them it is not known.
_TRANSPARENT = {"Optional", "Annotated", "Final", "ClassVar", "Union", "Required", "Self"}


class Evaluator:
    """Evaluates expressions without running them; keeps what it found out."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self._linear: dict[Class, tuple[list[Class], bool]] = {}
        self._attributes: dict[Class, dict[str, list[tuple[Function, ast.AST]]]] = {}
        self._busy: set[tuple[int, object]] = set()
        self.elements = Elements(self)

    def named(self, scope: Scope, name: str) -> Named:
        """Say what binds a name that is used in a scope."""
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
                kind = "local" if here is scope else "closure"
                return Named(kind, here, tuple(here.names.get(name, ())))
            here = here.parent or here.module
        module = here if isinstance(here, Module) else here.module
        if name in module.names:
            return Named("global", module, tuple(module.names[name]))
        if name in BUILTINS:
            return Named("builtin", module)
        for star in module.stars:
            source = self.project.find(module, star.module, star.level)
            if source is None:
                continue
            there = self.named(source, name)
            if there.kind == "global":
                return there
        return Named("global" if module.stars else "unknown", module)

    def _name(self, node: ast.Name, env: Env) -> Values:
        if node.id in env.inner:
            return env.inner[node.id]
        found = self.named(env.scope, node.id)
        if found.kind == "builtin":
            return (External(f"builtins.{node.id}"),)
        if (found.scope, node.id) in env.given:
            return env.given[found.scope, node.id]
        if isinstance(found.scope, Function) and node.id in found.scope.all_parameters:
            own = found.scope is env.scope
            return self.parameter(found.scope, node.id, env.receiver if own else None, env.depth)
        return self._bindings(found, env)

    def _bindings(self, found: Named, env: Env) -> Values:
        values: list[Value] = []
        receiver = env.receiver if found.scope is env.scope else None
        inner = Env(found.scope, receiver, env.depth + 1, env.given)
        for binding in found.bindings[-_MOST:]:
            if isinstance(binding, (Class, Function)):
                values.append(binding)
            elif isinstance(binding, Imported):
                module = found.scope if isinstance(found.scope, Module) else found.scope.module
                values += self._imported(module, binding)
            elif isinstance(binding, Item):
                values += self.elements.of(binding.of, inner)
            elif isinstance(binding, ast.expr):
                values += self.evaluate(binding, inner)
        return tuple(dict.fromkeys(values))[:_MOST]

    def parameter(
        self, function: Function, name: str, receiver: Instance | Class | None, depth: int = 0
    ) -> Values:
        """Return what a parameter may be: the object, its annotation's class, its default."""
        owner = function.owner
        if owner and name == function.self_name:
            if "classmethod" in function.decorators or function.name == "__new__":
                of = receiver.cls if isinstance(receiver, Instance) else receiver
                return (of or owner,)
            return (receiver if isinstance(receiver, Instance) else Instance(owner),)
        annotation = function.all_parameters[name].annotation
        outer: Scope = function.owner or function.parent or function.module
        if annotation is not None and (known := self.annotated(annotation, outer, depth + 1)):
            return known
        default = function.defaults.get(name)
        return self.evaluate(default, Env(outer, None, depth + 1)) if default else ()

    def _imported(self, module: Module, imported: Imported) -> Values:
        source = self.project.find(module, imported.module, imported.level)
        if imported.name is None:
            return (source,) if source else (External(imported.module),)
        if source:
            return self._of_module(source, imported.name)
        if imported.level and not imported.module:  # from . import name, without an __init__.py
            sibling = self.project.find(module, imported.name, imported.level)
            return (sibling,) if sibling else ()
        return (External(f"{imported.module}.{imported.name}"),) if not imported.level else ()

    def attribute_of_module(self, module: Module, name: str) -> Values:
        """Return what a module's name may be: one that it binds, or a module below it."""
        key = (id(module), name)
        if key in self._busy:
            return ()  # Two modules that import each other's names.
        self._busy.add(key)
        try:
            is_own = name in module.names or not module.is_package
            below = None if is_own else self.project.find(module, name, 1)
            found = self.named(module, name)
            if below is None and found.kind == "global" and found.bindings:
                return self._bindings(found, Env(module))
            return (below,) if below else ()
        finally:
            self._busy.discard(key)

    def _of_module(self, module: Module, name: str) -> Values:
        """Return the same, and by its dotted name what is imported there from elsewhere."""
        known = self.attribute_of_module(module, name)
        bound = module.names.get(name, ())
        if known or not module.name or not all(isinstance(one, Imported) for one in bound):
            return known
        return (External(f"{module.name}.{name}"),)

    def linear(self, cls: Class) -> tuple[list[Class], bool]:
        """Return a class and its bases in the order of lookup, and whether all are known."""
        if cls not in self._linear:
            self._linear[cls] = ([cls], False)  # For a class that is its own base, by mistake.
            orders, complete = [], True
            for base in cls.node.bases:
                plain = base.value if isinstance(base, ast.Subscript) else base
                env = Env(cls.outer or cls.scope)
                known = [value for value in self.evaluate(plain, env) if isinstance(value, Class)]
                if known and known[-1] is not cls:
                    order, whole = self.linear(known[-1])
                    orders.append(order)
                    complete = complete and whole
                elif last_name(plain) not in {"object", "Generic", "Protocol", "ABC"}:
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
            plain = unmangle(name, one)
            if plain in one.members:
                return one, one.members[plain]
            if plain in one.values:
                return one, one.values[plain]
        return None

    def assignments(self, cls: Class) -> dict[str, list[tuple[Function, ast.AST]]]:
        """Return, for each attribute, the statements of the class's methods that set it."""
        if cls not in self._attributes:
            found: dict[str, list[tuple[Function, ast.AST]]] = {}
            for function in cls.members.values():
                for node in inside(function.node):
                    for name, value in stores(node, function):
                        found.setdefault(mangle(name, cls), []).append((function, value))
            self._attributes[cls] = found
        return self._attributes[cls]

    def attribute(self, receiver: Instance, name: str, depth: int = 0) -> Values:
        """Return what an attribute of an object may be."""
        cls, key = receiver.cls, (id(receiver.cls), name)
        found = self.member(cls, name)
        if found and isinstance(found[1], Function):
            return self._bind(found[1], receiver)
        if key in self._busy or depth > _DEEPEST:
            return ()
        self._busy.add(key)
        try:
            values: list[Value] = []
            for one in self.linear(cls)[0]:
                if name in one.annotations:
                    values += self.annotated(one.annotations[name], one, depth + 1)
                for function, value in self.assignments(one).get(name, ()):
                    if isinstance(value, ast.AnnAssign):
                        values += self.annotated(value.annotation, function, depth + 1)
                    if isinstance(node := getattr(value, "value", None), ast.expr):
                        env = Env(function, receiver, depth + 1)
                        values += self.evaluate(node, env)
            if found and isinstance(found[1], ast.expr) and not values:
                values += self.evaluate(found[1], Env(found[0], None, depth + 1))
            return tuple(dict.fromkeys(values))[:_MOST]
        finally:
            self._busy.discard(key)

    def _bind(self, function: Function, receiver: Instance | Class) -> Values:
        if function.is_property:
            node = function.node
            returns = None if isinstance(node, ast.Lambda) else node.returns
            return self.annotated(returns, function.module, 1) if returns else ()
        if function.is_static:
            return (function,)
        if "classmethod" in function.decorators:
            cls = receiver.cls if isinstance(receiver, Instance) else receiver
            return (Bound(function, cls),)
        return (Bound(function, receiver),) if isinstance(receiver, Instance) else (function,)

    def annotated(self, node: ast.expr, scope: Scope, depth: int = 0) -> Values:
        """Return the objects that an annotation allows, if it names classes."""
        if depth > _DEEPEST:
            return ()
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                node = ast.parse(node.value, mode="eval").body
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                return ()
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            both = (node.left, node.right)
            return tuple(v for one in both for v in self.annotated(one, scope, depth + 1))
        if isinstance(node, ast.Subscript):
            if last_name(node.value) not in _TRANSPARENT:
                return self.annotated(node.value, scope, depth + 1)
            inner = node.slice
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            if last_name(node.value) == "Annotated":
                parts = parts[:1]
            return tuple(v for one in parts for v in self.annotated(one, scope, depth + 1))
        if not isinstance(node, (ast.Name, ast.Attribute)):
            return ()
        values = self.evaluate(node, Env(scope, None, depth + 1))
        return tuple(
            Instance(value) if isinstance(value, Class) else External(f"{value.dotted}()")
            for value in values
            if isinstance(value, Class)
            or (isinstance(value, External) and not value.dotted.startswith("builtins."))
        )

    def evaluate(self, node: ast.AST, env: Env) -> Values:
        """Return what an expression may be; nothing if that is not known."""
        if env.depth > _DEEPEST:
            return ()
        deeper = replace(env, depth=env.depth + 1)
        if isinstance(node, ast.Name):
            return self._name(node, deeper)
        if isinstance(node, ast.Attribute):
            name = node.attr
            owner = env.scope.owner if isinstance(env.scope, Function) else None
            name = mangle(name, owner) if owner else name
            return tuple(
                found
                for base in self.evaluate(node.value, deeper)
                for found in self._attribute_of(base, name, deeper)
            )[:_MOST]
        if isinstance(node, ast.Call):
            return self._result(node, deeper)
        if isinstance(node, ast.Lambda):
            return (lambda_of(node, env.scope),)
        if isinstance(node, (ast.NamedExpr, ast.Await)):
            return self.evaluate(node.value, deeper)
        if isinstance(node, ast.BoolOp):
            return tuple(v for one in node.values for v in self.evaluate(one, deeper))[:_MOST]
        if isinstance(node, ast.IfExp):
            both = (node.body, node.orelse)
            return tuple(v for one in both for v in self.evaluate(one, deeper))[:_MOST]
        return ()

    def _attribute_of(self, base: Value, name: str, env: Env) -> Values:
        if isinstance(base, Module):
            return self._of_module(base, name)
        if isinstance(base, External):
            return (External(f"{base.dotted}.{name}"),)
        if isinstance(base, Instance):
            return self.attribute(base, name, env.depth) if name != "__class__" else (base.cls,)
        if isinstance(base, (Class, Super)):
            cls = base if isinstance(base, Class) else base.receiver.cls
            found = self.member(cls, name, None if isinstance(base, Class) else base.after)
            if found is None:
                return ()
            if isinstance(found[1], Function):
                return self._bind(found[1], base if isinstance(base, Class) else base.receiver)
            value = found[1]
            return self.evaluate(value, Env(found[0])) if isinstance(value, ast.expr) else ()
        return ()

    def _result(self, node: ast.Call, env: Env) -> Values:
        scope = env.scope
        name = last_name(node.func)
        if isinstance(node.func, ast.Name) and name == "super" and isinstance(scope, Function):
            method: Function | None = scope
            while method and not method.owner:
                method = method.parent
            if method is None or method.owner is None:
                return ()
            known = env.receiver if isinstance(env.receiver, Instance) else Instance(method.owner)
            return (Super(known, method.owner),)
        first = node.args[0] if node.args else None
        if first is not None and name in {
            "partial",
            "partialmethod",
            "staticmethod",
            "classmethod",
        }:
            return self.evaluate(first, env)
        if first is not None and name == "type" and len(node.args) == 1:
            of = self.evaluate(first, env)
            return tuple(value.cls for value in of if isinstance(value, Instance))
        if name == "cast" and len(node.args) == 2 and first is not None:
            return self.annotated(first, scope, env.depth)
        if name == "getattr" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            read = ast.Attribute(node.args[0], str(node.args[1].value), ast.Load())
            return self.evaluate(read, env)
        values: list[Value] = []
        for called in self.evaluate(node.func, env):
            if isinstance(called, Class):
                values.append(Instance(called))
            elif isinstance(called, External):
                values.append(External(f"{called.dotted}()"))
            elif isinstance(called, (Function, Bound)):
                function = called.function if isinstance(called, Bound) else called
                returns = getattr(function.node, "returns", None)
                if returns is not None:
                    values += self.annotated(returns, function.module, env.depth)
        return tuple(values)


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
