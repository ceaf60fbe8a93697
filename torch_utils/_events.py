"""Events about models and memory, for metrics. Costs nothing without listeners."""

from __future__ import annotations

from torch_utils._runtime import DEBUG, early_bound, log

TYPE_CHECKING = False  # see _runtime
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LISTENERS: list[Callable[[str, dict[str, Any]], object]] = []
"""Called with the name of each event and its values, in the thread in which it happens."""


@early_bound
def tell(event: str, **values: Any) -> None:
    """Call all listeners. Never raises: a failing listener must not break a release."""
    for listener in LISTENERS:
        try:
            listener(event, values)
        except Exception as error:
            # A listener's own failure, of any kind.
            log(DEBUG, "%s was not counted: %r", event, error)
