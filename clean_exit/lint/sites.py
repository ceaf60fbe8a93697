"""Places outside of destructors that rules look at: calls and decorators, wherever they stand."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from clean_exit.lint.evaluator import Evaluator
from clean_exit.lint.scopes import Class, Function, Module, Scope, inside, lambda_of
from clean_exit.lint.values import Env, Value


@dataclass(frozen=True)
class Site:
    """Where a call stands."""

    evaluator: Evaluator
    scope: Scope

    @property
    def function(self) -> Function | None:
        """The function that it is in, if any."""
        return self.scope if isinstance(self.scope, Function) else None

    @property
    def method(self) -> Function | None:
        """The method that it is in, perhaps in a function inside; one that has an object."""
        function = self.function
        while function and not function.owner:
            function = function.parent
        if function is None or function.name in {"__new__", "__init_subclass__"}:
            return None
        return function if function.self_name and not function.is_of_class else None

    def evaluate(self, node: ast.AST) -> Value | None:
        """Return what an expression is, if that is known."""
        return self.evaluator.evaluate(node, Env(self.scope))


def calls(evaluator: Evaluator, module: Module) -> Iterator[tuple[Site, ast.Call]]:
    """Yield every call of a module; a decorator is a call with what it decorates."""
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
