"""The tensors that are alive, and who holds them.

PyTorch tells where memory was allocated. It does not tell what still refers to it, which is the
line to change. A census lists the storages of all tensors by the object that owns them. Holders are
named by the search that a release uses.
"""

from __future__ import annotations

import html
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, TypeVar
from weakref import ref

from torch_utils._memory import memory_snapshot
from torch_utils._release.holders import (
    Holders,
    addresses_of,
    live_objects,
    reading,
)
from torch_utils._release.objects import attributes_of, is_instance, name_of
from torch_utils._release.storages import name_of_device, storages_of
from torch_utils._report import format_bytes
from torch_utils._runtime import whole_torch

F = TypeVar("F", bound=Callable[..., Any])
SHOWN = 20  # entries of a table
_SAMPLE = 8  # tensors of an entry from which the search begins


@dataclass(frozen=True)
class LiveEntry:
    """The storages that one object owns, or loose tensors of the same shape and dtype.

    Attributes:
        what: "SentenceTransformer", "Adam (its state)", "128 tensors (32, 512) float32".
        nbytes: Their size in bytes.
        device: "host", or torch's name of the device ("cuda:0").
        storages: How many there are.
    """

    what: str
    nbytes: int
    device: str
    storages: int
    _find: Callable[[], tuple[str, ...]] = field(repr=False, compare=False)

    @cached_property
    def holders(self) -> tuple[str, ...]:
        """What refers to them, variables first; searched for when this is read first."""
        return self._find()

    def __reduce__(self) -> Any:
        find = partial(tuple, self.holders)
        return type(self), (self.what, self.nbytes, self.device, self.storages, find)

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes, for JSON."""
        names = ("what", "nbytes", "device", "storages", "holders")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        by = " and by ".join(self.holders) or "something that was not found"
        return f"{format_bytes(self.nbytes)} on {self.device}: {self.what}, held by {by}"


@dataclass(frozen=True)
class LiveMemory:
    """The tensors that were alive at one moment. ``str()`` is a table.

    Attributes:
        entries: The largest first, without those below ``least_bytes``.
        total_bytes: Bytes of all storages by device, also of those that are no entry.
        notes: What else the devices hold.
    """

    entries: tuple[LiveEntry, ...]
    total_bytes: Mapping[str, int]
    notes: tuple[str, ...] = ()
    _records: tuple[Storage, ...] = field(default=(), repr=False, compare=False)
    _least_bytes: int = field(default=1, repr=False, compare=False)

    def since(self, other: LiveMemory) -> LiveMemory:
        """Return what is new in this census, less what it replaced: see `no_growth`."""
        records = storages_since(other._records, self._records)
        return LiveMemory(
            entries_of(records, self._least_bytes), totals_of(records), (), tuple(records)
        )

    def __str__(self) -> str:
        totals = ", ".join(f"{format_bytes(n)} on {d}" for d, n in self.total_bytes.items())
        lines = [f"{totals or 'no tensors'} in {len(self._records)} storages"]
        lines += [f"  {entry}" for entry in self.entries[:SHOWN]]
        if len(self.entries) > SHOWN:
            lines.append(f"  and {len(self.entries) - SHOWN} more entries")
        return "\n".join([*lines, *self.notes])

    def _repr_html_(self) -> str:
        rows = [
            (
                format_bytes(one.nbytes),
                one.device,
                one.what,
                "<br>".join(map(html.escape, one.holders)),
            )
            for one in self.entries[:SHOWN]
        ]
        cells = [
            f"<tr><td>{size}<td>{device}<td>{html.escape(what)}<td style='text-align: left'>{by}"
            for size, device, what, by in rows
        ]
        notes = "".join(f"<p>{html.escape(one)}</p>" for one in self.notes)
        head = "<tr><th>size<th>device<th>what<th>held by"
        return f"<table>{head}{''.join(cells)}</table>{notes}"


def live_memory(*, device: Any = None, least_bytes: int = 1 << 20) -> LiveMemory:
    """List the storages of all tensors that Python knows, by the object that owns them.

    ::

        print(live_memory())
        # 181.7 MB on host in 206 storages
        #   90.9 MB on host: SentenceTransformer, held by the variable 'app' of module main: ...

    Runs no code of the program, and creates nothing on a device. It takes one or two passes over
    the heap, and up to ten more when the holders of its entries are read. Arrays of numpy and
    memory of other libraries are not counted; an array that shares a tensor's memory is a holder.
    The gradient of each parameter becomes an object of Python, if it is not yet one.

    Args:
        device: Count only this one: "host" (or "cpu"), "cuda", "cuda:0", or a `torch.device`. None
            for all.
        least_bytes: The size of the smallest entry.

    Returns:
        The census. It keeps nothing alive.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: torch knows no such device.
    """
    check_least_bytes(least_bytes)
    wanted = device_name(device)
    records, _ = scan(wanted, with_owners=True)
    totals = totals_of(records)
    notes = []
    for name, memory in memory_snapshot().devices.items():
        if not is_on(name, wanted):
            continue
        known = totals.get(name, 0)
        if memory.allocated_bytes > known:
            hidden = format_bytes(memory.allocated_bytes - known)
            notes.append(f"{name}: {hidden} in no tensor that Python knows, such as graphs")
        if (used := memory.total_bytes - memory.free_bytes) > memory.allocated_bytes:
            more = format_bytes(used - memory.allocated_bytes)
            notes.append(f"{name}: the driver reports {more} more than torch's tensors take")
    entries = entries_of(records, least_bytes)
    return LiveMemory(entries, totals, tuple(notes), tuple(records), least_bytes)


# Storages


@dataclass(frozen=True, slots=True)
class Storage:
    """One storage, as it was found.

    Attributes:
        key: Its address in memory, which another one may have later.
        shape: The shape and dtype of a tensor of it, and whether that is a gradient.
        find: Returns that tensor while it exists.
        owner: What refers to it in its name; None for a loose tensor.
        parameter: The address of the storage whose gradient it is, or 0.
    """

    key: int
    nbytes: int
    device: str
    shape: str
    find: Callable[[], Any]
    owner: _Owner | None
    parameter: int = 0


@dataclass(frozen=True, slots=True)
class _Owner:
    name: str
    key: int
    find: Callable[[], Any]


def check_least_bytes(least_bytes: Any) -> None:
    """Raise a `TypeError` unless this is an int of at least 0."""
    if type(least_bytes) is not int or least_bytes < 0:
        raise TypeError(f"least_bytes must be an int of at least 0, got {least_bytes!r}")


def device_name(device: Any) -> str | None:
    """Return a device as a census names it; None stays None."""
    torch: Any = whole_torch()
    if device is None or device in ("host", "cpu"):
        return None if device is None else "host"
    if isinstance(device, str) and torch is not None:
        try:
            torch.device(device)
        except RuntimeError:
            raise ValueError(
                f"torch knows no device {device!r}; name one such as 'cuda:0'"
            ) from None
    if isinstance(device, str):
        return device
    if torch is None or not is_instance(device, torch.device):
        raise TypeError(
            f'device must be a string such as "cuda:0" or a torch.device, got {device!r}'
        )
    return name_of_device(device)


def is_on(name: str, wanted: str | None) -> bool:
    """Return whether a device is the one that is wanted, or one of that type."""
    return wanted is None or name == wanted or name.partition(":")[0] == wanted


def totals_of(records: Iterable[Storage]) -> dict[str, int]:
    """Return the bytes of all storages by device."""
    totals = Counter[str]()
    for one in records:
        totals[one.device] += one.nbytes
    return dict(totals)


def scan(wanted: str | None, *, with_owners: bool = False) -> tuple[list[Storage], list[Any]]:
    """Return all storages that tensors use, each once, and what finds tensors with a graph."""
    torch: Any = whole_torch()
    found: dict[int, Storage] = {}
    with_graph: list[Any] = []
    with reading():
        base: Any = None if torch is None else torch.Tensor
        owners = _owners() if with_owners and torch is not None else {}
        for tensor in live_objects([base]) if torch is not None else ():
            _add(torch, found, tensor, owners.get(id(tensor)), wanted)
            if not base.is_leaf.__get__(tensor):
                with_graph.append(ref(tensor))
    return list(found.values()), with_graph


def _add(
    torch: Any, found: dict[int, Storage], tensor: Any, owner: _Owner | None, wanted: str | None
) -> None:
    """Add the storages of a tensor and of its gradient."""
    base = torch.Tensor
    gradient = None
    if base.is_leaf.__get__(tensor) and base.requires_grad.__get__(tensor):
        gradient = base.grad.__get__(tensor)
    parameter = next((key for key, _ in _sizes_of(torch, tensor)), 0)
    for one, of in ((tensor, 0), (gradient, parameter)):
        device = "meta" if one is None else name_of_device(base.device.__get__(one))
        if device == "meta" or not is_on(device, wanted):
            continue
        for key, nbytes in _sizes_of(torch, one):
            known = found.get(key)
            tells_more = (
                known is None
                or (known.owner is None and owner is not None)
                or (known.parameter == 0 and of != 0)
            )
            if nbytes and tells_more:
                dtype = str(base.dtype.__get__(one)).removeprefix("torch.")
                shape = f"{'gradient ' if of else ''}{tuple(base.size(one))} {dtype}"
                size = nbytes if known is None else max(nbytes, known.nbytes)
                # Only the parameter refers to its gradient, in C++.
                found[key] = Storage(key, size, device, shape, ref(tensor), owner, of)


def _sizes_of(torch: Any, tensor: Any) -> Iterator[tuple[int, int]]:
    """Yield the addresses and sizes of a tensor's storages.

    Asking a storage for its size leaves an object of Python behind. So that happens for views only,
    whose storage may be larger than they are.
    """
    base = torch.Tensor
    with suppress(RuntimeError, NotImplementedError, AttributeError, TypeError):
        # Fake, functional and opaque tensors have no storage, or no address.
        is_strided = base.layout.__get__(tensor) == torch.strided
        is_whole = not (base._is_view(tensor) or base.is_inference(tensor))
        if is_strided and is_whole and not base.storage_offset(tensor):
            if base.data_ptr(tensor):
                for key in addresses_of(torch, tensor):
                    yield key, base.nbytes.__get__(tensor)
            return
        for storage in storages_of(torch, tensor):
            if storage.data_ptr():
                yield storage._cdata, storage.nbytes()


def _owners() -> dict[int, _Owner]:
    """Return the outermost module, or the optimizer, of each tensor by its id."""
    torch: Any = whole_torch()
    owners: dict[int, _Owner] = {}
    parents: dict[int, Any] = {}
    modules = list(live_objects([torch.nn.Module]))
    for module in modules:
        for child in (attributes_of(module).get("_modules") or {}).values():
            parents.setdefault(id(child), module)
    for module in modules:
        top, seen = module, {id(module)}
        while id(top) in parents and id(parents[id(top)]) not in seen:
            top = parents[id(top)]
            seen.add(id(top))
        owner = _Owner(name_of(type(top)), id(top), ref(top))
        contents = attributes_of(module)
        for registry in ("_parameters", "_buffers"):
            for tensor in (contents.get(registry) or {}).values():
                owners.setdefault(id(tensor), owner)
    for optimizer in live_objects([torch.optim.Optimizer]):
        owner = _Owner(f"{name_of(type(optimizer))} (its state)", id(optimizer), ref(optimizer))
        for state in list((attributes_of(optimizer).get("state") or {}).values()):
            for tensor in list(state.values()) if type(state) is dict else ():
                owners.setdefault(id(tensor), owner)
    return owners


def entries_of(records: Iterable[Storage], least_bytes: int) -> tuple[LiveEntry, ...]:
    """Group storages by owner or shape, and by device; the largest group comes first."""
    groups: defaultdict[Any, list[Storage]] = defaultdict(list)
    for one in records:
        owner = one.shape if one.owner is None else one.owner.key
        groups[owner, one.device].append(one)
    sized = [(sum(one.nbytes for one in group), group) for group in groups.values()]
    sized = sorted((each for each in sized if each[0] >= least_bytes), key=lambda each: -each[0])
    holders = Holders([group for _, group in sized], objects_of)
    return tuple(
        LiveEntry(_what(group), nbytes, group[0].device, len(group), partial(holders.of, number))
        for number, (nbytes, group) in enumerate(sized)
    )


def _what(group: Sequence[Storage]) -> str:
    owner = group[0].owner
    if owner is not None:
        return owner.name
    count = len(group)
    noun = "tensor" if count == 1 else "tensors"
    shape = group[0].shape
    if shape.startswith("gradient "):
        noun, shape = noun.replace("tensor", "gradient"), shape.removeprefix("gradient ")
    return f"{count if count > 1 else 'a'} {noun} {shape}"


def objects_of(groups: Sequence[list[Storage]]) -> list[list[Any]]:
    """Return what the search for the holders of each group begins with."""
    targets = []
    for group in groups:
        owner = group[0].owner
        finders = [one.find for one in group[:_SAMPLE]] if owner is None else [owner.find]
        targets.append([thing for find in finders if (thing := find()) is not None])
    return targets


def storages_since(before: Iterable[Storage], after: Iterable[Storage]) -> list[Storage]:
    """Return the storages that are new, less those that replaced others of the same size.

    What has the shape of one that is gone replaces it first; then, what has its size.
    """
    old = {(one.key, one.nbytes, one.device): one for one in before}
    new = [one for one in after if old.pop((one.key, one.nbytes, one.device), None) is None]
    gone = list(old.values())
    for kind in (attrgetter("shape", "nbytes", "device"), attrgetter("nbytes", "device")):
        new, gone = _unmatched(new, gone, kind), _unmatched(gone, new, kind)
    return new


def _unmatched(
    some: list[Storage], others: list[Storage], kind: Callable[[Storage], Any]
) -> list[Storage]:
    """Return some storages, less as many of each kind as there are others of it."""
    places = Counter(map(kind, others))
    rest = []
    for one in some:
        places[kind(one)] -= 1
        if places[kind(one)] < 0:
            rest.append(one)
    return rest
