"""Storages: what memory is, under the tensors that share it.

A tensor's own weak reference dies while a numpy view or an autograd graph keeps the memory;
a weak reference to its storage is right both times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, repeat
from operator import and_, eq, not_
from pathlib import Path
from typing import Any, NamedTuple

from torch_utils._releasing.reading import Kinds
from torch_utils._releasing.weak_storages import Noted, StorageReader
from torch_utils._runtime import DEBUG, log, whole_torch

SPARSE_PARTS = ("_indices", "_values")
COMPRESSED_PARTS = ("crow_indices", "col_indices", "ccol_indices", "row_indices", "values")
LENDER = "the array or buffer that it was made from"

# glibc takes larger blocks from the system one by one: as long as they are mapped, they live.
_OWN_MAPPING_BYTES = 32 << 20
_AT_ONCE = 512  # entries that are asked in one step, while other threads wait
_MOST_LOOKS = 100_000  # at entries of containers; what lies behind them is not counted


class Held(NamedTuple):
    """One storage that is still there.

    Attributes:
        key: The storage's address; 0 if torch let go of it and only its lender has it.
    """

    what: str
    nbytes: int
    device: str
    key: int


class _Notes:
    """Storages: each an entry in flat lists, for thousands of records are thousands of objects."""

    def __init__(self) -> None:
        self.weak: list[int] = []
        self.keys: list[int] = []
        self.sizes: list[int] = []
        self.devices: list[str] = []
        # Of many at once: what makes the name of one, and the number that it asks for.
        self.owners: list[Any] = []
        self.names: list[Any] = []

    def append(self, weak: int, key: int, nbytes: int, device: str, owner: Any, name: Any) -> None:
        self.mend()
        self.keys.append(key)
        self.sizes.append(nbytes)
        self.devices.append(device)
        self.owners.append(owner)
        self.names.append(name)
        self.weak.append(weak)  # Last: an entry is there when its weak reference is.

    def mend(self) -> None:
        """Drop the half of an entry that an interrupt has left."""
        count = len(self.weak)
        if len(self.keys) != count:
            for column in (self.keys, self.sizes, self.devices, self.owners, self.names):
                del column[count:]

    def _columns(self) -> tuple[list[Any], ...]:
        return self.weak, self.keys, self.sizes, self.devices, self.owners, self.names

    def chosen(self, begin: int, wanted: Iterable[bool]) -> _Notes:
        """Copy those of the entries from there on that are wanted."""
        which, made = list(wanted), _Notes()
        for mine, theirs in zip(made._columns(), self._columns(), strict=True):
            mine += compress(theirs[begin : begin + len(which)], which)
        return made

    def extend(self, others: _Notes) -> None:
        """Take over the entries of another one."""
        self.mend()
        weak, *rest = zip(self._columns(), others._columns(), strict=True)
        for mine, theirs in (*rest, weak):  # In this order: see `append`.
            mine += theirs

    def entry(self, index: int) -> tuple[int, int, str, Any, Any]:
        """Return what is noted beside the weak reference."""
        return (
            *(self.keys[index], self.sizes[index], self.devices[index]),
            *(self.owners[index], self.names[index]),
        )

    def held(self, index: int) -> Held:
        owner, name = self.owners[index], self.names[index]
        what = _join(owner, name) if type(owner) is str else owner(name)
        return Held(what, self.sizes[index], self.devices[index], self.keys[index])


class _Lent(NamedTuple):
    """A storage over memory that is not torch's to free."""

    held: Held
    weak: int
    begin: int


