"""Objects that close themselves."""

from __future__ import annotations

from torch_utils._releasing.target import Target


class ClosableTarget(Target):
    """Something with ``close()``, which knows itself what to do."""

    closes = True

    def give_up(self, place: str) -> None:
        self.thing.close()
