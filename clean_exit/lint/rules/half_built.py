"""half-built: an attribute that is not there if ``__init__`` raised before it was set."""

from __future__ import annotations

import ast
from pathlib import PurePath

from clean_exit.lint.construction import Exit
from clean_exit.lint.expressions import Expressions
from clean_exit.lint.frames import Frame
from clean_exit.lint.scopes import Function


def on_attribute(visit: Expressions, frame: Frame, node: ast.expr, name: str) -> None:
    """Find attributes that are used without a guard, and may be missing."""
    built, cls = frame.construction, frame.destroyed
    if not built.is_known or name in built.defaults or name not in built.assigned:
        return
    if name in frame.facts.has or frame.facts.catches("AttributeError"):
        return
    for special in ("__getattr__", "__getattribute__"):
        found = visit.evaluator.member(cls, special)
        if found and isinstance(found[1], Function):
            return
    missing = built.missing(name, frame.facts, tested=frame.tested)
    if missing is not None:
        visit.report("half-built", node, _describe(name, missing, frame), frame)


def _describe(name: str, way: Exit, frame: Frame) -> str:
    if way.cause is None:
        return f"self.{name} is not set by every construction"
    line = getattr(way.cause, "lineno", 0)
    where = ""
    if way.where and way.where.module is not frame.function.module:
        where = f" of {PurePath(way.where.module.source.path).name}"
    if isinstance(way.cause, ast.Call):
        return f"self.{name} is missing if {_short(way.cause.func)}() fails in line {line}{where}"
    return f"self.{name} is missing if line {line}{where} raises"


def _short(node: ast.AST) -> str:
    text = ast.unparse(node).replace("\n", " ")
    return text if len(text) <= 40 else f"{text[:37]}..."
