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
    """Make the error for a cleanup that has returned one of `UNAWAITED`, and close that.

    Only called where it has: an interrupt of a function in Python that every cleanup's caller
    called would look like one of the cleanup (see `_interrupts`), which must run once.
    """
    if type(made) is CoroutineType:
        made.close()  # Or it would warn that it was never awaited.
    return TypeError(
        f"{made.__qualname__}() has to be awaited, so nothing of it has run: hand it to "
        "callback() of an `async with` scope, or name it aclose(), which is left to you"
    )
