"""Count storages, which hold the memory of tensors.

A weak reference to a tensor dies while a numpy view or an autograd graph still keeps the memory. A
weak reference to the tensor's storage does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from torch_utils._runtime import DEBUG, log, private, whole_torch
from torch_utils.releasing.objects import (
    LEAVES,
    Kind,
    Kinds,
    attributes_of,
    contents_of,
    name_of,
    parts_of,
)


@contextmanager
def without_overrides(torch: Any) -> Iterator[None]:
    """Disable overrides of torch's functions in this thread.

    Tensor subclasses and modes, such as a default device or fake tensors, override functions.
    """
    functions = private(torch, "_C.DisableTorchFunction") or nullcontext
    dispatch = private(torch, "_C._DisableTorchDispatch") or nullcontext
    with functions(), dispatch():
        yield


_PARTS = ("_indices", "_values")  # of a sparse tensor
_COMPRESSED_PARTS = ("crow_indices", "col_indices", "ccol_indices", "row_indices", "values")
_NAMES = ("_weak_ref", "_expired", "_free_weak_ref", "_cdata")
# glibc maps each larger block separately, so a mapped one is alive.
_OWN_MAPPING_BYTES = 32 << 20
_MOST_LOOKS = 20_000  # objects in attributes; further ones are not counted
_LEVELS = 8  # of nested containers and objects


class Held(NamedTuple):
    """One storage that a release gives up.

    Attributes:
        what: Its name in reports.
        nbytes: Its size in bytes.
        device: "host" or torch's name of the device, such as "cuda:0".
        key: The address of the C++ object.
        weak: torch's weak reference, to be freed once.
        lent_at: For memory of an array, a buffer or a file: its address, or 0. None for others.
        is_expected: Whether it should be freed, rather than belong to a module that is referred to.
        stays: Whether an object that stays whole uses it.
    """

    what: str
    nbytes: int
    device: str
    key: int
    weak: int
    lent_at: int | None
    is_expected: bool
    stays: bool


class Inventory:
    """The storages that a release is about to give up, each counted once. Not thread-safe."""

    def __init__(self) -> None:
        torch: Any = whole_torch()
        self.kinds: Kinds = Kinds(torch)
        self.own_modules: set[int] = set()
        self._torch = torch
        self._is_able = torch is not None and not any(
            private(torch, f"UntypedStorage.{name}") is None for name in _NAMES
        )
        self._is_gone: Any = private(torch, "UntypedStorage._expired")
        self._free: Any = private(torch, "UntypedStorage._free_weak_ref")
        self._storages: dict[int, Held] = {}
        self._freed: dict[str, int] = {}
        self._seen: set[int] = set()
        self._other_modules: list[Any] = []
        self._looks_left = _MOST_LOOKS
        self.is_partial = False  # something was released whose size is unknown
        self.counts_staying = False  # what is being counted stays whole

    def add(self, name: str, tensor: Any, *, is_expected: bool = True) -> None:
        """Count a tensor, its gradient and the tensors in its attributes."""
        if not self._is_able or id(tensor) in self._seen:
            return
        self._seen.add(id(tensor))
        base = self._torch.Tensor
        self._add_storages(name, tensor, is_expected)
        if base.is_leaf.__get__(tensor) or base.retains_grad.__get__(tensor):
            gradient = base.grad.__get__(tensor)
            if gradient is not None:
                self._add_storages(f"{name}.grad", gradient, is_expected)
        if not is_plain(self._torch, tensor) or contents_of(tensor):
            for part in attributes_of(tensor).values():
                self.add_contents(name, part, is_expected=is_expected)

    def add_contents(self, name: str, thing: Any, *, is_expected: bool = True) -> None:
        """Count the tensors in nested containers and objects."""
        pending = [(thing, name, _LEVELS)]
        while pending:
            thing, name, level = pending.pop()
            kind = self.kinds(thing)
            if kind is Kind.TENSOR:
                self.add(name, thing, is_expected=is_expected)
            elif kind in LEAVES or not level or id(thing) in self._seen:
                continue
            elif kind is Kind.MODULE and (is_expected or id(thing) in self.own_modules):
                self._other_modules.append(thing)
            else:
                self._seen.add(id(thing))
                for part, label in parts_of(thing, name, self.kinds):
                    self._looks_left -= 1
                    if self._looks_left < 0:
                        return
                    pending.append((part, label, level - 1))

    def add_other_modules(self) -> None:
        """Count modules that attributes of released modules refer to. Call it last.

        Objects may go after that, and others may get their ids.
        """
        while self._other_modules:
            module = self._other_modules.pop()
            if id(module) not in self.own_modules:
                self.add_contents(name_of(type(module)), module, is_expected=False)
        self._seen.clear()
        self.own_modules.clear()

    def freed_bytes(self) -> dict[str, int]:
        """Return the bytes of storages that are gone, by device, lent ones included."""
        self.forget_gone()
        freed = dict(self._freed)
        for held in self._storages.values():
            if self._is_gone(held.weak):
                freed[held.device] = freed.get(held.device, 0) + held.nbytes
        return freed

    def add_freed(self, device: str, nbytes: int) -> None:
        """Count memory outside of storages that was freed."""
        self._freed[device] = self._freed.get(device, 0) + nbytes

    def _add_storages(self, name: str, tensor: Any, is_expected: bool) -> None:
        for storage in storages_of(self._torch, tensor):
            try:
                key, nbytes = storage._cdata, storage.nbytes()
                known = self._storages.get(key)
                if known is not None and (known.is_expected or not is_expected):
                    continue
                if not nbytes or not (address := storage.data_ptr()):
                    continue
                device = place_of(storage.device)
                if device == "meta":
                    continue
                is_lent = not storage.resizable()
                lent_at = (address if device == "host" else 0) if is_lent else None
                flags = is_expected, self.counts_staying
                weak = storage._weak_ref() if known is None else known.weak
                self._storages[key] = Held(name, nbytes, device, key, weak, lent_at, *flags)
            except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
                # Fake and functional tensors have no real storage.
                log(DEBUG, "%s: its storage cannot be counted: %r", name, error)

    def absorb(self, other: Inventory) -> None:
        """Take over the storages of another inventory, which is empty afterwards."""
        if other._torch is not None:  # torch may have been imported since.
            self._torch, self._is_gone, self._free = other._torch, other._is_gone, other._free
        for device, nbytes in other._freed.items():
            self.add_freed(device, nbytes)
        for key, held in other._storages.items():
            known = self._storages.setdefault(key, held)
            if known is not held:
                self._free(held.weak)
                if held.is_expected and not known.is_expected:
                    self._storages[key] = held._replace(weak=known.weak)
        other._storages = {}

    def forget_gone(self) -> None:
        """Free the weak references of freed storages, which use the heap, and keep their sizes."""
        for key in list(self._storages):  # Pairs would set off garbage collections.
            held = self._storages[key]
            if held.lent_at is None and self._is_gone(held.weak):
                self.add_freed(held.device, held.nbytes)
                self._free(self._storages.pop(key).weak)

    def alive(self) -> list[Held]:
        """Return the storages that should be freed but still exist, the largest first."""
        return self.tally()[1]

    def tally(self) -> tuple[dict[str, int], list[Held], list[Held]]:
        """Count the freed storages. Each storage is examined once, because it may go meanwhile.

        Returns:
            A tuple of three. The freed bytes by device, which may be 0. The storages that should
            be freed but still exist, the largest first. The storages that torch freed but their
            lender (an array, a buffer, a file) still holds.
        """
        freed = dict(self._freed)
        alive, lent = [], []
        is_any_lent = any(held.lent_at is not None for held in self._storages.values())
        ranges = _mapped_ranges() if is_any_lent else None
        for held in self._storages.values():
            if not self._is_gone(held.weak):
                if held.is_expected:
                    freed.setdefault(held.device, 0)
                    alive.append(held)
            elif held.lent_at is None or _is_mapped(held, ranges) is False:
                freed[held.device] = freed.get(held.device, 0) + held.nbytes
            elif _is_mapped(held, ranges) and held.nbytes > _OWN_MAPPING_BYTES:
                lent.append(held)
        return freed, sorted(alive, key=lambda held: -held.nbytes), lent

    def free(self) -> None:
        """Free the weak references, each of which uses about 100 bytes of the C heap."""
        while self._storages:
            self._free(self._storages.popitem()[1].weak)


def is_plain(torch: Any, tensor: Any) -> bool:
    """Return whether a tensor's class is torch's own, which has no slots."""
    kind = type(tensor)
    return kind is torch.nn.Parameter or kind is torch.Tensor


def _is_mapped(held: Held, ranges: list[tuple[int, int]] | None) -> bool | None:
    """Return whether the memory of a lender still exists; None if that is unknown."""
    begin = held.lent_at
    if not begin or ranges is None:
        return None
    return any(first < begin + held.nbytes and begin < last for first, last in ranges)


def _mapped_ranges() -> list[tuple[int, int]] | None:
    """Return the address ranges of the process's mappings; None if they are unknown."""
    try:
        with Path("/proc/self/maps").open("rb") as maps:
            ranges = [line.split(None, 1)[0].split(b"-") for line in maps]
    except OSError:
        return None
    return [(int(begin, 16), int(end, 16)) for begin, end in ranges]


@lru_cache(maxsize=100)
def place_of(device: Any) -> str:
    """Return "host" for the CPU, otherwise torch's name of a device."""
    kind: str = device.type
    return "host" if kind == "cpu" else kind if kind == "meta" else str(device)


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
    for name in _PARTS if layout == torch.sparse_coo else _COMPRESSED_PARTS:
        with suppress(RuntimeError, AttributeError, NotImplementedError):
            # A CSR tensor has no ccol_indices.
            found.append(base.untyped_storage(getattr(base, name)(tensor)))
    return found
