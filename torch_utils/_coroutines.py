"""Cleanup functions that return a coroutine, which runs nothing until it is awaited."""

from __future__ import annotations

from types import AsyncGeneratorType, CoroutineType

from torch_utils._runtime import early_bound

TYPE_CHECKING = False  # see _runtime
if TYPE_CHECKING:
    from typing import Any


UNAWAITED = frozenset((CoroutineType, AsyncGeneratorType))
"""Results that have not run yet. Other awaitables, such as tasks, run on their own."""


@early_bound
def unawaited_error(made: Any) -> TypeError:
    """Close a result of one of the types `UNAWAITED`, and return the error for it."""
    if type(made) is CoroutineType:
        made.close()  # Otherwise Python warns that it was never awaited.
    return TypeError(
        f"{made.__qualname__}() has to be awaited, so it did not run; use `async with` and pass "
        "the function to callback()"
    )


def called_function(function: Any) -> Any:
    """Return the function that runs when an object is called; for an instance, its `__call__`."""
    from functools import partial
    from inspect import isroutine

    if isinstance(function, (staticmethod, classmethod)):
        return function.__func__
    if isroutine(function) or isinstance(function, (type, partial)):
        return function
    return type(function).__call__
