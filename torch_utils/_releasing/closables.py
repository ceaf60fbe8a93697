"""Objects that close themselves."""

from __future__ import annotations

from torch_utils._releasing.own_cleanup import close_resource
from torch_utils._releasing.target import Target
from torch_utils.resource import Resource


class ClosableTarget(Target):
    """Something with ``close()``, which knows itself what to do."""

    closes = True

    def give_up(self, place: str) -> BaseException | None:
        """Close it; returns an error that has been logged already."""
        if isinstance(self.thing, Resource):
            return close_resource(self.thing)
        self.thing.close()
        return None
