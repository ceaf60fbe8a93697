"""Closing what lends models: by a deadline, and saying who still has one."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

from torch_utils.hosting.waiting import check_seconds, off_the_loop
from torch_utils.resource import Resource

__all__ = ["CLOSE_S", "Lender"]

CLOSE_S = 10.0
"""How long closing waits for leases."""


class Lender(Resource):
    """What lends models: a host, or a pool of them. Its `_release` waits for ``_waits_s``."""

    _deadline_s = CLOSE_S
    _closes_by = math.inf

    def close_by(self, when: float) -> None:
        """Have closing wait for leases until then at most, by `time.monotonic`."""
        self._closes_by = when

    @property
    def _waits_s(self) -> float:
        """How long closing may wait for leases now."""
        return max(0.0, min(self._deadline_s, self._closes_by - time.monotonic()))

    def close(self, deadline_s: float | None = None) -> bool:
        """Lend nothing any more, wait for the leases that are open, and give the models back.

        A pool closes its hosts one by one, the newest first, whatever becomes of the others.

        Args:
            deadline_s: How long to wait for leases, those of all models together; `CLOSE_S` by
                default.

        Returns:
            True if this call closed it.

        Raises:
            ModelInUseError: The time is over. Says where the leases were taken; a model is given
                back when the last of its leases ends.
            TypeError, ValueError: ``deadline_s`` is no number of seconds. Nothing was closed.
        """
        check_seconds("deadline_s", deadline_s)
        if deadline_s is not None:
            self._deadline_s = deadline_s
        return super().close()

    async def aclose(self, deadline_s: float | None = None) -> bool:
        """Close from a coroutine, in a thread; the event loop goes on meanwhile."""
        return await off_the_loop(partial(self.close, deadline_s))

    async def __aexit__(self, *details: Any) -> None:
        """Close as `aclose` does."""
        await off_the_loop(partial(self.__exit__, *details))
