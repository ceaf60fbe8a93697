"""Optimizers and data loaders: what they refer to, and the workers of a loader."""

from __future__ import annotations

import gc
import sys
from typing import Any

from torch_utils.releasing.modules import bury
from torch_utils.releasing.objects import contents_of, is_released
from torch_utils.releasing.storages import Inventory, Target


class TrainingTarget(Target):
    """An optimizer (its state is two copies of the weights for Adam), a scheduler, a loader."""

    def count(self, inventory: Inventory) -> None:
        inventory.add_contents(self.name, contents_of(self.thing))

    def give_up(self, place: str) -> None:
        if is_released(self.thing):
            return
        samplers = [contents_of(self.thing).get(name) for name in ("batch_sampler", "sampler")]
        # A learning-rate scheduler that is still referred to keeps the optimizer, but empty.
        bury(self.thing, f"this {self.name}", place)
        sampler = next((one for one in samplers if one is not None), None)
        for iterator in _iterators_with_workers(sampler):
            iterator._shutdown_workers()
            bury(iterator, f"the iterator of this {self.name}", place)


def _iterators_with_workers(sampler: object) -> list[Any]:
    """List the iterators that have worker processes and belong to the loader of a sampler."""
    loading = sys.modules.get("torch.utils.data.dataloader")
    kind = getattr(loading, "_MultiProcessingDataLoaderIter", None)
    found = [] if kind is None or sampler is None else gc.get_referrers(kind)
    found = [iterator for iterator in found if type(iterator) is kind]
    return [one for one in found if contents_of(one).get("_index_sampler") is sampler]
