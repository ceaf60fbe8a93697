"""The tensors that are alive, who holds them, and what a block of code leaves behind.

PyTorch tells where memory was allocated. It does not tell what still refers to it, which is the
line to change. A census lists the storages of all tensors by the object that owns them. Holders are
named by the search that a release uses.
"""

from __future__ import annotations

import gc
import html
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial, wraps
from math import prod
from operator import attrgetter
from types import ModuleType
from typing import Any, TypeVar
from weakref import ref

from torch_utils._memory import memory_snapshot
from torch_utils._registry import ensure_ran
from torch_utils._release.graph import Graph
from torch_utils._release.holders import (
    Holders,
    Search,
    addresses_of,
    called,
    live_objects,
    reading,
    walk_graph,
)
from torch_utils._release.objects import Kinds, attributes_of, is_instance, name_of
from torch_utils._release.roots import Root
from torch_utils._release.storages import name_of_device, storages_of
from torch_utils._report import format_bytes
from torch_utils._runtime import is_before_2_10, private, reference_counts, whole_torch
from torch_utils.errors import MemoryGrowthError

F = TypeVar("F", bound=Callable[..., Any])
_SHOWN = 20  # entries of a table
_CONSTANT = 64  # bytes
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
    _records: tuple[_Storage, ...] = field(default=(), repr=False, compare=False)
    _least_bytes: int = field(default=1, repr=False, compare=False)

    def since(self, other: LiveMemory) -> LiveMemory:
        """Return what is new in this census, less what it replaced: see `no_growth`."""
        records = _grown(other._records, self._records)
        return LiveMemory(
            _entries_of(records, self._least_bytes), _totals(records), (), tuple(records)
        )

    def __str__(self) -> str:
        totals = ", ".join(f"{format_bytes(n)} on {d}" for d, n in self.total_bytes.items())
        lines = [f"{totals or 'no tensors'} in {len(self._records)} storages"]
        lines += [f"  {entry}" for entry in self.entries[:_SHOWN]]
        if len(self.entries) > _SHOWN:
            lines.append(f"  and {len(self.entries) - _SHOWN} more entries")
        return "\n".join([*lines, *self.notes])

    def _repr_html_(self) -> str:
        rows = [
            (
                format_bytes(one.nbytes),
                one.device,
                one.what,
                "<br>".join(map(html.escape, one.holders)),
            )
            for one in self.entries[:_SHOWN]
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
    wanted, _, _ = _check(device, least_bytes, ())
    records, _ = _scan(wanted, with_owners=True)
    totals = _totals(records)
    notes = []
    for name, memory in memory_snapshot().devices.items():
        if not _is_on(name, wanted):
            continue
        known = totals.get(name, 0)
        if memory.allocated_bytes > known:
            hidden = format_bytes(memory.allocated_bytes - known)
            notes.append(f"{name}: {hidden} in no tensor that Python knows, such as graphs")
        if (used := memory.total_bytes - memory.free_bytes) > memory.allocated_bytes:
            more = format_bytes(used - memory.allocated_bytes)
            notes.append(f"{name}: the driver reports {more} more than torch's tensors take")
    entries = _entries_of(records, least_bytes)
    return LiveMemory(entries, totals, tuple(notes), tuple(records), least_bytes)


# Storages


@dataclass(frozen=True, slots=True)
class _Storage:
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


def _device_name(device: Any) -> str | None:
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


def _is_on(name: str, wanted: str | None) -> bool:
    return wanted is None or name == wanted or name.partition(":")[0] == wanted


def _totals(records: Iterable[_Storage]) -> dict[str, int]:
    totals = Counter[str]()
    for one in records:
        totals[one.device] += one.nbytes
    return dict(totals)


def _scan(wanted: str | None, *, with_owners: bool = False) -> tuple[list[_Storage], list[Any]]:
    """Return all storages that tensors use, each once, and what finds tensors with a graph."""
    torch: Any = whole_torch()
    found: dict[int, _Storage] = {}
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
    torch: Any, found: dict[int, _Storage], tensor: Any, owner: _Owner | None, wanted: str | None
) -> None:
    """Add the storages of a tensor and of its gradient."""
    base = torch.Tensor
    gradient = None
    if base.is_leaf.__get__(tensor) and base.requires_grad.__get__(tensor):
        gradient = base.grad.__get__(tensor)
    parameter = next((key for key, _ in _sizes_of(torch, tensor)), 0)
    for one, of in ((tensor, 0), (gradient, parameter)):
        device = "meta" if one is None else name_of_device(base.device.__get__(one))
        if device == "meta" or not _is_on(device, wanted):
            continue
        for key, nbytes in _sizes_of(torch, one):
            known = found.get(key)
            if nbytes and (known is None or (known.owner is None and owner is not None)):
                dtype = str(base.dtype.__get__(one)).removeprefix("torch.")
                shape = f"{'gradient ' if of else ''}{tuple(base.size(one))} {dtype}"
                size = nbytes if known is None else max(nbytes, known.nbytes)
                # Only the parameter refers to its gradient, in C++.
                found[key] = _Storage(key, size, device, shape, ref(tensor), owner, of)


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


