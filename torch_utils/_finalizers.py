"""Destructors that a frozen heap would keep from running.

A module's functions and its namespace refer to each other, so what a namespace holds is given
up only by the garbage collections of the teardown. `fast_exit` leaves those nothing to do; so
it asks first whether the program's own modules hold anything that wants to be told.
"""

from __future__ import annotations

import gc
import io
import sys
from collections import deque
from types import GeneratorType, ModuleType
from typing import Any

BUDGET = 20_000
"""How many objects to look at, in all; about ten milliseconds."""


def has_destructors() -> bool:
    """Say whether the program's own modules hold something whose end runs Python code.

    That is an object with a destructor written in Python, or a generator that is suspended.
    Flushes the open files that it comes by: their destructors would have. Looks at `BUDGET`
    objects at the most, the nearest to the modules first.
    """
    modules = [m for m in list(sys.modules.values()) if isinstance(m, ModuleType)]
    namespaces = {id(vars(module)) for module in modules}
    pending = deque(
        value for module in modules if _is_own(module) for value in vars(module).values()
    )
    seen: set[int] = set()
    while pending and len(seen) < BUDGET:
        thing = pending.popleft()
        if id(thing) in seen or id(thing) in namespaces or _is_foreign(thing):
            continue
        seen.add(id(thing))
        if isinstance(thing, io.IOBase):
            _flush(thing)
        elif _has_destructor(thing):
            return True
        pending.extend(gc.get_referents(thing))
    return False


def _is_own(module: ModuleType) -> bool:
    """Whether a module is neither the standard library's nor of an installed package."""
    file = getattr(module, "__file__", None)
    if file is None:
        return module.__name__ == "__main__" or getattr(module, "__spec__", None) is None
    return not str(file).startswith((sys.prefix, sys.base_prefix))


def _is_foreign(thing: Any) -> bool:
    """Whether the walk stops here: what holds no references, modules, and installed classes."""
    if not gc.is_tracked(thing) or isinstance(thing, ModuleType):
        return True
    if isinstance(thing, type):
        module = sys.modules.get(thing.__module__)
        return not isinstance(module, ModuleType) or not _is_own(module)
    return False


def _has_destructor(thing: Any) -> bool:
    """Whether its end runs Python code, other than this package's, which has run already."""
    if isinstance(thing, GeneratorType):
        return thing.gi_frame is not None
    module = getattr(getattr(type(thing), "__del__", None), "__module__", None)
    return module is not None and module.partition(".")[0] != "torch_utils"


def _flush(file: Any) -> None:
    try:
        if not file.closed and file.writable():
            file.flush()
    except (OSError, ValueError):
        return  # A broken pipe: the teardown will say so itself, as it always does.
