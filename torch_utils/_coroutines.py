"""What a cleanup function returns that has not run, because nobody awaits it."""

from __future__ import annotations

from types import AsyncGeneratorType, CoroutineType

from torch_utils._runtime import early_bound

TYPE_CHECKING = False  # see _runtime
if TYPE_CHECKING:
    from typing import Any


UNAWAITED = frozenset((CoroutineType, AsyncGeneratorType))
"""What has not run when it is returned. Other awaitables, a task say, are at work already."""


@early_bound
def never_ran(made: Any) -> TypeError:
    """Make the error for a cleanup that has returned one of `UNAWAITED`, and close that."""
    if type(made) is CoroutineType:
        made.close()  # Or it would warn that it was never awaited.
    return TypeError(
        f"{made.__qualname__}() has to be awaited, so nothing of it has run; what must be awaited "
        "goes to callback() of a scope: use `async with`, in a coroutine that is not being closed"
    )


def called_function(function: Any) -> Any:
    """Return the function that runs when something is called: for an instance, a method's."""
    from functools import partial
    from inspect import isroutine

    if isinstance(function, (staticmethod, classmethod)):
        return function.__func__
    if isroutine(function) or isinstance(function, (type, partial)):
        return function
    return type(function).__call__
