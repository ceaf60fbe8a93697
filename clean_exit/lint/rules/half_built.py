"""half-built: an attribute that is not there if ``__init__`` raised before it was set."""

from __future__ import annotations

import ast
from pathlib import PurePath

from clean_exit.lint.frames import Frame


def on_attribute(frame: Frame, node: ast.expr, name: str) -> str:
    """Find attributes that are used without a guard, and may be missing."""
    built, facts = frame.construction, frame.facts
    if not built.is_known or name in built.defaults or name not in built.assigned:
        return ""
    if facts.has(name) or facts.catches("AttributeError"):
        return ""
    if any(frame.evaluator.method(frame.destroyed, special)
           for special in ("__getattr__", "__getattribute__")):  # fmt: skip
        return ""
    way = built.missing(name, facts, tested=frame.tested)
    if way is None:
        return ""
    if way.cause is None:
        return f"self.{name} is not set by every construction"
    line = f"line {getattr(way.cause, 'lineno', 0)}"
    if way.where and way.where.module is not frame.function.module:
        line += f" of {PurePath(way.where.module.source.path).name}"
    if not isinstance(way.cause, ast.Call):
        return f"self.{name} is missing if {line} raises"
    said = ast.unparse(way.cause.func).replace("\n", " ")
    said = said if len(said) <= 40 else f"{said[:37]}..."
    return f"self.{name} is missing if {said}() fails in {line}"