class Inventory:
    """The storages that a release is about to give up, each counted once.

    What lies beyond (in a module that one of the released only refers to) is counted as freed
    where it goes as well, but nobody said that it would. Used by one thread.
    """

    def __init__(self) -> None:
        torch = whole_torch()
        self.reader = StorageReader(torch) if torch is not None else None
        self._is_expired: Any = self.reader.is_expired if self.reader is not None else None
        self._free: Any = self.reader.free if self.reader is not None else None
        self._own, self._beyond = _Notes(), _Notes()
        self._lent: list[_Lent] = []
        self.known: set[int] = set()
        self._freed: dict[str, int] = {}
        # How far the counting has come; see counting.py.
        self.plain_tensors: tuple[Any, ...] = self.reader.plain_kinds if self.reader else ()
        self.kinds = Kinds(torch)
        self.own_modules: set[int] = set()
        self.referred_to: list[Any] = []
        self.looked_into: set[int] = set()
        self.looks_left = _MOST_LOOKS

    def __bool__(self) -> bool:
        return bool(self._own.weak or self._beyond.weak or self._lent or self._freed)

    def free(self) -> None:
        """Free the weak references, each of which keeps a hundred bytes of the C heap.

        Not in a destructor: an interrupt that came there would be printed, and lost.
        """
        if self._free is not None:
            for numbers in (self._own.weak, self._beyond.weak):
                while numbers:
                    self._free(numbers.pop())
            while self._lent:
                self._free(self._lent.pop().weak)

    def add(self, owner: str, name: str, tensor: Any, *, beyond: bool = False) -> None:
        """Note the storages under a tensor. One that has none in memory counts for nothing."""
        reader = self.reader
        if reader is None:
            return
        try:
            if reader.is_plain(tensor):
                key = reader.address(tensor)
                if key not in self.known:
                    self._enter(reader.note(tensor), key, "host", owner, name, beyond)
                    self.known.add(key)
                return
        except NotImplementedError:
            pass  # A sparse tensor has several.
        for part in parts_of(tensor):
            try:
                storage = reader.storage_of(part)
                key, place = storage._cdata, place_of(storage.device)
                if key not in self.known and place != "meta" and storage.data_ptr():
                    self.known.add(key)
                    self._enter(reader.note_object(storage), key, place, owner, name, beyond)
            except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
                # Opaque layouts (mkldnn), fake and functional tensors: no storage to speak of.
                log(DEBUG, "%s.%s: its storage cannot be counted: %r", owner, name, error)

    def enter_all(
        self,
        weak: list[int],
        keys: Sequence[int],
        sizes: Sequence[int],
        names: Callable[[int], str],
        positions: Sequence[int],
    ) -> None:
        """Enter what was noted of torch's own storages on the host; names are made if asked for."""
        notes, count = self._own, len(weak)
        notes.mend()
        notes.keys += keys
        notes.sizes += sizes
        notes.devices += repeat("host", count)
        notes.owners += repeat(names, count)
        notes.names += positions
        notes.weak += weak  # Last: see `_Notes.append`.
        self.known.update(keys)

    def _enter(
        self, noted: Noted, key: int, place: str, owner: str, name: str, beyond: bool
    ) -> None:
        if not noted.nbytes:
            self._free(noted.weak)
        elif noted.is_lent:
            held = Held(_join(owner, name), noted.nbytes, place, key)
            self._lent.append(_Lent(held, noted.weak, noted.begin))
        else:
            notes = self._beyond if beyond else self._own
            notes.append(noted.weak, key, noted.nbytes, place, owner, name)

    def add_freed(self, place: str, nbytes: int) -> None:
        """Note memory outside of storages that has been given back."""
        self._freed[place] = self._freed.get(place, 0) + nbytes

    def absorb(self, other: Inventory) -> None:
        """Count what another inventory has counted, which is empty afterwards."""
        for place, nbytes in other._freed.items():
            self.add_freed(place, nbytes)
        for mine, theirs in ((self._own, other._own), (self._beyond, other._beyond)):
            while theirs.weak:
                entry = theirs.entry(len(theirs.weak) - 1)
                weak = theirs.weak.pop()
                if entry[0] in self.known:
                    self._free(weak)
                else:
                    self.known.add(entry[0])
                    mine.append(weak, *entry)
        while other._lent:
            lent = other._lent.pop()
            if lent.held.key in self.known:
                self._free(lent.weak)
            else:
                self.known.add(lent.held.key)
                self._lent.append(lent)
        other._own, other._beyond = _Notes(), _Notes()

    def forget_gone(self) -> None:
        """Forget what is gone, but for its size: its weak references are a part of the heap."""
        for name in ("_own", "_beyond"):
            notes, kept = getattr(self, name), _Notes()
            setattr(self, name, kept)  # First: what is interrupted must free nothing twice.
            for start in range(0, len(notes.weak), _AT_ONCE):
                weak = notes.weak[start : start + _AT_ONCE]
                gone = list(map(self._is_expired, weak))
                if not all(gone):
                    kept.extend(notes.chosen(start, map(not_, gone)))
                    weak = list(compress(weak, gone))
                devices = notes.devices[start : start + _AT_ONCE]
                for place in {*devices}:
                    chosen = map(and_, gone, map(eq, devices, repeat(place)))
                    sizes = notes.sizes[start : start + _AT_ONCE]
                    self.add_freed(place, sum(compress(sizes, chosen)))
                deque(map(self._free, weak), maxlen=0)
        self.known = {*self._own.keys, *self._beyond.keys, *(e.held.key for e in self._lent)}

    def alive(self) -> list[Held]:
        """List what was expected to go and is still there, the largest first."""
        return self.tally()[1]

    def freed_bytes(self) -> dict[str, int]:
        """Count what is gone, by place; the places of what is not have their zero."""
        return self.tally()[0]

    def tally(self) -> tuple[dict[str, int], list[Held]]:
        """Count what is gone, by place, and list what is still there, the largest first.

        Each storage is asked once, for it may go while this is at work.
        """
        freed = dict(self._freed)
        alive: list[Held] = []
        for notes in (self._own, self._beyond):
            for index, weak in enumerate(notes.weak):
                place, gone = notes.devices[index], self._is_expired(weak)
                if gone or notes is self._own:
                    freed[place] = freed.get(place, 0) + (notes.sizes[index] if gone else 0)
                if not gone and notes is self._own:
                    alive.append(notes.held(index))
        for lent, is_mapped in self._given_back():
            if is_mapped is False:
                freed["host"] = freed.get("host", 0) + lent.held.nbytes
        alive += [lent.held for lent in self._lent if not self._is_expired(lent.weak)]
        return freed, sorted(alive, key=lambda held: -held.nbytes)

    def still_lent(self) -> list[Held]:
        """List what torch let go of and its lender still has, where that is certain."""
        return [
            lent.held._replace(key=0)
            for lent, is_mapped in self._given_back()
            if is_mapped and lent.held.nbytes > _OWN_MAPPING_BYTES
        ]

    def _given_back(self) -> list[tuple[_Lent, bool | None]]:
        """List the lent storages that are gone, and say whether their memory is still mapped.

        None where that is not known: torch has given it back, but whether its lender has
        freed it, nobody here can say.
        """
        gone = [lent for lent in self._lent if self._is_expired(lent.weak)]
        mapped = _mapped_ranges() if gone else None
        return [(lent, _is_mapped(lent, mapped)) for lent in gone]


