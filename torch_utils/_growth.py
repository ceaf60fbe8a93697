"""What a block of code leaves behind: `no_growth`, and the measurement of the pytest plugin."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from math import prod
from types import ModuleType
from typing import Any, TypeVar

from torch_utils._census import (
    SHOWN,
    LiveEntry,
    Storage,
    check_least_bytes,
    device_name,
    entries_of,
    is_on,
    objects_of,
    scan,
    storages_since,
    totals_of,
)
from torch_utils._memory import memory_snapshot
from torch_utils._registry import ensure_ran
from torch_utils._release.graph import Graph
from torch_utils._release.holders import Holders, Search, addresses_of, called, reading, walk_graph
from torch_utils._release.objects import Kinds, is_instance
from torch_utils._release.roots import Root
from torch_utils._report import format_bytes
from torch_utils._runtime import is_before_2_10, private, reference_counts, whole_torch
from torch_utils.errors import MemoryGrowthError

F = TypeVar("F", bound=Callable[..., Any])
_CONSTANT = 64  # bytes


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


class GrowthMeasurement:
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
        after: GrowthMeasurement | None = None,
    ) -> None:
        self._device, self._least_bytes, self._ignore = _checked(device, least_bytes, ignore)
        self._allocated = self._allocated_bytes()
        self._end: tuple[list[Storage], _Graphs] | None = None
        if after is not None and after._end is not None and after._device == self._device:
            self._records, self._graphs = after._end
            return
        gc.collect(1)  # What is young garbage now could hide what the block leaves behind.
        self._records, tensors = scan(self._device)
        self._graphs = _measure_graphs(tensors)

    def _allocated_bytes(self) -> int | None:
        """Return what torch has allocated on the device, if it is one that tells."""
        if self._device in (None, "host"):
            return None
        devices = memory_snapshot().devices.items()
        return sum(m.allocated_bytes for name, m in devices if is_on(name, self._device))

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Count what a block makes, such as a fixture, as if it had been there at the beginning."""
        before, _ = scan(self._device)
        try:
            yield
        finally:
            self._records += storages_since(before, scan(self._device)[0])

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
        after, with_graph = scan(self._device)
        returned, has_graph = _keys_in(result)
        returned |= {one.key for one in after if one.parameter in returned}
        grown = storages_since(self._records, [one for one in after if one.key not in returned])
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
            after, _ = scan(self._device, with_owners=True)
            grown = [one for one in after if one.key in keys - in_graphs]
        entries = [*entries_of(grown, 1)]
        kept = [one for one in after if one.key in keys & in_graphs]
        is_on_host = self._device in (None, "host")
        if kept or (not entries and not has_graph and is_on_host):
            entries += self._graph_entries(after, kept, with_graph, returned)
        return tuple(sorted(entries, key=lambda one: -one.nbytes))

    def _graph_entries(
        self,
        after: list[Storage],
        kept: list[Storage],
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
            return [*entries_of([one for one in kept if one.nbytes > _CONSTANT], 1)]
        find = partial(_holders_of_graph, graphs.find)
        if kept:
            noun = "tensor" if len(kept) == 1 else "tensors"
            what = f"{len(kept)} {noun} of an autograd graph with {count} more operations"
            sizes = totals_of(kept)
            return [LiveEntry(what, n, device, len(kept), find) for device, n in sizes.items()]
        what = f"an autograd graph with {count} more operations"
        return [LiveEntry(what, max(graphs.nbytes - self._graphs.nbytes, 1), "host", 0, find)]


def _checked(device: Any, least_bytes: Any, ignore: Any) -> tuple[str | None, int, tuple[Any, ...]]:
    """Return the arguments as they are used."""
    check_least_bytes(least_bytes)
    is_several = isinstance(ignore, (tuple, list, set, frozenset))
    ignored = tuple(ignore) if is_several else (ignore,)
    for one in ignored:
        if not (isinstance(one, (type, ModuleType)) or callable(one)):
            raise TypeError(f"ignore takes classes, modules and functions, got {one!r}")
    return device_name(device), max(least_bytes, 1), ignored


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


def _is_in_cpp_only(one: Storage) -> bool:
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


def _is_ignored(one: Storage, ignore: tuple[Any, ...]) -> bool:
    """Return whether a cache that is meant leads to a storage."""
    is_ignored = False
    with reading():
        search = Search(objects_of([[one]]))
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
        _checked(device, least_bytes, ignore)
        self._begin = partial(
            GrowthMeasurement, device=device, least_bytes=least_bytes, ignore=ignore
        )
        self._warmup = warmup
        self._measurements: list[GrowthMeasurement] = []

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
    lines = [f"{what} left {total} behind:", *(f"  {one}" for one in entries[:SHOWN])]
    if len(entries) > SHOWN:
        lines.append(f"  and {len(entries) - SHOWN} more")
    lines.append(advice)
    return "\n".join(lines)


def _raise_growth(what: str, entries: tuple[LiveEntry, ...]) -> None:
    if entries:
        advice = (
            "If it is made only once, such as a lazy buffer, run the code once before, or decorate "
            "with warmup=1. If it is a cache that is meant, pass its owner as ignore=."
        )
        raise MemoryGrowthError(describe_growth(what, entries, advice), entries)
