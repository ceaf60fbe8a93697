"""raise: exceptions out of a destructor, which nobody can catch."""

from __future__ import annotations

import ast

from clean_exit.lint.catching import ancestors
from clean_exit.lint.expressions import Expressions
from clean_exit.lint.frames import Frame
from clean_exit.lint.scopes import Class, last_name

_FURTHEST = 4  # Beyond it, it is no longer the destructor's own affair.


def on_statement(visit: Expressions, frame: Frame, node: ast.AST) -> None:
    """Find ``raise`` and ``assert`` that no handler on the way catches."""
    if len(frame.trace) > _FURTHEST or frame.checks_arguments():
        return
    if isinstance(node, ast.Assert):
        if not frame.facts.catches("AssertionError"):
            visit.report("raise", node, "the assertion's error is printed, and lost", frame)
        return
    if not isinstance(node, ast.Raise):
        return
    if node.exc is None:
        if frame.is_destructor:
            visit.report("raise", node, "what is raised again is printed, and lost", frame)
        return
    raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    name = last_name(raised)
    if not frame.is_destructor and name in {"NotImplementedError", "StopIteration"}:
        return  # A method that a subclass has to have; a generator's end.
    above = _above(visit, frame, raised, name)
    caught = frame.facts.caught & above if "Exception" not in above else frame.facts.catches(*above)
    if not caught:
        visit.report("raise", node, f"{name or 'the error'} is printed, and lost", frame)


def _above(visit: Expressions, frame: Frame, node: ast.AST, name: str) -> set[str]:
    """Return the names by which an exception can be caught."""
    for value in frame.evaluate(node):
        if isinstance(value, Class):
            order, _ = visit.evaluator.linear(value)
            names = {cls.name for cls in order}
            for cls in order:
                for base in cls.node.bases:
                    names |= ancestors(last_name(base))
            return names
    return ancestors(name)
