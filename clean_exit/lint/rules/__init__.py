"""The rules about what a destructor reaches: one module for each."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import ModuleType
from typing import Any

from clean_exit.lint.expressions import Expressions
from clean_exit.lint.frames import Frame
from clean_exit.lint.rules import (
    bare_except,
    coroutines,
    device,
    global_names,
    half_built,
    imports,
    log,
    raising,
    register,
    wait,
)
from clean_exit.lint.values import Values

_RULES = (imports, global_names, half_built, wait, device, log, raising, register, coroutines,
          bare_except)  # fmt: skip


def _having(hook: str) -> tuple[Callable[..., Any], ...]:
    modules: tuple[ModuleType, ...] = _RULES
    return tuple(getattr(module, hook) for module in modules if hasattr(module, hook))


class AllRules:
    """Shows each place to the rules that look at places of its kind."""

    _calls = _having("on_call")
    _names = _having("on_name")
    _attributes = _having("on_attribute")
    _statements = _having("on_statement")
    _withs = _having("on_with")

    def on_call(self, visit: Expressions, frame: Frame, node: ast.Call, values: Values) -> None:
        """Show a call."""
        for rule in self._calls:
            rule(visit, frame, node, values)

    def on_name(self, visit: Expressions, frame: Frame, node: ast.Name) -> None:
        """Show a name that is read."""
        for rule in self._names:
            rule(visit, frame, node)

    def on_attribute(self, visit: Expressions, frame: Frame, node: ast.expr, name: str) -> None:
        """Show an attribute of the destroyed object that is read."""
        for rule in self._attributes:
            rule(visit, frame, node, name)

    def on_statement(self, visit: Expressions, frame: Frame, node: ast.AST) -> None:
        """Show a statement, or a handler of exceptions."""
        for rule in self._statements:
            rule(visit, frame, node)

    def on_with(self, visit: Expressions, frame: Frame, node: ast.expr, values: Values) -> None:
        """Show what a with block enters."""
        for rule in self._withs:
            rule(visit, frame, node, values)