def _entries_of(records: Iterable[_Storage], least_bytes: int) -> tuple[LiveEntry, ...]:
    groups: defaultdict[Any, list[_Storage]] = defaultdict(list)
    for one in records:
        owner = one.shape if one.owner is None else one.owner.key
        groups[owner, one.device].append(one)
    sized = [(sum(one.nbytes for one in group), group) for group in groups.values()]
    sized = sorted((each for each in sized if each[0] >= least_bytes), key=lambda each: -each[0])
    holders = Holders([group for _, group in sized], _objects_of)
    return tuple(
        LiveEntry(_what(group), nbytes, group[0].device, len(group), partial(holders.of, number))
        for number, (nbytes, group) in enumerate(sized)
    )


def _what(group: Sequence[_Storage]) -> str:
    owner = group[0].owner
    if owner is not None:
        return owner.name
    count = len(group)
    noun = "tensor" if count == 1 else "tensors"
    shape = group[0].shape
    if shape.startswith("gradient "):
        noun, shape = noun.replace("tensor", "gradient"), shape.removeprefix("gradient ")
    return f"{count if count > 1 else 'a'} {noun} {shape}"


def _objects_of(groups: Sequence[list[_Storage]]) -> list[list[Any]]:
    targets = []
    for group in groups:
        owner = group[0].owner
        finders = [one.find for one in group[:_SAMPLE]] if owner is None else [owner.find]
        targets.append([thing for find in finders if (thing := find()) is not None])
    return targets


# Growth


def _grown(before: Iterable[_Storage], after: Iterable[_Storage]) -> list[_Storage]:
    """Return the storages that are new, less those that replaced others of the same size.

    What has the shape of one that is gone replaces it first; then, what has its size.
    """
    old = {(one.key, one.nbytes, one.device): one for one in before}
    new = [one for one in after if old.pop((one.key, one.nbytes, one.device), None) is None]
    gone = list(old.values())
    for shape_of in (attrgetter("shape"), lambda one: ""):
        places = Counter((shape_of(one), one.nbytes, one.device) for one in gone)
        taken = Counter[tuple[str, int, str]]()
        rest = []
        for one in new:
            kind = shape_of(one), one.nbytes, one.device
            taken[kind] += 1
            if taken[kind] > places[kind]:
                rest.append(one)
        new, unused = rest, []
        for one in gone:
            kind = shape_of(one), one.nbytes, one.device
            taken[kind] -= 1
            if taken[kind] < 0:
                unused.append(one)
        gone = unused
    return new


@dataclass(frozen=True)
class _Graphs:
    """The operations of autograd graphs, and the bytes of their results, as their shapes say.

    The tensors in a graph are known to C++ only.

    Attributes:
        find: Returns the new tensor that leads to the most of them.
        tensors: The ids of the tensors that lead to them.
    """

    nodes: int
    nbytes: int
    find: Callable[[], Any]
    tensors: frozenset[int]


