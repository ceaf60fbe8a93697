"""Storages: what memory is, under the tensors that share it.

A tensor's own weak reference dies while a numpy view or an autograd graph keeps the memory;
a weak reference to its storage is right both times.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch_utils._runtime import DEBUG, loaded_torch, log

SPARSE_PARTS = ("_indices", "_values")
COMPRESSED_PARTS = ("crow_indices", "col_indices", "ccol_indices", "row_indices", "values")


class Held(NamedTuple):
    """One storage, as it was before the release."""

    what: str
    nbytes: int
    device: str
    weak: Any
    key: int

    def is_alive(self) -> bool:
        """Whether anything still refers to it."""
        return not self.weak.expired()


class Inventory:
    """The storages that a release is about to give up, each counted once."""

    def __init__(self) -> None:
        self._held: dict[int, Held] = {}
        self._freed: dict[str, int] = {}
        reductions: Any = sys.modules.get("torch.multiprocessing.reductions")
        self._weak = getattr(reductions, "StorageWeakRef", None)
        torch = loaded_torch()
        self._plain: tuple[type, ...] = ()
        self._strided: Any = None
        if torch is not None and self._weak is not None:
            self._plain, self._strided = (torch.Tensor, torch.nn.Parameter), torch.strided
        self._places: dict[Any, str] = {}

    def add(self, what: str, tensor: Any) -> None:
        """Note the storages under a tensor. One that has none in memory counts for nothing."""
        if self._weak is None:
            return
        plain = type(tensor) in self._plain and tensor.layout == self._strided
        for part in (tensor,) if plain else parts_of(tensor):
            try:
                storage = part.untyped_storage()
                key, nbytes = storage._cdata, storage.nbytes()
                # The weak reference keeps the address from being used again.
                if nbytes and key not in self._held:
                    place = self._place_of(part.device)
                    if place != "meta":
                        weak = self._weak(storage)
                        self._held[key] = Held(what, nbytes, place, weak, key)
            except (RuntimeError, NotImplementedError, AttributeError) as error:
                # Opaque layouts (mkldnn), fake and functional tensors: no storage to speak of.
                log(DEBUG, "%s: its storage cannot be counted: %r", what, error)

    def add_freed(self, place: str, nbytes: int) -> None:
        """Note memory outside of storages that has been given back."""
        self._freed[place] = self._freed.get(place, 0) + nbytes

    def _place_of(self, device: Any) -> str:
        """Name where memory is: "host" for the CPU, else torch's name of the device."""
        place = self._places.get(device)
        if place is None:
            kind = device.type
            place = "host" if kind == "cpu" else kind if kind == "meta" else str(device)
            self._places[device] = place
        return place

    def absorb(self, other: Inventory) -> None:
        """Count another inventory's storages too."""
        for key, held in other._held.items():
            self._held.setdefault(key, held)
        for place, nbytes in other._freed.items():
            self._freed[place] = self._freed.get(place, 0) + nbytes

    def alive(self) -> list[Held]:
        """List what is still there, the largest first.

        Forgets what is gone, but for its size: a weak reference keeps a hundred bytes of the
        C heap, and thousands of them would keep as many pages from going back.
        """
        for key in [key for key, held in self._held.items() if not held.is_alive()]:
            gone = self._held.pop(key)
            self._freed[gone.device] = self._freed.get(gone.device, 0) + gone.nbytes
        return sorted(self._held.values(), key=lambda held: -held.nbytes)

    def freed_bytes(self) -> dict[str, int]:
        """Count what is gone, by place."""
        alive = self.alive()
        return {**{held.device: 0 for held in alive}, **self._freed}

    def __bool__(self) -> bool:
        return bool(self._held or self._freed)


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
