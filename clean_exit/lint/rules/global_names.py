"""global: a module's name that may be None by the time a destructor needs it."""

from __future__ import annotations

import ast

from clean_exit.lint.expressions import Expressions
from clean_exit.lint.facts import Facts
from clean_exit.lint.frames import Frame

_NEAR = 2  # The destructor, and what it calls itself.


def on_name(visit: Expressions, frame: Frame, node: ast.Name) -> None:
    """Find names that are looked up in a module, unless they were compared with None."""
    facts = frame.facts
    if frame.quiet or facts.alive or facts.catches("AttributeError", "TypeError"):
        return
    if node.id.startswith("__") and node.id.endswith("__"):
        return
    found = frame.named(node.id)
    place = (frame.function.module.source.path, node.id)
    rest = (place[0], "*")
    if found.kind == "global" and place not in facts.present and rest not in facts.present:
        visit.report("global", node, f"the global {node.id} may be None by then", frame)
        # Once is enough for a destructor, as it is for the one who mends it.
        # Further away one name of a module is, because they all go at once.
        told = {place} if len(frame.trace) <= _NEAR else {place, rest}
        frame.facts = facts.plus(Facts(present=frozenset(told)))
