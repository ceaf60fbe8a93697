"""Count memory by weak references to storages, which say what is gone and what still exists.

A weak reference to a tensor dies while a numpy view or an autograd graph still keeps the memory. A
weak reference to the tensor's storage, which holds the memory, does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import ref

from torch_utils._memory import is_resident
from torch_utils._release.graph import Graph
from torch_utils._release.objects import (
    TENSOR,
    Kinds,
    bases_of,
    is_instance,
    name_of,
    without_overrides,
)
from torch_utils._release.roots import Root
from torch_utils._runtime import DEBUG, log, private, whole_torch

_LEAST_LENT = 1 << 18  # Of less, the pages do not tell.
_INDICES = [f"{kind}_indices" for kind in ("", "crow", "col", "ccol", "row")]


class _Arrays:
    """The functions of torch.UntypedStorage for weak references, for those to numpy arrays."""

    @staticmethod
    def _expired(weak: Any) -> bool:
        return weak() is None

    @staticmethod
    def _free_weak_ref(weak: Any) -> None: ...


class Part(NamedTuple):
    """An object that stays whole, because something else uses it.

    Attributes:
        name: Its name in reports.
        get: Returns the object; None if it is gone, or cannot be weakly referenced.
    """

    name: str
    get: Callable[[], Any]


@dataclass(slots=True)
class Held:
    """One storage, or one array, that a release gives up.

    One object for each, because more of them would set off garbage collections.

    Attributes:
        what: Its name in reports.
        nbytes: Its size in bytes.
        device: "host" or torch's name of the device, such as "cuda:0".
        key: The address of the C++ object; the id of an array.
        is_expected: Whether it should be freed. The parameters of an optimizer belong to others.
        part: The part that stays whole and holds it, or None.
        kind: The class with the functions for weak references to it.
        weak: A weak reference to it.
        lent_at: The address of memory that an array, a buffer or a file has lent; otherwise 0.
    """

    what: str
    nbytes: int
    device: str
    key: int
    is_expected: bool
    part: Part | None
    kind: Any
    weak: Any
    lent_at: int = 0

    def is_gone(self) -> bool:
        """Return whether it was freed."""
        return bool(self.kind._expired(self.weak))

    def __del__(self) -> None:
        self.kind._free_weak_ref(self.weak)


_How = tuple[bool, Part | None]
"""Whether memory is expected to be freed, and the part that stays and holds it."""


class Storages:
    """The memory that a release gives up, each storage once. Not thread-safe.

    Attributes:
        freed: The bytes that were freed, by device, when `alive` was last called.
    """

    def __init__(self) -> None:
        self._held: dict[int, Held] = {}
        self._lent: list[tuple[int, int]] = []
        self.freed: Counter[str] = Counter()

    def add(self, graph: Graph, kinds: Kinds) -> bool:
        """Count the memory in a graph. Call this inside `without_overrides`.

        Returns:
            Whether all of it can be counted; not packed weights and opaque layouts.
        """
        torch: Any = whole_torch()
        counts = private(torch, "UntypedStorage._weak_ref") and private(
            torch, "UntypedStorage._expired"
        )
        is_whole, parts = not graph.is_partial, _parts_of(graph)
        for number in graph.memory:
            one, name = graph.nodes[number], graph.name_of(number)
            how = number not in graph.unexpected, parts.get(number)
            if kinds.of(type(one)) != TENSOR:
                self._add_array(one, name, how)
            elif counts is not None:
                is_whole &= self._add_tensor(torch, one, name, how)
        return is_whole

    def _add_tensor(self, torch: Any, tensor: Any, name: str, how: _How) -> bool:
        """Count a tensor and its gradient; return whether its memory is known."""
        base = torch.Tensor
        is_known = self._add_storages(torch, tensor, name, how)
        if base.is_leaf.__get__(tensor) or base.retains_grad.__get__(tensor):
            gradient = base.grad.__get__(tensor)
            if gradient is not None:
                self._add_storages(torch, gradient, f"{name}.grad", how)
        return is_known

    def _add_storages(self, torch: Any, tensor: Any, name: str, how: _How) -> bool:
        storages = storages_of(torch, tensor)
        for storage in storages:
            try:
                device = storage.device
                if device.type != "meta" and storage.data_ptr():
                    what = (name, storage.nbytes(), name_of_device(device), storage._cdata)
                    is_lent = device.type == "cpu" and not storage.resizable()
                    weak = torch.UntypedStorage, storage._weak_ref()
                    held = Held(*what, *how, *weak)
                    held.lent_at = storage.data_ptr() if is_lent else 0
                    self._add(held)
            except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
                # Fake and functional tensors have no real storage.
                log(DEBUG, "%s: its storage cannot be counted: %r", name, error)
        return bool(storages)

    def _add_array(self, array: Any, name: str, how: _How) -> None:
        """Count a numpy array that owns its memory, or the one that an array is a view of."""
        # A program may hide numpy from imports.
        kind: Any = next(base for base in bases_of(type(array)) if name_of(base) == "ndarray")
        while is_instance(base := kind.base.__get__(array), kind):
            array = base
        if base is None:
            what = (name, kind.nbytes.__get__(array), "host", id(array))
            self._add(Held(*what, *how, _Arrays, ref(array)))

    def _add(self, held: Held) -> None:
        known = self._held.get(held.key)
        if known is not None and known.is_expected >= held.is_expected:
            known.part = known.part or held.part
        elif held.nbytes:
            self._held[held.key] = held

    def alive(self) -> list[Held]:
        """Return what should be freed but still exists, the largest first."""
        alive = []
        for key in list(self._held):  # Pairs would set off garbage collections.
            held = self._held[key]
            if held.is_gone():
                self.freed[held.device] += held.nbytes
                if held.lent_at and held.nbytes >= _LEAST_LENT:
                    self._lent.append((held.lent_at, held.nbytes))
                del self._held[key]
            elif held.is_expected:
                alive.append(held)
        return sorted(alive, key=attrgetter("nbytes"), reverse=True)

    def take_lent_bytes(self) -> int:
        """Return how many of the freed bytes their owners still have, and count them no longer."""
        lent = sum(nbytes for address, nbytes in self._lent if is_resident(address, nbytes))
        self._lent.clear()
        if lent:
            self.freed["host"] -= lent
        return lent

    def footprint(self) -> dict[Hashable, tuple[str, int]]:
        """Return the device and the bytes of each piece of memory that still exists, by its key."""
        return {held.key: (held.device, held.nbytes) for held in self.alive()}


def _parts_of(graph: Graph) -> dict[int, Part]:
    """Return what stays whole, by the numbers of all to which it leads."""
    parts: dict[int, Part] = {}
    for number, user in graph.stays.items():
        if user not in parts:
            one, name, get = graph.nodes[user], graph.name_of(user), lambda: None
            if type(one) is dict and graph.has_attributes(user):
                name = f"{name}.__dict__"  # Several objects may share it.
            with suppress(TypeError):  # A list, a dictionary, an object with slots.
                get = ref(one)
            one = None
            parts[user] = Part(name, get)
        parts[number] = parts[user]
    return parts


def storages_in(thing: Any) -> Storages:
    """Count an object's tensors and numpy arrays, without changing it.

    Packed weights, the memory of other libraries, and what lies behind more than 50,000 objects
    are not counted.
    """
    storages, kinds = Storages(), Kinds()
    root = Root(thing, name_of(type(thing)), kinds.of(type(thing)))
    with without_overrides(whole_torch()):
        storages.add(Graph([root], kinds), kinds)
    return storages


@lru_cache(maxsize=100)
def name_of_device(device: Any) -> str:
    """Return "host" for the CPU, otherwise torch's name of a device."""
    return "host" if device.type == "cpu" else str(device)


def storages_of(torch: Any, tensor: Any) -> list[Any]:
    """Return the storages of a tensor: one, those of a sparse tensor's parts, or none.

    Call it inside `without_overrides`. The attributes of a wrapper tensor are not included.
    """
    base = torch.Tensor
    layout = base.layout.__get__(tensor)
    try:
        if layout == torch.strided:
            return [base.untyped_storage(tensor)]
    except (RuntimeError, NotImplementedError):  # Opaque layouts, such as mkldnn's, have none.
        return []
    found = []
    for name in ("values", "_values", *_INDICES):
        with suppress(RuntimeError, AttributeError, NotImplementedError):
            # No layout has all of them.
            found.append(base.untyped_storage(getattr(base, name)(tensor)))
    return found


def group_by_part(alive: list[Held]) -> list[list[Held]]:
    """Return memory in groups; what stays whole is one group for each device."""
    groups: dict[tuple[int, str], list[Held]] = {}
    for one in alive:
        key = one.key if one.part is None else id(one.part)
        groups.setdefault((key, one.device), []).append(one)
    return list(groups.values())
