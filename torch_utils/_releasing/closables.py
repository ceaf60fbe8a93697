"""Objects that close themselves."""

from __future__ import annotations

from operator import methodcaller
from typing import Any

from torch_utils._coroutines import UNAWAITED, never_ran
from torch_utils._interrupts import never_began
from torch_utils._releasing.classes import isinstance_of
from torch_utils._releasing.own_cleanup import close_resource
from torch_utils._releasing.target import MethodTarget
from torch_utils.resource import Resource


class ClosableTarget(MethodTarget):
    """Something with ``close()``, which knows itself what to do."""

    closes = True

    def __init__(self, thing: Any, name: str) -> None:
        super().__init__(thing, name)
        self._calls = map(methodcaller("close"), (thing,))

    def give_up(self, place: str) -> BaseException | None:
        """Close it; returns an error that has been logged already."""
        if isinstance_of(self.thing, Resource):
            return close_resource(self.thing)
        try:
            for result in self._calls:  # Once: see `_interrupts`.
                if type(result) in UNAWAITED:
                    raise never_ran(result)
        except BaseException as error:
            if never_began(error):
                self._calls = map(methodcaller("close"), (self.thing,))
            raise
        return None
