"""What happens to models and memory, for whoever counts it. Costs nothing while nobody does."""

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
    """Tell all listeners. Never raises: who counts cannot break what is counted."""
    for listener in LISTENERS:
        try:
            listener(event, values)
        except Exception as error:
            # A listener's own failure, of any kind.
            log(DEBUG, "%s was not counted: %r", event, error)
