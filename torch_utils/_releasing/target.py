"""One object to release, whatever its kind: what is counted before, and how it is given up."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from torch_utils._releasing.storages import Inventory


class Target:
    """One object to release.

    Attributes:
        name: What reports call it.
        closes: Whether giving it up calls the program's own code. Only such targets are given
            up while the program ends; the memory of everything else goes with the process.
    """

    closes = False

    def __init__(self, thing: Any, name: str) -> None:
        self.thing = thing
        self.name = name

    def spare(self, keys: Set[int]) -> None:
        """Count the tensors with these ids, and leave them as they are: others have them too."""

    def count(self, inventory: Inventory) -> None:
        """Note the storages that it will give up."""

    def give_up(self, place: str) -> BaseException | None:
        """Give up what it holds; ``place`` says where the program asked for that.

        Returns:
            An error that has been logged already. Others are raised.
        """
        return None

    def left_over(self) -> list[Target]:
        """List what is to be given up by itself, after this: a part that could not be with it."""
        return []
