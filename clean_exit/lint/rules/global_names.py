"""global: a module's name that may be None by the time a destructor needs it."""

from __future__ import annotations

import ast

from clean_exit.lint.facts import Facts
from clean_exit.lint.frames import Frame

_NEAR = 2  # The destructor, and what it calls itself.


def on_name(frame: Frame, node: ast.Name) -> str:
    """Find names that are looked up in a module, unless they were compared with None."""
    facts = frame.facts
    is_special = node.id.startswith("__") and node.id.endswith("__")
    if frame.quiet or facts.alive or is_special or facts.catches("AttributeError", "TypeError"):
        return ""
    place = (frame.function.module.source.path, node.id)
    rest = (place[0], "*")
    if frame.named(node.id).kind != "global" or not facts.present.isdisjoint({place, rest}):
        return ""
    # Once is enough for a destructor, as it is for the one who mends it.
    # Further away one name of a module is, because they all go at once.
    told = {place} if len(frame.trace) <= _NEAR else {place, rest}
    frame.facts = facts.plus(Facts(present=frozenset(told)))
    return f"the global {node.id} may be None by then"
