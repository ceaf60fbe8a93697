"""Objects that close themselves."""

from __future__ import annotations

from operator import methodcaller
from typing import Any

from torch_utils._interrupts import never_began
from torch_utils._releasing.target import Target


class ClosableTarget(Target):
    """Something with ``close()``, which knows itself what to do."""

    closes = True

    def __init__(self, thing: Any, name: str) -> None:
        super().__init__(thing, name)
        self._calls = map(methodcaller("close"), (thing,))

    def give_up(self, place: str) -> None:
        try:
            for _ in self._calls:  # Once: see `_interrupts`.
                pass
        except BaseException as error:
            if never_began(error):
                self._calls = map(methodcaller("close"), (self.thing,))
            raise
