"""Release optimizers, schedulers and data loaders, and stop the workers of a loader."""

from __future__ import annotations

import gc
import sys
from typing import Any

from torch_utils.releasing.modules import bury
from torch_utils.releasing.objects import contents_of, is_released
from torch_utils.releasing.storages import Inventory, Target


class TrainingTarget(Target):
    """An optimizer, a learning-rate scheduler or a data loader."""

    def count(self, inventory: Inventory) -> None:
        inventory.add_contents(self.name, contents_of(self.thing))

    def give_up(self, place: str) -> None:
        if is_released(self.thing):
            return
        samplers = [contents_of(self.thing).get(name) for name in ("batch_sampler", "sampler")]
        # A live learning-rate scheduler keeps the optimizer, which is empty then.
        bury(self.thing, f"this {self.name}", place)
        sampler = next((one for one in samplers if one is not None), None)
        for iterator in _iterators_with_workers(sampler):
            iterator._shutdown_workers()
            bury(iterator, f"the iterator of this {self.name}", place)


def _iterators_with_workers(sampler: object) -> list[Any]:
    """Return the iterators with worker processes that belong to the loader of a sampler."""
    loading = sys.modules.get("torch.utils.data.dataloader")
    kind = getattr(loading, "_MultiProcessingDataLoaderIter", None)
    found = [] if kind is None or sampler is None else gc.get_referrers(kind)
    found = [iterator for iterator in found if type(iterator) is kind]
    return [one for one in found if contents_of(one).get("_index_sampler") is sampler]