def _measure_graphs(
    tensors: Iterable[Callable[[], Any]], known: frozenset[int] = frozenset()
) -> _Graphs:
    torch: Any = whole_torch()
    seen: set[Any] = set()
    ids: set[int] = set()
    nbytes, most, find = 0, 0, lambda: None
    with reading():
        for find_tensor in tensors:
            count, tensor = len(seen), find_tensor()
            start = None if tensor is None else torch.Tensor.grad_fn.__get__(tensor)
            for node in walk_graph(torch, start, seen):
                if type(node).__module__ in ("builtins", "torch.autograd"):  # None of the program.
                    for result in getattr(node, "_input_metadata", ()):
                        nbytes += prod(result.shape) * result.dtype.itemsize
            ids.add(id(tensor))
            if id(tensor) not in known and len(seen) - count > most:
                most, find = len(seen) - count, find_tensor
    return _Graphs(len(seen), nbytes, find, frozenset(ids))


class Measurement:
    """What is alive at the beginning of a block, and what is new at its end.

    Args:
        device: As in `no_growth`.
        least_bytes: As in `no_growth`.
        ignore: As in `no_growth`.
        after: The measurement of a block that has just ended, at whose end this one begins.

    Raises:
        TypeError: An argument has the wrong type.
    """

    def __init__(
        self,
        *,
        device: Any = None,
        least_bytes: int = 1,
        ignore: Any = (),
        after: Measurement | None = None,
    ) -> None:
        self._device, self._least_bytes, self._ignore = _check(device, least_bytes, ignore)
        self._allocated = self._allocated_bytes()
        self._end: tuple[list[_Storage], _Graphs] | None = None
        if after is not None and after._end is not None and after._device == self._device:
            self._records, self._graphs = after._end
            return
        gc.collect(1)  # What is young garbage now could hide what the block leaves behind.
        self._records, tensors = _scan(self._device)
        self._graphs = _measure_graphs(tensors)

    def _allocated_bytes(self) -> int | None:
        """Return what torch has allocated on the device, if it is one that tells."""
        if self._device in (None, "host"):
            return None
        devices = memory_snapshot().devices.items()
        return sum(m.allocated_bytes for name, m in devices if _is_on(name, self._device))

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Count what a block makes, such as a fixture, as if it had been there at the beginning."""
        before, _ = _scan(self._device)
        try:
            yield
        finally:
            self._records += _grown(before, _scan(self._device)[0])

    def growth(self, result: Any = None) -> tuple[LiveEntry, ...]:
        """Return what is new; a full garbage collection runs only if something seems to be.

        Args:
            result: A list with an object whose memory does not count, as far as nothing else uses
                it.
        """
        entries: tuple[LiveEntry, ...] = ()
        for is_last in (False, True):
            allocated = self._allocated_bytes()
            if allocated is not None and allocated <= (self._allocated or 0):
                return ()
            entries = self._entries(result, is_last)
            if sum(one.nbytes for one in entries) < self._least_bytes:
                return ()
            if not is_last:
                gc.collect()
        return entries

    def _entries(self, result: Any, is_last: bool) -> tuple[LiveEntry, ...]:
        after, with_graph = _scan(self._device)
        returned, has_graph = _keys_in(result)
        returned |= {one.key for one in after if one.parameter in returned}
        grown = _grown(self._records, [one for one in after if one.key not in returned])
        # What was there before, without a gradient, gets one only once.
        known = {one.key for one in self._records} - {one.parameter for one in self._records}
        grown = [one for one in grown if one.parameter not in known]
        if is_last and self._ignore:
            grown = [one for one in grown if not _is_ignored(one, self._ignore)]
        in_graphs = {one.key for one in grown if _is_in_cpp_only(one)}
        if has_graph:  # The result keeps them.
            grown = [one for one in grown if one.key not in in_graphs]
        keys = {one.key for one in grown}
        if keys:
            after, _ = _scan(self._device, with_owners=True)
            grown = [one for one in after if one.key in keys - in_graphs]
        entries = [*_entries_of(grown, 1)]
        kept = [one for one in after if one.key in keys & in_graphs]
        is_on_host = self._device in (None, "host")
        if kept or (not entries and not has_graph and is_on_host):
            entries += self._graph_entries(after, kept, with_graph, returned)
        return tuple(sorted(entries, key=lambda one: -one.nbytes))

    def _graph_entries(
        self,
        after: list[_Storage],
        kept: list[_Storage],
        with_graph: list[Any],
        returned: set[int],
    ) -> list[LiveEntry]:
        """Return what graphs keep in addition: tensors, or results that only C++ knows."""
        torch: Any = whole_torch()
        finders = (
            find
            for find in with_graph
            if (one := find()) is not None and returned.isdisjoint(addresses_of(torch, one))
        )
        graphs = _measure_graphs(finders, self._graphs.tensors)
        one, count = None, graphs.nodes - self._graphs.nodes
        if not kept and not returned:
            self._end = after, graphs
        if count <= 0:  # Torch keeps constants.
            return [*_entries_of([one for one in kept if one.nbytes > _CONSTANT], 1)]
        find = partial(_holders_of_graph, graphs.find)
        if kept:
            noun = "tensor" if len(kept) == 1 else "tensors"
            what = f"{len(kept)} {noun} of an autograd graph with {count} more operations"
            sizes = _totals(kept)
            return [LiveEntry(what, n, device, len(kept), find) for device, n in sizes.items()]
        what = f"an autograd graph with {count} more operations"
        return [LiveEntry(what, max(graphs.nbytes - self._graphs.nbytes, 1), "host", 0, find)]


def _check(device: Any, least_bytes: Any, ignore: Any) -> tuple[str | None, int, tuple[Any, ...]]:
    """Return the arguments as they are used."""
    if type(least_bytes) is not int or least_bytes < 0:
        raise TypeError(f"least_bytes must be an int of at least 0, got {least_bytes!r}")
    is_several = isinstance(ignore, (tuple, list, set, frozenset))
    ignored = tuple(ignore) if is_several else (ignore,)
    for one in ignored:
        if not (isinstance(one, (type, ModuleType)) or callable(one)):
            raise TypeError(f"ignore takes classes, modules and functions, got {one!r}")
    return _device_name(device), max(least_bytes, 1), ignored


def _holders_of_graph(find: Callable[[], Any]) -> tuple[str, ...]:
    return Holders([find], called).of(0)


def _keys_in(results: Any) -> tuple[set[int], bool]:
    """Return the addresses of storages that only a result uses, and whether it has a graph."""
    torch: Any = whole_torch()
    keys, has_graph = set[int](), False
    if not results or torch is None:
        return keys, has_graph
    kinds, base = Kinds(), torch.Tensor
    with reading():
        graph = Graph([Root(results, "", kinds.of(type(results)))], kinds)
        tensors = [n for n in graph.memory if is_instance(graph.nodes[n], base)]
        count_uses = private(torch, "Tensor._use_count") or (lambda tensor: 1)
        in_cpp = {n: 1 for n in tensors if count_uses(graph.nodes[n]) > 1}
        for number in {*tensors} - graph.users(in_cpp).keys():
            keys |= addresses_of(torch, graph.nodes[number])
            has_graph = has_graph or not base.is_leaf.__get__(graph.nodes[number])
    return keys, has_graph


def _is_in_cpp_only(one: _Storage) -> bool:
    """Return whether only C++ refers to a tensor, for example a graph that has saved it."""
    things, torch = [one.find()], whole_torch()
    count_uses = private(torch, "Tensor._use_count")
    if things[0] is None or count_uses is None or reference_counts(things) != [1]:
        return False
    if not is_before_2_10(torch):
        return bool(count_uses(things[0]) > 1)  # The reference is torch's own, for C++.
    give_back = private(torch, "Tensor._fix_weakref")
    if give_back is not None:  # C++ may own the object itself. Then it gives up its reference.
        give_back(things[0])
    return reference_counts(things) == [0]


def _is_ignored(one: _Storage, ignore: tuple[Any, ...]) -> bool:
    """Return whether a cache that is meant leads to a storage."""
    is_ignored = False
    with reading():
        search = Search(_objects_of([[one]]))
        for node in search.nodes.values():
            for each in ignore:
                if isinstance(each, ModuleType):
                    is_ignored = is_ignored or node.thing is vars(each)
                else:
                    is_ignored = is_ignored or node.thing is each
                    is_ignored = is_ignored or (
                        type(each) is type and is_instance(node.thing, each)
                    )
        search.clear()
    return is_ignored


class no_growth:  # noqa: N801  (used like a function)
    """Fail if a block of code leaves more tensor memory behind than it found.

    ::

        with no_growth():
            service.answer("a question")

        @no_growth(warmup=1)
        def test_training_step(): ...

    Growth is what is new, less what it replaced: a new storage in the place of one that is gone, of
    the same device and size, does not count. So a step of training that makes new gradients passes.
    What a decorated function returns does not count. An autograd graph that grows counts with the
    results of its operations, as ``total_loss += loss`` makes it.

    A block in which nothing grows costs two passes over the heap. If something seems to have grown,
    one full garbage collection runs first.

    Args:
        device: As in `live_memory`. For a device, torch's allocator is asked first, so that only
            growth costs a pass at the end.
        least_bytes: The growth in bytes from which on it is an error.
        warmup: How often a decorated function runs before its first measured call, with the same
            arguments, for what is made once: gradients, lazy buffers.
        ignore: Classes, modules and functions whose caches are meant: what they lead to does not
            count.

    Raises:
        MemoryGrowthError: The block left memory behind, and raised nothing itself. The message
            names the tensors and who holds them.
        TypeError: An argument has the wrong type, or the function is a generator function.
        ValueError: ``warmup`` is given for a ``with`` block, which runs once.
    """

    def __init__(
        self,
        *,
        device: Any = None,
        least_bytes: int = 1,
        warmup: int = 0,
        ignore: Any = (),
    ) -> None:
        if type(warmup) is not int or warmup < 0:
            raise TypeError(f"warmup must be an int of at least 0, got {warmup!r}")
        _check(device, least_bytes, ignore)
        self._begin = partial(Measurement, device=device, least_bytes=least_bytes, ignore=ignore)
        self._warmup = warmup
        self._measurements: list[Measurement] = []

    def __enter__(self) -> None:
        if self._warmup:
            raise ValueError("warmup is for decorated functions; run the block once before instead")
        self._measurements.append(self._begin())

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        measurement = self._measurements.pop()
        if error is None:
            _raise_growth("the block", measurement.growth())

    def __call__(self, function: F) -> F:
        """Decorate a function or a coroutine function."""
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"no_growth cannot measure a generator function, got {function!r}")
        if isinstance(function, type) or not callable(function):
            raise TypeError(f"no_growth decorates functions, got {function!r}")
        name = f"{getattr(function, '__qualname__', 'the function')}()"
        left = [self._warmup]

        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def awaiting(*args: Any, **kwargs: Any) -> Any:
                while left[0] > 0:
                    left[0] -= 1
                    await function(*args, **kwargs)
                measurement = self._begin()
                results = [await function(*args, **kwargs)]
                _raise_growth(name, measurement.growth(results))
                return results.pop()

            return awaiting  # type: ignore[return-value]

        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            while left[0] > 0:
                left[0] -= 1
                ensure_ran(function(*args, **kwargs))
            measurement = self._begin()
            results = [ensure_ran(function(*args, **kwargs))]
            _raise_growth(name, measurement.growth(results))
            return results.pop()

        return wrapper  # type: ignore[return-value]


def describe_growth(what: str, entries: Sequence[LiveEntry], advice: str) -> str:
    """Return the message for growth; it names the holders."""
    total = format_bytes(sum(one.nbytes for one in entries))
    lines = [f"{what} left {total} behind:", *(f"  {one}" for one in entries[:_SHOWN])]
    if len(entries) > _SHOWN:
        lines.append(f"  and {len(entries) - _SHOWN} more")
    lines.append(advice)
    return "\n".join(lines)


def _raise_growth(what: str, entries: tuple[LiveEntry, ...]) -> None:
    if entries:
        advice = (
            "If it is made only once, such as a lazy buffer, run the code once before, or decorate "
            "with warmup=1. If it is a cache that is meant, pass its owner as ignore=."
        )
        raise MemoryGrowthError(describe_growth(what, entries, advice), entries)
