"""How many bytes an object's tensors take, as a release of it would count them."""

from __future__ import annotations

from typing import Any

from torch_utils._releasing.plan import plan
from torch_utils._releasing.storages import Inventory

__all__ = ["storage_bytes"]


def storage_bytes(thing: Any) -> dict[str, int]:
    """Count the storages that belong to an object, by "host" and device; touches nothing.

    Empty for what `release` does not know. Walks the heap once, at most.
    """
    try:
        targets = plan([thing])
    except TypeError:
        return {}
    inventory = Inventory()
    sizes: dict[str, int] = {}
    try:
        for target in targets:
            target.count(inventory)
        for held in inventory.alive():
            sizes[held.device] = sizes.get(held.device, 0) + held.nbytes
    finally:
        inventory.free()
    return sizes
