"""raise: exceptions out of a destructor, which nobody can catch."""

from __future__ import annotations

import ast

from clean_exit.lint.catching import ancestors
from clean_exit.lint.frames import Frame
from clean_exit.lint.scopes import Class, last_name

_FURTHEST = 4  # Beyond it, it is no longer the destructor's own affair.


def on_statement(frame: Frame, node: ast.AST) -> str:
    """Find ``raise`` and ``assert`` that no handler on the way catches."""
    if len(frame.trace) > _FURTHEST or frame.checks_arguments():
        return ""
    if isinstance(node, ast.Assert):
        caught = frame.facts.catches("AssertionError")
        return "" if caught else "the assertion's error is printed, and lost"
    if not isinstance(node, ast.Raise):
        return ""
    if node.exc is None:
        return "what is raised again is printed, and lost" if frame.is_destructor else ""
    raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    name = last_name(raised)
    if not frame.is_destructor and name in {"NotImplementedError", "StopIteration"}:
        return ""  # A method that a subclass has to have; a generator's end.
    above = _above(frame, raised, name)
    is_caught = bool(frame.facts.caught & above)
    is_caught = is_caught or ("Exception" in above and frame.facts.catches())
    return "" if is_caught else f"{name or 'the error'} is printed, and lost"


def _above(frame: Frame, node: ast.AST, name: str) -> set[str]:
    """Return the names by which an exception can be caught."""
    value = frame.evaluate(node)
    if not isinstance(value, Class):
        return ancestors(name)
    order, _ = frame.evaluator.linear(value)
    bases = [last_name(base) for cls in order for base in cls.node.bases]
    return {cls.name for cls in order}.union(*map(ancestors, bases))
