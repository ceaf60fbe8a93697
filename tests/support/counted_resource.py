"""A resource that counts how often it is released."""

from typing import Any

from torch_utils import Resource


class Counted(Resource):
    """Counts its releases; optionally calls a function or raises an exception in them."""

    released = 0  # An interrupt before `__init__` leaves these to `_release`.
    action: Any = None

    def __init__(self, action: Any = None) -> None:
        self.action = action

    def _release(self) -> None:
        self.released += 1
        if isinstance(self.action, BaseException):
            raise self.action
        if self.action is not None:
            self.action(self)
