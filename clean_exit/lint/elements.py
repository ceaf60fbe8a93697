"""What the elements of a container may be, by its annotation or by how it was made."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from clean_exit.lint.scopes import Function, Imported, Item, Scope, last_name
from clean_exit.lint.values import Env, Instance, Values

if TYPE_CHECKING:
    from clean_exit.lint.evaluator import Evaluator

_DEEPEST = 6
_SAME = {"list", "tuple", "set", "frozenset", "iter", "reversed", "sorted", "enumerate", "items",
         "values", "copy", "deque"}  # fmt: skip
_CONTAINERS = {"list", "set", "frozenset", "deque", "tuple", "dict", "sequence", "iterable",
               "iterator", "collection", "mapping", "mutablemapping", "mutablesequence",
               "defaultdict", "ordereddict", "weakset", "weakvaluedictionary"}  # fmt: skip


class Elements:
    """Finds out what a loop goes through; of a mapping, its values."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator

    def of(self, node: ast.expr, env: Env, depth: int = 0) -> Values:
        """Return what an element of an expression may be; nothing if that is not known."""
        if depth > _DEEPEST:
            return ()
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return tuple(v for one in node.elts for v in self._evaluator.evaluate(one, env))
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            return self._evaluator.evaluate(node.elt, env)
        if isinstance(node, ast.DictComp):
            return self._evaluator.evaluate(node.value, env)
        if isinstance(node, ast.Call) and last_name(node.func) in _SAME:
            if node.args:
                return self.of(node.args[0], env, depth + 1)
            held = node.func.value if isinstance(node.func, ast.Attribute) else None
            return self.of(held, env, depth + 1) if held else ()
        if isinstance(node, ast.Attribute):
            return self._of_attribute(node, env, depth)
        return self._of_name(node, env, depth) if isinstance(node, ast.Name) else ()

    def _of_attribute(self, node: ast.Attribute, env: Env, depth: int) -> Values:
        found: list[object] = []
        for base in self._evaluator.evaluate(node.value, env):
            if not isinstance(base, Instance):
                continue
            for cls in self._evaluator.linear(base.cls)[0]:
                if node.attr in cls.annotations:
                    found += self._annotated(cls.annotations[node.attr], cls)
                for function, by in self._evaluator.assignments(cls).get(node.attr, ()):
                    if isinstance(by, ast.AnnAssign):
                        found += self._annotated(by.annotation, function)
                    if isinstance(value := getattr(by, "value", None), ast.expr):
                        inner = Env(function, base, env.depth + 1)
                        found += self.of(value, inner, depth + 1)
        return tuple(dict.fromkeys(found))  # type: ignore[arg-type]

    def _of_name(self, node: ast.Name, env: Env, depth: int) -> Values:
        named = self._evaluator.named(env.scope, node.id)
        if isinstance(named.scope, Function) and node.id in named.scope.all_parameters:
            said = named.scope.all_parameters[node.id].annotation
            return self._annotated(said, named.scope.module) if said is not None else ()
        inner = Env(named.scope, env.receiver if named.scope is env.scope else None, env.depth + 1)
        return tuple(
            value
            for one in named.bindings
            if isinstance(one, ast.expr) and not isinstance(one, (Imported, Item))
            for value in self.of(one, inner, depth + 1)
        )

    def _annotated(self, node: ast.expr, scope: Scope) -> Values:
        """Return the objects that ``list[C]``, ``dict[str, C]`` and the like hold."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                node = ast.parse(node.value, mode="eval").body
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                return ()
        if isinstance(node, ast.BinOp):
            return (*self._annotated(node.left, scope), *self._annotated(node.right, scope))
        if not isinstance(node, ast.Subscript):
            return ()
        inner = node.slice
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if last_name(node.value) == "Optional":
            return self._annotated(parts[0], scope)
        if last_name(node.value).lower() not in _CONTAINERS or not parts:
            return ()
        held = [one for one in parts if not isinstance(one, ast.Constant) or one.value is not ...]
        return self._evaluator.annotated(held[-1], scope)
