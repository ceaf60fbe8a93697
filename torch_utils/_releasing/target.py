"""One object to release, whatever its kind: what is counted before, and how it is given up."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from torch_utils._releasing.claims import claim, drop_claims
from torch_utils._releasing.storages import Inventory
from torch_utils._releasing.tombstone import is_released


class Target:
    """One object to release.

    Attributes:
        name: What reports call it.
        closes: Whether giving it up calls the program's own code. Only such targets are given
            up while the program ends; the memory of everything else goes with the process.
        is_mine: Whether this release gives it up, and no other thread's that came first.
    """

    closes = False
    is_mine = True

    def __init__(self, thing: Any, name: str) -> None:
        self.thing = thing
        self.name = name

    def claim(self, caller: Any) -> None:
        """Have other threads leave it to this release, unless one of them has it already."""
        self.is_mine = claim((self.thing,), caller)[0] and not is_released(self.thing)

    def drop_claim(self, caller: Any) -> None:
        """Undo `claim`, when it has been given up."""
        drop_claims((self.thing,), caller)

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


class MethodTarget(Target):
    """A method of the program's, which is called; what it holds is not counted here."""

    def claim(self, caller: Any) -> None:
        """Leave it to the method what a second call does."""

    drop_claim = claim
