"""Optimizers: their state, and the parameters that they refer to."""

from __future__ import annotations

from torch_utils._releasing.counting import count_contents
from torch_utils._releasing.reading import contents_of
from torch_utils._releasing.storages import Inventory
from torch_utils._releasing.target import Target
from torch_utils._releasing.tombstone import bury


class OptimizerTarget(Target):
    """An optimizer: its state (two copies of the weights for Adam) and its parameters."""

    def count(self, inventory: Inventory) -> None:
        count_contents(inventory, self.name, contents_of(self.thing))

    def give_up(self, place: str) -> None:
        # A learning-rate scheduler that is still referred to keeps the optimizer, but empty.
        bury(self.thing, f"this {self.name}", place)
