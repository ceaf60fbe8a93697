"""Measure the memory that an object holds, without changing it."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from typing import Any

from torch_utils._runtime import whole_torch
from torch_utils.releasing.objects import attributes_of, is_instance
from torch_utils.releasing.plan import contents_to_measure
from torch_utils.releasing.storages import Inventory, without_overrides
from torch_utils.releasing.targets import CloseTarget, FaissTarget, HolderTarget, Target


def sizes_of(thing: Any) -> dict[str, int]:
    """Return the bytes of an object's tensors, numpy arrays and faiss indexes.

    What `release` would find counts, and the attributes of resources. The weights of quantized
    modules in C++ and the graphs of indexes are not counted.

    Returns:
        Bytes by "host" and device ("cuda:0"); empty if nothing is found.
    """
    inventory, sizes = Inventory(), Counter[str]()
    try:
        with without_overrides(whole_torch()):
            targets, containers = contents_to_measure(thing)
            for target in targets:
                target.count(inventory)
        for held in inventory.alive():
            sizes[held.device] += held.nbytes
        indexes: dict[int, int] = {}
        for target in targets:
            if isinstance(target, FaissTarget):
                indexes.update((id(one()), nbytes) for one, nbytes in target.sizes())
        sizes["host"] += sum(indexes.values()) + _array_bytes(targets, containers)
    finally:
        inventory.free()
    return {device: nbytes for device, nbytes in sizes.items() if nbytes}


def _array_bytes(targets: list[Target], containers: list[Any]) -> int:
    """Return the bytes of the arrays that own their memory; views lead to their owner."""
    kind: Any = getattr(sys.modules.get("numpy"), "ndarray", None)
    pending = [part for container in containers for part in gc.get_referents(container)]
    for target in targets:
        if isinstance(target, (HolderTarget, CloseTarget)):
            pending += attributes_of(target.thing).values()
    owners: dict[int, int] = {}
    while pending and kind is not None:
        part = pending.pop()
        if type(part) in (dict, tuple) and not gc.is_tracked(part):  # No walk enters these.
            pending += gc.get_referents(part)
        elif is_instance(part, kind):
            base = kind.base.__get__(part)
            if base is None:
                owners[id(part)] = kind.nbytes.__get__(part)
            pending.append(base)
    return sum(owners.values())
