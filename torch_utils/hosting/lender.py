"""ModelLender: the base of hosts and pools, which waits for leases when it is closed."""

from __future__ import annotations

import math
import os
import time
import weakref
from functools import partial
from typing import Any

from torch_utils._registry import REGISTRY, Entry
from torch_utils.hosting.lease import check_seconds, run_in_thread
from torch_utils.resource import Resource

__all__ = ["CLOSE_S", "ModelLender"]

CLOSE_S = 10.0
"""How long closing waits for leases, in seconds."""


class ModelLender(Resource):
    """Base of `ModelHost` and `ModelPool`: `close` waits for leases until a deadline."""

    _deadline_s = CLOSE_S
    _closes_by = math.inf

    def close_by(self, when: float) -> None:
        """Limit the wait of `close` for leases to the time ``when``, by `time.monotonic`."""
        self._closes_by = when

    def register_in_child(self) -> None:
        """In a forked child: register an entry of this process, so that it closes the model.

        This must not happen in the fork itself, where multiprocessing drops the child's finalizers.
        """
        entry = REGISTRY.get(id(self))
        if entry is not None and entry.pid != os.getpid():
            release = type(self)._release
            REGISTRY.add(Entry(id(self), entry.name, weakref.ref(self), release))

    def _close_deadline(self) -> float:
        return min(time.monotonic() + self._deadline_s, self._closes_by)

    def close(self, deadline_s: float | None = None) -> bool:
        """Stop lending, wait for open leases, and unload.

        A pool closes all its hosts, newest first, even if one of them fails.

        Args:
            deadline_s: Seconds to wait for the leases of all models together; `CLOSE_S` by
                default.

        Returns:
            True if this call closed it.

        Raises:
            ModelInUseError: Leases are still open at the deadline. The message names each of them.
                The end of its last lease then unloads a model.
            TypeError: ``deadline_s`` is not a number. Nothing was closed.
            ValueError: ``deadline_s`` is NaN or too large. Nothing was closed.
        """
        check_seconds("deadline_s", deadline_s)
        if deadline_s is not None:
            self._deadline_s = deadline_s
        self.register_in_child()
        return super().close()

    async def aclose(self, deadline_s: float | None = None) -> bool:
        """Close in a thread, while the event loop continues. See `close`."""
        return await run_in_thread(partial(self.close, deadline_s))

    async def __aexit__(self, *details: Any) -> None:
        await run_in_thread(partial(self.__exit__, *details))
