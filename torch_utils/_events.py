"""Events about models and memory, for metrics."""

from __future__ import annotations

from torch_utils._runtime import DEBUG, early_bound, log

TYPE_CHECKING = False  # see _runtime
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LISTENERS: list[Callable[[str, dict[str, Any]], object]] = []
"""Functions that are called with each event's name and values, in the thread that caused it."""


@early_bound
def notify(event: str, **values: Any) -> None:
    """Call all listeners. Never raises: a failing listener must not break a release."""
    for listener in LISTENERS:
        try:
            listener(event, values)
        except Exception as error:
            # Listeners may raise anything.
            log(DEBUG, "event %s was not counted: %r", event, error)
