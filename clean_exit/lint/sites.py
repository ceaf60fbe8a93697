"""Places outside of destructors that rules look at: calls and decorators, wherever they stand."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from clean_exit.lint.evaluator import Evaluator
from clean_exit.lint.scopes import Class, Function, Module, Scope, inside, lambda_of
from clean_exit.lint.values import Env, Values


class SiteReport(Protocol):
    """Takes a finding that no destructor led to."""

    def __call__(self, rule: str, node: ast.AST, what: str, module: Module) -> None:
        """Note that a rule is broken at a place."""


@dataclass(frozen=True)
class Site:
    """Where a call stands."""

    evaluator: Evaluator
    module: Module
    scope: Scope
    reporter: SiteReport

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
        has_object = function.self_name and "classmethod" not in function.decorators
        return function if has_object else None

    def evaluate(self, node: ast.AST) -> Values:
        """Return what an expression may be."""
        return self.evaluator.evaluate(node, Env(self.scope))

    def report(self, rule: str, node: ast.AST, what: str) -> None:
        """Note a finding."""
        self.reporter(rule, node, what, self.module)


def calls(
    evaluator: Evaluator, module: Module, report: SiteReport
) -> Iterator[tuple[Site, ast.Call]]:
    """Yield every call of a module; a decorator is a call with what it decorates."""
    scopes: list[tuple[Scope, ast.AST]] = [(module, module.source.tree)]
    scopes += [(cls, cls.node) for cls in module.classes]
    scopes += [(function, function.node) for function in module.functions]
    for scope, top in scopes:
        site = Site(evaluator, module, scope, report)
        for node in inside(top):
            if isinstance(node, ast.Call):
                yield site, node
            elif isinstance(node, ast.Lambda):
                scopes.append((lambda_of(node, scope), node))
            elif isinstance(node, ast.FunctionDef) and not isinstance(scope, Class):
                for decorator in node.decorator_list:
                    decorated = ast.Name(node.name, ast.Load())
                    call = ast.Call(decorator, [ast.copy_location(decorated, decorator)], [])
                    yield site, ast.copy_location(call, decorator)
