"""Storages: what memory is, under the tensors that share it.

A tensor's own weak reference dies while a numpy view or an autograd graph keeps the memory;
a weak reference to its storage is right both times.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch_utils._runtime import DEBUG, log

SPARSE_PARTS = ("_indices", "_values")
COMPRESSED_PARTS = ("crow_indices", "col_indices", "ccol_indices", "row_indices", "values")


@dataclass(frozen=True)
class Held:
    """One storage, as it was before the release."""

    what: str
    nbytes: int
    device: str
    weak: Any

    def is_alive(self) -> bool:
        """Whether anything still refers to it."""
        return not self.weak.expired()


class Inventory:
    """The storages that a release is about to give up, each counted once."""

    def __init__(self) -> None:
        self._held: dict[int, Held] = {}
        reductions: Any = sys.modules.get("torch.multiprocessing.reductions")
        self._weak = getattr(reductions, "StorageWeakRef", None)

    def add(self, what: str, tensor: Any) -> None:
        """Note the storages under a tensor. One that has none in memory counts for nothing."""
        if self._weak is None:
            return
        for part in parts_of(tensor):
            try:
                storage = part.untyped_storage()
                key, nbytes = storage._cdata, storage.nbytes()
                # The weak reference keeps the address from being used again.
                if nbytes and key not in self._held and part.device.type != "meta":
                    self._held[key] = Held(what, nbytes, place_of(part), self._weak(storage))
            except (RuntimeError, NotImplementedError, AttributeError) as error:
                # Opaque layouts (mkldnn), fake and functional tensors: no storage to speak of.
                log(DEBUG, "%s: its storage cannot be counted: %r", what, error)

    def absorb(self, other: Inventory) -> None:
        """Count another inventory's storages too."""
        for key, held in other._held.items():
            self._held.setdefault(key, held)

    def alive(self) -> list[Held]:
        """List what is still there, the largest first."""
        return sorted((h for h in self._held.values() if h.is_alive()), key=lambda h: -h.nbytes)

    def freed_bytes(self) -> dict[str, int]:
        """Count what is gone, by place."""
        freed: dict[str, int] = {}
        for held in self._held.values():
            freed.setdefault(held.device, 0)
            if not held.is_alive():
                freed[held.device] += held.nbytes
        return freed

    def __bool__(self) -> bool:
        return bool(self._held)


def place_of(tensor: Any) -> str:
    """Name where a tensor's memory is: "host" for the CPU, else torch's name of the device."""
    device = tensor.device
    if device.type == "cpu":
        return "host"
    return str(device) if device.index is not None else f"{device.type}:0"


def parts_of(tensor: Any) -> Iterator[Any]:
    """Yield the plain tensors that make up a tensor: itself, or what a composite one wraps."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        names, _ = flatten()
        for name in names:
            yield from parts_of(getattr(tensor, name))
        return
    layout = str(getattr(tensor, "layout", ""))
    if layout == "torch.strided":
        yield tensor
        return
    names = SPARSE_PARTS if layout == "torch.sparse_coo" else COMPRESSED_PARTS
    for name in names:
        try:
            yield getattr(tensor, name)()
        except (RuntimeError, AttributeError, NotImplementedError):
            continue  # A CSR tensor has no ccol_indices, and so on.
