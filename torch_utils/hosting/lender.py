"""ModelLender: what a host and a pool share, which is how they are closed."""

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
    """Base of `ModelHost` and `ModelPool`: closing waits for leases, until a deadline."""

    _deadline_s = CLOSE_S
    _closes_by = math.inf

    def close_by(self, when: float) -> None:
        """Let closing wait for leases until ``when`` at most, by `time.monotonic`."""
        self._closes_by = when

    def register_in_child(self) -> None:
        """In a forked child: let this process close it. The parent's entry is not its own.

        Not at the fork itself: multiprocessing then forgets what its child has to do at its end.
        """
        entry = REGISTRY.get(id(self))
        if entry is not None and entry.pid != os.getpid():
            release = type(self)._release
            REGISTRY.add(Entry(id(self), entry.name, weakref.ref(self), release))

    def _close_deadline(self) -> float:
        return min(time.monotonic() + self._deadline_s, self._closes_by)

    def close(self, deadline_s: float | None = None) -> bool:
        """Lend nothing any more, wait for open leases, and unload.

        A pool closes its hosts one by one, the newest first; one that fails does not stop the
        others.

        Args:
            deadline_s: Seconds to wait for the leases of all models together; `CLOSE_S` by
                default.

        Returns:
            True if this call closed it.

        Raises:
            ModelInUseError: Leases are still open at the deadline. Says where they were taken. The
                end of its last lease unloads the model.
            TypeError, ValueError: ``deadline_s`` is not a number of seconds. Nothing was closed.
        """
        check_seconds("deadline_s", deadline_s)
        if deadline_s is not None:
            self._deadline_s = deadline_s
        self.register_in_child()
        return super().close()

    async def aclose(self, deadline_s: float | None = None) -> bool:
        """Close from a coroutine, in a thread: the event loop goes on."""
        return await run_in_thread(partial(self.close, deadline_s))

    async def __aexit__(self, *details: Any) -> None:
        await run_in_thread(partial(self.__exit__, *details))