def _join(owner: str, name: str) -> str:
    return f"{owner}.{name}" if owner and name else owner or name


def place_of(device: Any) -> str:
    """Name where memory is: "host" for the CPU, else torch's name of the device."""
    kind: str = device.type
    return "host" if kind == "cpu" else kind if kind == "meta" else str(device)


def _mapped_ranges() -> list[tuple[int, int]] | None:
    """List the process's mappings, in order; None where the system does not tell."""
    try:
        with Path("/proc/self/maps").open("rb") as maps:
            ranges = [line.split(None, 1)[0].split(b"-") for line in maps]
    except OSError:
        return None
    return [(int(begin, 16), int(end, 16)) for begin, end in ranges]


def _is_mapped(lent: _Lent, ranges: list[tuple[int, int]] | None) -> bool | None:
    if ranges is None or not lent.begin:
        return None
    end = lent.begin + lent.held.nbytes
    return any(begin < end and lent.begin < stop for begin, stop in ranges)


def parts_of(tensor: Any) -> list[Any]:
    """List the plain tensors that make up a tensor: itself, or a sparse one's indices and values.

    Runs no code of the tensor's class. What a wrapper has in its attributes is not among them.
    """
    torch = whole_torch()
    if torch is None:
        return []
    parts = []
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        layout = torch.Tensor.layout.__get__(tensor)
        if layout == torch.strided:
            return [tensor]
        for name in SPARSE_PARTS if layout == torch.sparse_coo else COMPRESSED_PARTS:
            try:
                parts.append(getattr(torch.Tensor, name)(tensor))
            except (RuntimeError, AttributeError, NotImplementedError):
                continue  # A CSR tensor has no ccol_indices, and so on.
    return parts
