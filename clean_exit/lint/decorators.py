"""What a decorator makes of a destructor, as far as that can be seen."""

from __future__ import annotations

import ast
from dataclasses import replace

from clean_exit.lint.catching import caught_by, is_suppress, suppressed
from clean_exit.lint.facts import ALIVE, Facts
from clean_exit.lint.frames import ASKS_FOR_END, Frame
from clean_exit.lint.scopes import Function, last_name

_HARMLESS = {
    "override", "final", "no_type_check", "wraps", "staticmethod", "classmethod", "property",
    "abstractmethod", "overload", "cached_property", "deprecated", "contextmanager", "lru_cache",
    "cache", "setter", "getter",
}  # fmt: skip


def unwrap(frame: Frame) -> list[Function]:
    """Take into account what decorators catch, and return the functions they put around it."""
    wrappers: list[Function] = []
    outside = frame.function.parent or frame.function.module
    for decorator in getattr(frame.function.node, "decorator_list", ()):
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if last_name(called) in _HARMLESS:
            continue
        known = frame.evaluator.evaluate(called, replace(frame.env, scope=outside))
        if is_suppress(called, known) and isinstance(decorator, ast.Call):
            frame.facts = frame.facts.catching(suppressed(decorator))
        elif isinstance(known, Function):
            frame.facts = frame.facts.plus(_facts_of_wrapper(known))
            wrapper = _wrapper_of(known)
            if wrapper and isinstance(decorator, ast.Call):
                wrapper = _wrapper_of(wrapper)  # It has made the decorator.
            wrappers += [wrapper] if wrapper else []
        else:  # It may catch anything, so nothing is said of what is raised.
            frame.facts = frame.facts.catching({"BaseException"})
    return wrappers


def _wrapper_of(decorator: Function) -> Function | None:
    """Return the function that a decorator makes; None where it gives back what it got."""
    made = (one for name in decorator.names.values() for one in name if isinstance(one, Function))
    return next(made, None)


def _facts_of_wrapper(decorator: Function) -> Facts:
    """Return what holds inside of a function that a decorator of the project wraps."""
    facts = Facts()
    returned = [one.value for one in decorator.body if isinstance(one, ast.Return)]
    if all(isinstance(one, ast.Name) and one.id in decorator.parameters for one in returned):
        return facts  # It gives back what it got.
    wrapper = _wrapper_of(decorator)
    if wrapper is None:  # It makes another function of it, with other globals, perhaps.
        return facts.catching({"BaseException"})
    for node in ast.walk(wrapper.node):
        if isinstance(node, ast.Try):
            facts = facts.catching(n for handler in node.handlers for n in caught_by(handler))
        elif isinstance(node, ast.withitem) and is_suppress(node.context_expr):
            facts = facts.catching(suppressed(node.context_expr))
        elif isinstance(node, ast.Call) and ASKS_FOR_END.fullmatch(last_name(node.func)):
            facts = facts.plus(ALIVE)
    return facts
